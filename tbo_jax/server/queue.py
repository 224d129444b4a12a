"""The bound on what is under way: tokens of prompts, and of what may be generated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tbo_jax.server.errors import ApiError

RETRY_SECONDS = 1  # after which a client should ask again


class TokenQueue:
    """Counts the tokens that the requests under way may need, and bounds them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = 0

    @contextmanager
    def hold(self, tokens: int) -> Iterator[None]:
        """Hold the place of a request as long as it is under way.

        A request that is alone always has a place.

        Raises:
            ApiError: 429: there is none now.
        """
        if self.tokens and self.tokens + tokens > self.most:
            raise ApiError(
                429,
                f"the queue is full: {self.tokens} of {self.most} tokens, and this request may "
                f"need {tokens}; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self.tokens += tokens
        try:
            yield
        finally:
            self.tokens -= tokens
