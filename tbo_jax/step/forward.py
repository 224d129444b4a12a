"""The step of a device: split the batch, run the layers, bring the rows together. Pure, traced."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

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
) -> tuple[jax.Array, AttentionBuffers]:
    """Run a batch through the model in so many micro-batches.

    Args:
        model: with this device's weights.
        buffers: of this rank.
        batch: of this rank, of the shape of `bucket`.
        bucket, micro_batches: static.
        kernels, exchange, tensor: what computes and what communicates.
        logits: of which tokens.
        inputs: which optional fields `batch` has.

    Returns:
        Logits float32 [B, V] or [T, V], and the buffers.
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
    if logits == "last":
        tokens = jnp.maximum(batch.cu_query_lens[1:] - 1, 0)
    else:
        tokens = jnp.arange(batch.token_capacity, dtype=jnp.int32)
    chosen = gather_tokens(hidden, parts, tokens)
    kept = buffers.work[len(work) :]  # a step that is not split leaves the others' buffers
    return model.logits(chosen), AttentionBuffers(cache, (*work, *kept))


def _rotary(model: CausalLM, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each token, from its sequence's own table if there is one."""
    if batch.rotary_tables is None:
        return rotary_table(model.config.rotary, batch.positions)
    live = live_tokens(batch)
    rows, positions = (jnp.where(live, a, 0) for a in (batch.sequence_ids, batch.positions))
    return look_up_rotary(batch.rotary_tables, rows, positions)
