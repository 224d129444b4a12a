"""What a body asks for, as `SamplingParams`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from tbo_jax.sampling.params import MAX_SEED, SamplingParams
from tbo_jax.server.errors import ApiError, refused
from tbo_jax.server.protocol import ResponseFormat, _Sampling
from tbo_jax.text import DefaultSampling

MAX_STOP = 64  # strings: a text is searched for each of them
MAX_BIAS = 1024  # ids of `logit_bias`, as of other lists of ids and words
MAX_STRUCTURE = 2**18  # characters of a schema or grammar: it is compiled
_ALIKE = (  # fields of bodies and of `SamplingParams`
    *("frequency_penalty", "presence_penalty", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "stop"),
)
_STRUCTURED = {  # vLLM's names and ours
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def sampling_params(body: _Sampling, defaults: DefaultSampling, **further: Any) -> SamplingParams:
    """The params of a body, with a seed.

    Args:
        body: of a completion or a chat.
        defaults: those of the model, for what the body leaves open. What they leave open as well is
            OpenAI's: temperature 1.
        further: fields that the body has another form of.

    Raises:
        ApiError: 400: a value out of range; it names the field.
    """
    given = {name: getattr(body, name) for name in _ALIKE}
    given = {name: value for name, value in given.items() if value is not None}
    if body.stop is not None:
        given["stop"] = _few("stop", [body.stop] if isinstance(body.stop, str) else body.stop)
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        _few(name, given.get(name, ()), MAX_BIAS)
    if body.logit_bias:
        given["logit_bias"] = _bias(body.logit_bias)
    given |= bounded(_structure(body))
    given |= {name: value for name, value in further.items() if value is not None}
    return make_params(given, defaults)


def make_params(given: Mapping[str, Any], defaults: DefaultSampling) -> SamplingParams:
    """`SamplingParams` of some fields; as `sampling_params`."""
    known = {"temperature": 1.0, **defaults.values, **given}
    known.setdefault("seed", secrets.randbelow(MAX_SEED))
    try:
        return SamplingParams(**known)
    except ValueError as error:
        raise of_params(error) from None


def of_params(error: ValueError) -> ApiError:
    """The answer to what `SamplingParams` or an engine refuse, with the field that it names."""
    message = str(error)
    if message.startswith("SamplingParams."):
        name = message.removeprefix("SamplingParams.").split(" ", 1)[0].rstrip(":")
        return ApiError(400, f"{message.removeprefix('SamplingParams.'):.500}", param=name)
    return ApiError(400, f"{message:.500}")


def _few(name: str, values: Any, most: int = MAX_STOP) -> Any:
    if len(values) > most:
        raise refused(name, f"has {len(values)} entries: expected at most {most}")
    return values


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    _few("logit_bias", given, MAX_BIAS)
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise refused("logit_bias", f"has the key {key!r:.80}: expected a token id")
        if not -100 <= value <= 100:
            raise refused("logit_bias", f"has the value {value}: expected from -100 to 100")
    return {int(key): value for key, value in given.items()}


def _structure(body: _Sampling) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if body.response_format is not None:
        found |= structure_of_format(body.response_format)
    if body.structured_outputs is not None:
        for name, ours in _STRUCTURED.items():
            value = getattr(body.structured_outputs, name)
            if value not in (None, False):
                found[ours] = value
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found[_STRUCTURED[name]] = value
    return found


def bounded(structure: dict[str, Any]) -> dict[str, Any]:
    """The same; ApiError 400 for one that is too long to be looked at."""
    for name, value in structure.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value)
        if len(text) > MAX_STRUCTURE:
            raise refused(name, f"has {len(text)} characters: expected at most {MAX_STRUCTURE}")
    return structure


def is_structured(body: _Sampling) -> bool:
    """Whether a body says which texts are allowed."""
    return bool(_structure(body))


def structure_of_format(asked: ResponseFormat) -> dict[str, Any]:
    """What a `response_format` allows, as fields of `SamplingParams`."""
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.type == "text":
        return {}
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise refused("response_format.json_schema.schema", "is missing")
    # As text, so that nobody walks a deep one twice.
    return {"json_schema": msgspec.json.encode(asked.json_schema.schema).decode()}
