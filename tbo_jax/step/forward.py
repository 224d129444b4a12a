"""The step of a device: split the batch, run the layers, bring the rows together. Pure, traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from tbo_jax.attention.buffers import AttentionBuffers
from tbo_jax.layers.context import LayerContext, PagedAttention, live_tokens
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.layers.rotary import look_up_rotary, rotary_table
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.overlap.split import gather_tokens, split_batch_decoder_layers
from tbo_jax.overlap.stages import run_layers
from tbo_jax.parallel.exchange import Exchange
from tbo_jax.parallel.tensor_parallel import TensorParallel
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.kernels import Kernels
from tbo_jax.step.shapes import Bucket

LogitRows = Literal["last", "all"]  # logits of the last token of each sequence, or of all tokens
TOKENS_AT_A_TIME = 128  # whose logits `EachToken` sees together


@dataclass(frozen=True)
class EachToken:
    """What is made of the logits of all tokens, a block at a time: [T, V] is never held.

    Attributes:
        targets: [T] int32; of a token below 0 nothing is wanted. A block without others costs
            nothing.
        of_block: (logits float32 [N, V], targets [N]) -> [N, ...].
    """

    targets: jax.Array
    of_block: Callable[[jax.Array, jax.Array], jax.Array]


def forward(
    model: CausalLM,
    buffers: AttentionBuffers,
    batch: ForwardBatch,
    *,
    bucket: Bucket,
    micro_batches: int,
    kernels: Kernels,
    exchange: Exchange,
    tensor: TensorParallel,
    logits: LogitRows,
    inputs: Inputs,
    slots: jax.Array | None = None,
    each: EachToken | None = None,
) -> tuple[Any, AttentionBuffers]:
    """Run a batch through the model in so many micro-batches.

    Args:
        model: with this device's weights.
        buffers: of this rank.
        batch: of this rank, of the shape of `bucket`.
        bucket, micro_batches: static.
        kernels, exchange, tensor: what computes and what communicates.
        logits: of which tokens, unless `slots` says it.
        inputs: which optional fields `batch` has.
        slots: [L] int32, of which token slots.
        each: what else is wanted of the logits of all tokens.

    Returns:
        Logits float32 [B, V], [T, V] or [L, V], and the buffers. With `each` the first is a pair:
        the logits, and what `each` makes of all tokens, [T, ...].
    """
    parts: tuple[ForwardBatch, ...] = (batch,)
    if micro_batches > 1:
        image = model.config.image_token_id if inputs.keeps_images(bucket) else None
        spans = inputs.keeps_spans(bucket)
        parts = split_batch_decoder_layers(batch, micro_batches, image, keep_spans=spans)
    block = bucket.query_block or min(kernels.attention.query_block, bucket.tokens)
    work = [
        kernels.attention.plan(part, block, old)
        for part, old in zip(parts, buffers.work, strict=False)
    ]
    contexts = [
        LayerContext(
            attention=PagedAttention(part, items, block, kernels.attention),
            exchange=exchange,
            rotary=_rotary(model, part),
            live=live_tokens(part),
            tensor=tensor,
            experts=kernels.experts,
        )
        for part, items in zip(parts, work, strict=True)
    ]
    carries = [model.embed(part.token_ids, part.inputs_embeds) for part in parts]
    hidden, cache = run_layers(model.layers, carries, contexts, buffers.cache)
    if slots is not None:
        tokens = slots
    elif logits == "last":
        tokens = jnp.maximum(batch.cu_query_lens[1:] - 1, 0)
    else:
        tokens = jnp.arange(batch.token_capacity, dtype=jnp.int32)
    chosen = gather_tokens(hidden, parts, tokens)
    kept = buffers.work[len(work) :]  # a step that is not split leaves the others' buffers
    after = AttentionBuffers(cache, (*work, *kept))
    found = model.logits(chosen)
    if each is None:
        return found, after
    everything = jnp.arange(batch.token_capacity, dtype=jnp.int32)
    return (found, _of_each(model, gather_tokens(hidden, parts, everything), each)), after


def _of_each(model: CausalLM, hidden: jax.Array, each: EachToken) -> jax.Array:
    """What `each` makes of the logits of hidden states [T, D]; 0 where nothing is wanted."""
    capacity = len(hidden)
    size = min(TOKENS_AT_A_TIME, capacity)
    count = -(-capacity // size)
    numbers = jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)
    targets = jnp.take(each.targets, numbers, mode="fill", fill_value=-1)

    def describe(numbers: jax.Array, targets: jax.Array) -> jax.Array:
        rows = jnp.take(hidden, numbers, axis=0, mode="clip")
        return each.of_block(model.logits(rows), targets)

    shape = jax.eval_shape(describe, numbers[0], targets[0])

    def of_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        nothing = jnp.zeros(shape.shape, shape.dtype)
        wanted = jnp.any(block[1] >= 0)
        found: jax.Array = lax.cond(wanted, describe, lambda *_: nothing, *block)
        return found

    found = lax.map(of_block, (numbers, targets))
    return found.reshape(count * size, *found.shape[2:])[:capacity]


def _rotary(model: CausalLM, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each token, from its sequence's own table if there is one."""
    if batch.rotary_tables is None:
        return rotary_table(model.config.rotary, batch.positions)
    live = live_tokens(batch)
    rows, positions = (jnp.where(live, a, 0) for a in (batch.sequence_ids, batch.positions))
    return look_up_rotary(batch.rotary_tables, rows, positions)
