"""A config.json of Hugging Face, read with precise errors."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.rotary import YarnScaling
from tbo_jax.models.hf_rotary import read_rotary

MOST_SIZE = 2**31 - 1  # what the indices of a device count up to
MOST_PARTS = 10_000  # layers, heads, experts: of each there is an object
MOST_FLOAT = float(np.finfo(np.float32).max)


SLIDING, FULL = "sliding_attention", "full_attention"
SILU = ("silu", "swish")  # two names of one function


class HfConfig:
    """A config.json read with precise errors: every key that is needed, of the right type.

    `source` says in errors where `values` are from.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values = values
        self.source = source

    def __contains__(self, key: str) -> bool:
        """Whether there is a value; null is none."""
        return self.values.get(key) is not None

    def nested(self, key: str) -> HfConfig:
        """The object at `key`; an empty one where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.source}: {key} must be an object, got {reprlib.repr(value)}")
        return HfConfig(value or {}, f"{self.source}: {key}")

    def number(
        self,
        key: str,
        default: Any = None,
        kind: type[int] | type[float] = int,
        *,
        above: float = 0,
        least: float | None = None,
        most: float | None = None,
    ) -> Any:
        """A number at `key`, or `default` when the key is absent or null.

        It is finite, and as an integer at most `MOST_SIZE`, as a float within float32.

        Raises:
            ValueError: missing without a default, of the wrong type, not above `above`, or where
                `least` is given below that, or more than `most`.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.source}: {key} is missing")
        found = reprlib.repr(value)
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise ValueError(f"{self.source}: {key} must be {kind.__name__}, got {found}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.source}: {key} must be finite, got {found}")
        if least is not None and value < least:
            raise ValueError(f"{self.source}: {key} must be at least {least}, got {found}")
        if least is None and value <= above:
            expected = f"above {above}" if above else "positive"
            raise ValueError(f"{self.source}: {key} must be {expected}, got {found}")
        limit = most if most is not None else MOST_FLOAT if kind is float else MOST_SIZE
        if value > limit:
            shown = f"{limit:g}" if kind is float else f"{limit:,}"
            raise ValueError(f"{self.source}: {key} must be at most {shown}, got {found}")
        return kind(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A true or false at `key`, or `default` when the key is absent or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key} must be true or false, got {value!r}")
        return value

    def expect(self, key: str, *accepted: Any) -> None:
        """Refuse a setting that changes the network and is not supported."""
        value = self.values.get(key, accepted[0])
        if value not in accepted:
            allowed = ", ".join(map(repr, accepted))
            raise ValueError(f"{self.source}: {key}={value!r} is not supported, expected {allowed}")

    def only(self, *keys: str) -> None:
        """Refuse any other key, unless it is null."""
        for key in self.values:
            if key in self and key not in keys:
                raise ValueError(
                    f"{self.source}: {key} is not supported, expected {', '.join(keys)}"
                )

    def no_windows(self) -> None:
        """Refuse layers with a sliding window in a model whose windows are off."""
        if len(self.full_attention_layers(range(self.num_layers))) < self.num_layers:
            raise ValueError(
                f"{self.source}: layer_types has {SLIDING!r}, but no sliding window is in use: "
                f"expected {FULL!r} for all layers"
            )

    @property
    def num_layers(self) -> int:
        """`num_hidden_layers`."""
        return self.number("num_hidden_layers", most=MOST_PARTS)

    def num_experts(self, *keys: str) -> int:
        """The number of experts, at the first of `keys` that there is."""
        key = next((key for key in keys if key in self), keys[0])
        return self.number(key, most=MOST_PARTS)

    def full_attention_layers(self, default: Iterable[int]) -> frozenset[int]:
        """The layers without a sliding window by `layer_types`, or `default` without that key."""
        types = self.values.get("layer_types")
        if types is None:
            return frozenset(default)
        if not isinstance(types, list) or len(types) != self.num_layers:
            raise ValueError(
                f"{self.source}: layer_types must list {self.num_layers} layers, got {types!r}"
            )
        if unknown := [kind for kind in types if kind not in (SLIDING, FULL)]:
            raise ValueError(
                f"{self.source}: layer type {unknown[0]!r} is not supported, expected "
                f"{SLIDING!r} or {FULL!r}"
            )
        return frozenset(i for i, kind in enumerate(types) if kind == FULL)

    def epsilon(self, default: float) -> float:
        """`rms_norm_eps`."""
        return self.number("rms_norm_eps", default, float, most=1.0)

    def common(
        self,
        dtype: Any,
        *,
        default_head_dim: int | None = None,
        default_theta: float = 10000.0,
        default_partial_rotary: float | None = None,
        interleaved_rotary: bool = False,
        mrope: bool = False,
        **extra: Any,
    ) -> DecoderConfig:
        """The keys that all decoders of the Llama line share, with `extra` fields on top.

        Args:
            dtype: of weights and compute.
            default_head_dim: None: hidden size over heads.
            default_theta, default_partial_rotary, interleaved_rotary, mrope: see
                `read_rotary`.
            extra: fields of `DecoderConfig`, in place of what the keys say.

        Raises:
            ValueError: a key that is missing, of the wrong type, or not supported.
        """
        self.expect("hidden_act", *SILU)
        hidden = self.number("hidden_size")
        heads = self.number("num_attention_heads", most=MOST_PARTS)
        kv_heads = self.number("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"{self.source}: {heads} attention heads do not divide into {kv_heads} "
                "key/value heads"
            )
        head_dim = self.number("head_dim", default_head_dim or hidden // heads)
        if head_dim % 2:
            raise ValueError(
                f"{self.source}: head_dim {head_dim} is odd, rotary pairs need it even"
            )
        rotary = extra.get("rotary") or read_rotary(
            self,
            head_dim,
            theta=default_theta,
            partial=default_partial_rotary,
            interleaved=interleaved_rotary,
            mrope=mrope,
        )
        context = self.number("max_position_embeddings", 2048)
        if isinstance(rotary.scaling, YarnScaling):  # which some files leave at the original
            context = rotary.scaling.context
        fields: dict[str, Any] = dict(
            model_type=self.values.get("model_type"),
            vocab_size=self.number("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.number("intermediate_size"),
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.epsilon(1e-6),
            max_position_embeddings=context,
            rotary=rotary,
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            attention_bias=self.flag("attention_bias"),
            attention_output_bias=self.flag("attention_bias"),
            initializer_range=self.number("initializer_range", 0.02, float),
            dtype=dtype,
        )
        config = DecoderConfig(**(fields | extra))
        if config.router is not None:
            try:
                config.router.check(config.num_experts)
            except ValueError as error:
                raise ValueError(f"{self.source}: {error}") from error
        return config
