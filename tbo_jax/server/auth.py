"""Who asks: API keys, and the prefix-cache salt that follows from them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from tbo_jax.server.errors import ApiError


class Keys:
    """The API keys of a server. Without any, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that the time of a comparison does not tell that of a key.
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def check(self, headers: Headers) -> str:
        """The salt of who asks: prompts of one key share pages of the prefix cache, others do not.

        Raises:
            ApiError: 401: there are keys, and none of them was given.
        """
        if not self._digests:
            return ""
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong: expected the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return hashlib.sha256(b"prefix cache of " + digest).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
