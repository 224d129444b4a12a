"""What the batches of a runner hold beside tokens: its programs are compiled for that."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.step.shapes import Bucket, CacheConfig


@dataclass(frozen=True)
class Inputs:
    """Which optional parts of a `ForwardBatch` every batch of a runner has; no others are taken."""

    mrope: bool = False  # positions [3, T]: temporal, height, width
    embeds: bool = False  # inputs_embeds, of the tokens with the model's image_token_id

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

    def check(self, batch: ForwardBatch) -> None:
        """ValueError if a batch of R ranks has other fields."""
        if batch.mask_offsets is not None or batch.rotary_tables is not None:
            raise ValueError(
                "mask_offsets and rotary_tables are split, but no model here reads them"
            )
        expected = "[R, 3, T]" if self.mrope else "[R, T]"
        if batch.positions.ndim != (3 if self.mrope else 2):
            raise ValueError(
                f"positions must be {expected} with {self}, got shape {batch.positions.shape}"
            )
        if (batch.inputs_embeds is not None) != self.embeds:
            given = "no" if batch.inputs_embeds is None else "some"
            raise ValueError(f"got {given} inputs_embeds with {self}")

    def cuts_anywhere(self, bucket: Bucket) -> bool:
        """Whether a micro-batch may get all tokens, because runs of image tokens stay whole.

        A decode step has no runs: its sequences' tokens are text that was sampled.
        """
        return self.embeds and not bucket.decode

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
        positions = shapes.positions
        if self.mrope:
            shape = (ranks, 3, bucket.tokens)
            positions = jax.ShapeDtypeStruct(shape, positions.dtype)
        embeds = None
        if self.embeds:
            shape = (ranks, bucket.tokens, config.hidden_size)
            embeds = jax.ShapeDtypeStruct(shape, config.dtype)
        return dataclasses.replace(shapes, positions=positions, inputs_embeds=embeds)
