"""Rotary positions as a Hugging Face config.json describes them.

Where settings may stand in several places this follows transformers 5; where two places contradict
each other it refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tbo_jax.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    Scaling,
    YarnScaling,
)

if TYPE_CHECKING:  # it imports this module
    from tbo_jax.models.hf_config import HfConfig

SUPPORTED = ("default", "linear", "llama3", "yarn")
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"


def read_rotary(
    hf: HfConfig,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    mrope: bool = False,
) -> RotaryConfig:
    """Read `rope_parameters`, or `rope_scaling` of older files, and what stands beside them.

    `rope_theta` and `partial_rotary_factor` count in the object, else beside it.

    Args:
        hf: config.json.
        head_dim: dimensions of a head.
        theta: where the file has none.
        partial: `partial_rotary_factor` where the file has none; None: the architecture has no
            such option, and anything but 1 is refused.
        interleaved: see `apply_rotary`.
        mrope: the architecture has M-RoPE; without, sections are refused.

    Raises:
        ValueError: a scaling type or a key that is not supported, or one that is missing; two
            sources of one setting that differ; a number that is not finite or out of range; a
            number of rotated dimensions that is no even number up to `head_dim`.
    """
    given = _one_source(hf)
    kind = _kind(given)
    sections = _sections(given, kind) if mrope else None
    kind = "default" if mrope and kind == "mrope" else kind
    if kind not in SUPPORTED:
        raise ValueError(
            f"{given.source}: RoPE scaling type {kind!r} is not supported: expected one of "
            f"{', '.join(SUPPORTED)}"
        )
    if not mrope and "mrope_section" in given:
        raise ValueError(f"{given.source}: mrope_section is not supported by this architecture")
    holder = given if "partial_rotary_factor" in given else hf
    share = holder.number("partial_rotary_factor", partial or 1.0, float, most=1)
    if partial is None and share != 1:
        raise ValueError(
            f"{holder.source}: partial_rotary_factor {share} is not supported: expected 1.0"
        )
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"{hf.source}: {dim} dimensions of a head of {head_dim} would be rotated: pairs need "
            "an even number, 2 or more"
        )
    if sections is not None and sum(sections) != dim // 2:
        raise ValueError(
            f"{given.source}: mrope_section {list(sections)} must be {dim // 2} frequencies in "
            f"all, as many as a head of {dim} rotated dimensions has"
        )
    # One is no base: nothing would turn faster than anything else.
    base = (given if "rope_theta" in given else hf).number("rope_theta", theta, float, above=1)
    scaling = _scaling(hf, given, kind, ("mrope_section", "mrope_interleaved") if mrope else ())
    return RotaryConfig(dim, base, scaling, interleaved, sections)


def _one_source(hf: HfConfig) -> HfConfig:
    """`rope_parameters` or `rope_scaling`, whichever there is."""
    new, old = hf.nested("rope_parameters"), hf.nested("rope_scaling")
    if not (new.values and old.values):
        return new if new.values else old

    def settings(source: HfConfig) -> dict[str, Any]:
        kind = _kind(source)
        named = {"rope_type": "default" if kind == "mrope" else kind}
        skipped = ("type", "rope_type")
        return named | {k: v for k, v in source.values.items() if k in source and k not in skipped}

    first, second = settings(new), settings(old)
    base = {"rope_theta": first.get("rope_theta", second.get("rope_theta"))}
    if base | first != base | second:
        raise ValueError(
            f"{hf.source}: rope_parameters {dict(new.values)!r} and rope_scaling "
            f"{dict(old.values)!r} differ: expected one of them"
        )
    return new if "rope_theta" in new else old


def _kind(given: HfConfig) -> str:
    named, legacy = given.values.get("rope_type"), given.values.get("type")
    # Transformers 5 saves Qwen2-VL's as default beside mrope.
    if named and legacy and named != legacy and (named, legacy) != ("default", "mrope"):
        raise ValueError(
            f"{given.source}: rope_type {named!r} and type {legacy!r} differ: expected one of them"
        )
    return named or legacy or "default"


def _scaling(hf: HfConfig, given: HfConfig, kind: str, further: tuple[str, ...]) -> Scaling | None:
    """The scaling of type `kind`; any key that it has no use for is refused."""
    known = (*_COMMON, *further)
    if kind == "default":
        given.only(*known)
        return None
    if kind == "linear":
        given.only(*known, "factor")
        return LinearScaling(given.number("factor", kind=float))
    if kind == "llama3":
        given.only(*known, "factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
        low = given.number("low_freq_factor", kind=float)
        return Llama3Scaling(
            factor=given.number("factor", kind=float),
            low_freq_factor=low,
            high_freq_factor=given.number("high_freq_factor", kind=float, above=low),
            original_context=_original_context(hf, given),
        )
    return _yarn(hf, given, known)


def _yarn(hf: HfConfig, given: HfConfig, known: tuple[str, ...]) -> YarnScaling:
    given.only(
        *known, "factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate", "mscale",
        "mscale_all_dim", "attention_factor", "attn_factor", "extrapolation_factor",
        "apply_yarn_scaling",
    )  # fmt: skip
    given.expect("extrapolation_factor", 1, None)
    given.expect("apply_yarn_scaling", True, None)
    if "attention_factor" in given and "attn_factor" in given:
        raise ValueError(
            f"{given.source}: attention_factor, in place of the formula's, and attn_factor, on top "
            "of it, contradict each other: expected one of them"
        )
    slow = given.number("beta_slow", 1.0, float)
    absolute = "attention_factor" in given
    scaling = YarnScaling(
        factor=given.number("factor", kind=float),
        original_context=_original_context(hf, given),
        beta_fast=given.number("beta_fast", 32.0, float, least=slow),
        beta_slow=slow,
        truncate=given.flag("truncate", True),
        mscale=given.number("mscale", 0.0, float, least=0),
        mscale_all_dim=given.number("mscale_all_dim", 0.0, float, least=0),
        attention_factor=given.number("attention_factor", kind=float) if absolute else None,
        attn_factor=given.number("attn_factor", 1.0, float),
    )
    if not 1 <= scaling.context < 2**31:
        raise ValueError(
            f"{given.source}: a context of {scaling.original_context} tokens times factor "
            f"{scaling.factor} is out of range"
        )
    return scaling


def _original_context(hf: HfConfig, given: HfConfig) -> int:
    """`original_max_position_embeddings`, which some files keep beside the object."""
    inside, beside = given.values.get(_ORIGINAL), hf.values.get(_ORIGINAL)
    if inside is not None and beside is not None and inside != beside:
        raise ValueError(
            f"{given.source}: {_ORIGINAL} {inside!r} and the {beside!r} beside it differ: expected "
            "one of them"
        )
    holder = hf if inside is None else given
    number: int = holder.number(_ORIGINAL, hf.number("max_position_embeddings", 2048))
    return number


def _sections(given: HfConfig, kind: str) -> tuple[int, ...] | None:
    """The numbers of frequencies of M-RoPE."""
    if given.flag("mrope_interleaved"):
        raise ValueError(
            f"{given.source}: mrope_interleaved true is not supported: expected sections side by "
            "side"
        )
    sections = given.values.get("mrope_section")
    if sections is None and kind != "mrope":
        return None
    numbers = sections if isinstance(sections, list | tuple) else []
    if len(numbers) != 3 or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(
            f"{given.source}: mrope_section must be three positive integers, got {sections!r}"
        )
    return tuple(numbers)
