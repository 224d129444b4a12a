"""The sizes that the scheduler keeps to, and the requests that they rule out or end."""

from __future__ import annotations

from dataclasses import dataclass

from tbo_jax.engine.scheduling.request import Request
from tbo_jax.overlap.checks import whole_number


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens that a step and a request may have. Raises ValueError for sizes that cannot work."""

    page_size: int  # tokens of a page
    num_pages: int  # of each rank's pool, page 0 (padding) included
    max_sequences: int  # rows of a rank
    max_tokens: int  # of a rank in a step
    max_context: int  # of a request, prompt and generated together

    def __post_init__(self) -> None:
        least = dict(page_size=1, num_pages=2, max_sequences=1, max_tokens=1, max_context=2)
        for name, number in least.items():
            whole_number(name, getattr(self, name), number)
        if self.max_tokens < self.max_sequences:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; expected at least max_sequences, "
                f"{self.max_sequences}, so that a step has room for every row's next token"
            )

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pages of a rank hold."""
        return (self.num_pages - 1) * self.page_size

    def check_prompt(self, request: Request) -> None:
        """ValueError for a prompt that is empty or leaves no room for a token."""
        self.check_length(f"request {request.request_id}", len(request.prompt_token_ids))

    def check_length(self, name: str, length: int) -> None:
        """ValueError, which begins with the name, for a prompt of so many tokens as above."""
        if length == 0:
            raise ValueError(f"{name} has an empty prompt; expected 1 token or more")
        if length > self.max_context - 1:
            raise ValueError(
                f"{name} has a prompt of {length} tokens; expected at most {self.max_context - 1}, "
                f"which leaves room for one more in a context of {self.max_context}"
            )
        if length > self.pool_tokens - 1:
            raise ValueError(
                f"{name} has a prompt of {length} tokens; expected at most "
                f"{self.pool_tokens - 1}, which leaves room for one more in the "
                f"{self.pool_tokens} of a rank's pages"
            )

    def most_tokens(self, request: Request) -> int:
        """The number of tokens, the prompt's included, with which it has all it may get.

        With these it has all it asked for, fills the context, or a rank's pages.
        """
        wanted = len(request.prompt_token_ids) + request.params.max_new_tokens
        return min(wanted, self.max_context, self.pool_tokens)
