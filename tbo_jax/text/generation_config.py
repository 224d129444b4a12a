"""How a model wants to be sampled: the defaults that its `generation_config.json` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text.files import TokenizerError, read_json_object

_TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
# Keys that change the text and that no `SamplingParams` has, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
}


@dataclass(frozen=True)
class DefaultSampling:
    """What `generation_config.json` asks for.

    Attributes:
        values: of fields of `SamplingParams`; those that are missing keep their own defaults.
        not_applied: keys with the values that the file gives and that nothing here can do.
    """

    values: Mapping[str, Any]
    not_applied: Mapping[str, Any]

    def params(self, **given: Any) -> SamplingParams:
        """`SamplingParams` of what a caller gives, and for the rest of what the file asks for."""
        if given.get("max_tokens") is not None:  # which is another name for one of them
            given.setdefault("max_new_tokens", given.pop("max_tokens"))
        return SamplingParams(**{**self.values, **given})

    def message(self) -> str | None:
        """One line for a log of what changes something, or None where nothing does."""
        parts = []
        own = SamplingParams()
        if changed := {k: value for k, value in self.values.items() if value != getattr(own, k)}:
            parts.append(f"default sampling {_listed(changed)}")
        if self.not_applied:
            parts.append(f"not supported, so not applied: {_listed(self.not_applied)}")
        return f"generation_config.json: {'; '.join(parts)}" if parts else None


def default_sampling(folder: str | Path) -> DefaultSampling:
    """The sampling that a model folder asks for.

    As vLLM does by default, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and
    `max_new_tokens` are taken. A file that says `do_sample` is greedy without it, and samples at
    temperature 1 with it unless it gives another one. Other keys that would change the text, such
    as `no_repeat_ngram_size`, are told apart and not applied.

    Raises:
        TokenizerError: a value is of the wrong type or out of range.
    """
    path = Path(folder) / "generation_config.json"
    config = read_json_object(path) or {}
    values = {key: config[key] for key in _TAKEN if config.get(key) is not None}
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise TokenizerError(f"{path}: do_sample: expected true or false, got {do_sample!r:.80}")
    for key, value in values.items():
        try:
            values[key] = getattr(SamplingParams(**{key: value}), key)
        except ValueError as error:
            expected = str(error).rpartition("; ")[2]
            raise TokenizerError(f"{path}: {key} is {value!r:.80}; {expected}") from error
    if do_sample is False:
        values["temperature"] = 0.0
    elif do_sample:
        values.setdefault("temperature", 1.0)
    not_applied = {
        key: config[key]
        for key, neutral in _NEUTRAL.items()
        if config.get(key) is not None and config[key] not in neutral
    }
    return DefaultSampling(values, not_applied)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value!r:.80}" for key, value in values.items())
