"""One request: what it asked for, its tokens so far, and how many of them are in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tbo_jax.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


def unread_token(row: int) -> int:
    """What stands for the token that a row of the step before samples: a number below 0."""
    return -1 - row


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. The scheduler owns every field after the first four.

    Two requests are equal only if they are the same object.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    salt: str = ""  # only requests of the same one share pages
    token_ids: list[int] = field(init=False)  # the prompt's, then the generated ones
    num_computed: int = field(init=False, default=0)  # leading tokens whose keys/values are cached
    pages: list[int] = field(
        init=False, default_factory=list
    )  # page i holds slots i * page_size on
    rank: int | None = field(init=False, default=None)  # where it runs; None while it waits
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)
    arrival: int | None = field(init=False, default=None)  # its place in the order of all requests
    num_preemptions: int = field(init=False, default=0)
    num_cached: int = field(
        init=False, default=0
    )  # tokens of the prompt that were found, not computed

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens so far: the prompt's and the generated ones, one that is not read yet included."""
        return len(self.token_ids)

    @property
    def has_unread(self) -> bool:
        """Whether the last token is still on the device; its place is held by `unread_token`."""
        return self.token_ids[-1] < 0

    @property
    def num_generated(self) -> int:
        """Tokens so far without the prompt's."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def generated_token_ids(self) -> list[int]:
        """Ids of the tokens after the prompt's; a copy."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not in the cache yet; 1 or more while it is unfinished."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefill(self) -> bool:
        """Whether more is to be computed than the one token sampled last."""
        return self.num_uncomputed > 1 or self.num_generated == 0

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None
