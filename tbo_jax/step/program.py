"""What a step takes beside weights and buffers, and what it gives beside the buffers."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.step.forward import EachToken
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.packed import pack_numbers, unpack_numbers
from tbo_jax.step.shapes import Bucket, CacheConfig


class Forward(Protocol):
    """The model, with what `forward` has beside a batch."""

    def __call__(
        self,
        batch: ForwardBatch,
        slots: jax.Array | None = None,
        each: EachToken | None = None,
    ) -> tuple[Any, AttentionBuffers]:
        """What `forward` gives: the logits, or with `each` a pair; and the buffers."""


class StepProgram(Protocol):
    """Makes the batch of a step from its inputs, and its outputs from the logits. R: ranks."""

    def shapes(self, bucket: Bucket) -> tuple[Any, ...]:
        """Shapes and dtypes of the inputs, leaves [R, ...]."""

    def trace(self, bucket: Bucket, forward: Forward, *inputs: Any) -> tuple[Any, AttentionBuffers]:
        """The outputs of one rank, and the buffers, from the inputs of one rank; traced."""

    def placed(self, bucket: Bucket, on_ranks: Any, on_all: Any) -> Any:
        """For each output the first, or the second if each of several processes has it whole."""

    def from_batch(self, bucket: Bucket, batch: ForwardBatch) -> tuple[Any, ...]:
        """Inputs that make a batch with leaves [R, ...]. ValueError if it is none of the bucket."""


class LogitsProgram:
    """Takes whole batches, and gives the logits of their tokens."""

    def __init__(
        self, inputs: Inputs, cache: CacheConfig, config: DecoderConfig, ranks: int
    ) -> None:
        self._inputs = inputs
        self._cache = cache
        self._config = config
        self._ranks = ranks
        self._batches: dict[Bucket, ForwardBatch] = {}

    def shapes(self, bucket: Bucket) -> tuple[Any, ...]:
        """[R, N] int32, and what is left of the batch."""
        shapes = self._batch(bucket)
        return jax.eval_shape(lambda batch: pack_numbers(batch, shapes), shapes)

    def trace(
        self, bucket: Bucket, forward: Forward, *inputs: Any
    ) -> tuple[jax.Array, AttentionBuffers]:
        """Logits float32 [B, V] or [T, V]."""
        numbers, rest = inputs
        return forward(unpack_numbers(numbers, rest, self._batch(bucket)))

    def placed(self, bucket: Bucket, on_ranks: Any, on_all: Any) -> Any:
        """The logits stay on their ranks."""
        return on_ranks

    def from_batch(self, bucket: Bucket, batch: ForwardBatch) -> tuple[Any, ...]:
        """The batch as few arrays; those of numpy are copied."""
        self._inputs.check(batch, self._config)
        return pack_numbers(batch, self._batch(bucket))

    def _batch(self, bucket: Bucket) -> ForwardBatch:
        """Shapes of the batch, which take a while to find."""
        if bucket not in self._batches:
            self._batches[bucket] = self._inputs.abstract_batch(
                bucket, self._cache, self._config, self._ranks
            )
        return self._batches[bucket]
