"""What the batches of a runner hold beside tokens: its programs are compiled for that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.overlap.checks import whole_number
from tbo_jax.step.shapes import Bucket, CacheConfig


@dataclass(frozen=True)
class Inputs:
    """Which optional parts of a `ForwardBatch` every batch of a runner has; no others are taken."""

    mrope: bool = False  # positions [3, T]: temporal, height, width
    embeds: bool = False  # inputs_embeds, of the tokens with the model's image_token_id
    mask_offsets: int = 0  # entries for each token: 1, the first key; 2, first and last
    rotary_tables: int = 0  # L, the positions of each sequence's own table

    def __post_init__(self) -> None:
        if whole_number("mask_offsets", self.mask_offsets, 0) > 2:
            raise ValueError(
                f"mask_offsets must be 0, 1 or 2 entries for each token, got {self.mask_offsets}"
            )
        whole_number("rotary_tables", self.rotary_tables, 0)
        if self.rotary_tables and self.mrope:
            raise ValueError(
                "mrope and rotary_tables exclude each other: a sequence's own table is looked up "
                "at one position of each token"
            )

    def check_model(self, config: DecoderConfig) -> None:
        """ValueError if the model has no use for them."""
        if self.mrope and config.rotary.sections is None:
            raise ValueError(
                f"{config.model_type} has no M-RoPE sections: expected inputs without mrope"
            )
        if self.embeds and config.image_token_id is None:
            raise ValueError(
                f"{config.model_type} has no image_token_id: expected inputs without embeds"
            )

    def check(self, batch: ForwardBatch, config: DecoderConfig) -> None:
        """ValueError if a batch of R ranks has other fields."""
        expected = "[R, 3, T]" if self.mrope else "[R, T]"
        if batch.positions.ndim != (3 if self.mrope else 2):
            raise ValueError(
                f"positions must be {expected} with {self}, got shape {batch.positions.shape}"
            )
        for name, wanted in (
            ("inputs_embeds", self.embeds),
            ("mask_offsets", self.mask_offsets),
            ("rotary_tables", self.rotary_tables),
        ):
            given = "no" if getattr(batch, name) is None else "some"
            if (given == "some") != bool(wanted):
                raise ValueError(f"got {given} {name} with {self}")
        ranks, rows = batch.query_lens.shape
        slots = batch.token_capacity
        shapes = {
            "mask_offsets": (ranks, self.mask_offsets * slots),
            "rotary_tables": (ranks, rows, 2, self.rotary_tables, config.rotary.dim // 2),
        }
        for name, shape in shapes.items():
            value = getattr(batch, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} must have shape {shape} with {self}, got {value.shape}")
        if self.rotary_tables and isinstance(batch.positions, np.ndarray):
            live = np.arange(slots) < np.asarray(batch.num_tokens)[:, None]
            highest = batch.positions.max(where=live, initial=0)
            if highest >= self.rotary_tables:
                raise ValueError(
                    f"position {highest} is beyond the {self.rotary_tables} positions of the "
                    "rotary tables"
                )

    def keeps_images(self, bucket: Bucket) -> bool:
        """Whether runs of image tokens stay whole.

        A decode step has no runs: its sequences' tokens are text that was sampled.
        """
        return self.embeds and not bucket.decode

    def keeps_spans(self, bucket: Bucket) -> bool:
        """Whether tokens stay with later ones that they may see.

        A decode step without drafts has one token of a sequence.
        """
        return self.mask_offsets == 2 and (not bucket.decode or bucket.drafts > 0)

    def cuts_anywhere(self, bucket: Bucket) -> bool:
        """Whether a micro-batch may get all tokens, because some must stay together."""
        return self.keeps_images(bucket) or self.keeps_spans(bucket)

    def abstract_batch(
        self, bucket: Bucket, cache: CacheConfig, config: DecoderConfig, ranks: int
    ) -> ForwardBatch:
        """Shapes and dtypes of a batch, leaves [R, ...]."""
        batch = ForwardBatch.pack(
            [], [], [],
            token_capacity=bucket.tokens,
            sequence_capacity=bucket.sequences,
            pages_per_sequence=cache.pages_per_sequence,
        )  # fmt: skip
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((ranks, *a.shape), a.dtype), batch)

        def of(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((ranks, *shape), dtype)

        more: dict[str, Any] = {}
        if self.mrope:
            more["positions"] = of(3, bucket.tokens, dtype=jnp.int32)
        if self.embeds:
            more["inputs_embeds"] = of(bucket.tokens, config.hidden_size, dtype=config.dtype)
        if self.mask_offsets:
            more["mask_offsets"] = of(self.mask_offsets * bucket.tokens, dtype=jnp.int32)
        if self.rotary_tables:
            table = 2, self.rotary_tables, config.rotary.dim // 2
            more["rotary_tables"] = of(bucket.sequences, *table, dtype=jnp.float32)
        return dataclasses.replace(shapes, **more)
