"""What went wrong with a request, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {  # by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for people; it names the value and what was expected.
        param: the field that is wrong, if it is one.
        code: for programs, such as "model_not_found".
        headers: further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        fields = {"message": self.message, "type": self.type}
        return {"error": {**fields, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        return json_response(self.body(), self.status, self.headers)


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that cannot be what it is; `message` begins with what follows the field's name."""
    return ApiError(400, f"{param} {message}", param=param, code=code)


def not_supported(param: str, why: str = "") -> ApiError:
    """A field of OpenAI's or vLLM's that this server does not have."""
    more = f": {why}" if why else ""
    return refused(param, f"is not supported{more}", "unsupported_parameter")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer of JSON."""
    body = msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")
