"""One request: what it asked for, its tokens so far, and how many of them are in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tbo_jax.sampling.logprobs import PromptLogprobs
from tbo_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tbo_jax.engine.scheduling.rows import Rows

FinishReason = Literal["stop", "length", "abort", "error"]


def unread_token(row: int) -> int:
    """What stands for the token that a row of the step before samples: a number below 0."""
    return -1 - row


def checked_priority(priority: Any) -> int:
    """The priority of a request. ValueError if it is no integer."""
    if not isinstance(priority, int | np.integer) or isinstance(priority, bool):
        raise ValueError(f"priority is {priority!r:.80}: expected an integer")
    return int(priority)


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. The scheduler owns every field after the first nine.

    While it decodes, what changes in each step is in the arrays of `rows`, and read from there.

    Two requests are equal only if they are the same object.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    salt: str = ""  # only requests of the same one share pages
    seed: int = 0  # of what it draws
    flags: int = 0  # for whoever commits its steps (`Rows.flags`)
    priority: int = 0  # the lower, the earlier its turn; among equals the order is of arrival
    prompt_logprobs: PromptLogprobs | None = None  # where those of its prompt were asked for
    takes_drafts: bool = True  # whether drafts of it may be verified
    pages: list[int] = field(
        init=False, default_factory=list
    )  # page i holds slots i * page_size on
    num_dropped: int = field(init=False, default=0)  # leading pages given up: 0 stands for each
    rank: int | None = field(init=False, default=None)  # where it runs; None while it waits
    row: int | None = field(init=False, default=None)  # of its rank, all the time that it runs
    rows: Rows | None = field(init=False, default=None, repr=False)  # while it decodes
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)
    arrival: int | None = field(init=False, default=None)  # how many came before it
    num_preemptions: int = field(init=False, default=0)
    num_cached: int = field(
        init=False, default=0
    )  # tokens of the prompt that were found, not computed
    known: list[int] = field(init=False, repr=False)  # `token_ids`, but for those in `rows`
    computed: int = field(init=False, default=0, repr=False)  # `num_computed` while not in `rows`

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.known = list(self.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The prompt's, then the generated ones; the place of one not read is held."""
        if self.rows is not None:
            self.rows.fetch(self)
        return self.known

    @property
    def num_tokens(self) -> int:
        """Tokens so far: the prompt's and the generated ones, one that is not read yet included.

        Where that is of a step with drafts, these may be more.
        """
        if self.rows is not None:
            return int(self.rows.num_tokens[self.rank, self.row])
        return len(self.known)

    @property
    def num_computed(self) -> int:
        """Leading tokens whose keys and values are in the cache; of a decode all but the last."""
        return self.computed if self.rows is None else self.num_tokens - 1

    @property
    def has_unread(self) -> bool:
        """Whether the last token is still on the device; its place is held by `unread_token`."""
        return self.token_ids[-1] < 0

    @property
    def num_generated(self) -> int:
        """Tokens so far without the prompt's."""
        return self.num_tokens - len(self.prompt_token_ids)

    @property
    def generated_token_ids(self) -> list[int]:
        """Ids of the tokens after the prompt's; a copy."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not in the cache yet; 1 or more while it is unfinished."""
        return self.num_tokens - self.num_computed

    @property
    def num_findable(self) -> int:
        """Leading tokens that need not be computed where their keys and values are found.

        Of the others the logits are wanted too, for the log-probabilities of the prompt.
        """
        told = self.prompt_logprobs
        return self.num_tokens if told is None or told.is_whole else told.num_told

    @property
    def num_prompt_left(self) -> int:
        """Tokens of the prompt that are not in the cache yet."""
        return max(0, len(self.prompt_token_ids) - self.num_computed)

    @property
    def is_prefill(self) -> bool:
        """Whether more is to be computed than the one token sampled last."""
        return self.num_uncomputed > 1 or self.num_generated == 0

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None
