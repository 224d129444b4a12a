"""A config.json of Hugging Face, read with precise errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.hf_rotary import read_rotary


class HfConfig:
    """A config.json read with precise errors: every key that is needed, of the right type."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values = values
        self.source = source

    def number(
        self, key: str, default: Any = None, kind: type = int, *, least: int | None = None
    ) -> Any:
        """A number at `key`, or `default` when the key is absent or null.

        Raises:
            ValueError: missing without a default, of the wrong type, below `least`, or not positive
                where `least` is None.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.source}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise ValueError(f"{self.source}: {key} must be {kind.__name__}, got {value!r}")
        if least is not None and value < least:
            raise ValueError(f"{self.source}: {key} must be at least {least}, got {value!r}")
        if least is None and value <= 0:
            raise ValueError(f"{self.source}: {key} must be positive, got {value!r}")
        return kind(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A true or false at `key`."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {key} must be true or false, got {value!r}")
        return value

    def expect(self, key: str, *accepted: Any) -> None:
        """Refuse a setting that changes the network and is not supported."""
        value = self.values.get(key, accepted[0])
        if value not in accepted:
            allowed = ", ".join(map(repr, accepted))
            raise ValueError(f"{self.source}: {key}={value!r} is not supported, expected {allowed}")

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
        self.expect("hidden_act", "silu")
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
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
        fields: dict[str, Any] = dict(
            model_type=self.values["model_type"],
            vocab_size=self.number("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.number("intermediate_size"),
            num_layers=self.number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6, float),
            max_position_embeddings=self.number("max_position_embeddings", 2048),
            rotary=read_rotary(
                self.values,
                head_dim,
                theta=default_theta,
                partial=default_partial_rotary,
                interleaved=interleaved_rotary,
                mrope=mrope,
            ),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            attention_bias=self.flag("attention_bias"),
            attention_output_bias=self.flag("attention_bias"),
            initializer_range=self.number("initializer_range", 0.02, float),
            dtype=dtype,
        )
        config = DecoderConfig(**(fields | extra))
        if config.num_experts:
            try:
                config.router.check(config.num_experts)
            except ValueError as error:
                raise ValueError(f"{self.source}: {error}") from error
        return config
