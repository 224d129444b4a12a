"""Paged attention on GPU: one Pallas (Triton) kernel for ragged batches of prefill and decode.

A program takes the queries of one work item that share a key/value head, 64 rows of them at most,
and a part of their keys; the softmax runs over key blocks as in FlashAttention (Dao et al. 2022). A
step with few rows splits the context over several programs, so that a few long rows fill the chip
(flash-decoding, Dao et al. 2023), and the parts are brought together afterwards. Keys are read
where they lie.

Of latent pages a block is read once, for its keys and for its values. A key of 512 + 64 elements is
two blocks, the one that is the value too and the rest, since Triton has powers of two only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import triton as plgpu
from tbo_jax.attention.kernel import (
    AttentionKernel,
    AttentionLoad,
    AttentionShape,
    visible_keys,
    written_keys,
)
from tbo_jax.attention.rounded import numbers
from tbo_jax.attention.work import num_work_items

KEY_BLOCK, KEY_BYTES = 64, 2**14  # keys of one turn of the loop, and bytes of them, at most
LATENT_KEY_BYTES = 2**15  # the same where keys are values too
QUERY_ROWS = 64  # queries x heads of a program, at most
# The same of float32, and of its heads of more than 128, and its keys. It has no tensor cores, and
# a thread keeps what it multiplies in registers. With 32 rows and 4 warps a thread of an H100 spilt
# 9,056 bytes of heads of 256, and 20,464 of latents of 512 (ptxas 12.9); so it spills nothing.
FLOAT_ROWS, WIDE_ROWS, FLOAT_KEYS = 32, 16, 32
SMALLEST_ROWS = 16  # tensor cores take 16 rows at least
PROGRAMS = 512  # that a step should have: about four for each of an H100's multiprocessors
LATENT_PROGRAMS = 256  # the same of latent attention, one of which fills a multiprocessor
LEAST_KEYS = 512  # of a part, when a context is split
# A program of latent attention takes 144 KiB of shared memory; these have 99 KiB for one.
SMALL_GPUS = ("8.6", "8.9", "12.0", "12.1")
NAME = "tbo_paged_attention"


@dataclass(frozen=True)
class GpuAttention(AttentionKernel):
    """The kernel of this module; `interpret` runs it without a GPU, slowly."""

    interpret: bool = False

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        head_dim, value_dim = shape.head_dim, shape.value_dim
        if value_dim is None:
            if head_dim % 8 or not 16 <= head_dim <= 256:  # rows of keys begin at 16 bytes
                return f"head size {head_dim} is no multiple of 8 from 16 to 256"
            return None
        if head_dim % 8 or not 16 <= value_dim <= 512 or not 16 <= head_dim - value_dim <= 128:
            return (
                f"latent keys of {value_dim} + {head_dim - value_dim} elements are not a multiple "
                "of 8 of 16 to 512 + 16 to 128"
            )
        capability = getattr(device, "compute_capability", None)
        if capability in SMALL_GPUS:
            return f"compute capability {capability} has too little shared memory for latents"
        return None

    @property
    def ignores_unseen(self) -> bool:
        return True

    @property
    def query_block(self) -> int:
        return max(1, self._most_rows // _power_of_two(self.shape.group))

    @property
    def _most_rows(self) -> int:
        if not self._is_float:
            return QUERY_ROWS
        return FLOAT_ROWS if self.shape.value_elements <= 128 else WIDE_ROWS

    @property
    def _stages(self) -> int:
        """Turns of the loop whose keys are on their way."""
        if self._is_float:
            return 1 if self.shape.value_elements > 128 else 2
        return 2 if self.shape.latent else 3

    @property
    def _is_float(self) -> bool:
        return jnp.dtype(self.shape.dtype) == jnp.float32

    def __call__(
        self, queries, cache, batch, work, *, query_block, scale, sliding_window=None, sinks=None
    ):
        tokens, heads, head_dim = queries.shape
        page_size, kv_heads = cache.page_size, cache.num_kv_heads(head_dim)
        latent, value_dim = self.shape.latent, self.shape.value_elements
        group = heads // kv_heads
        # Of the heads that share a key/value head: drafts have more queries than one for each.
        parts = -(-group // max(1, self._most_rows // query_block))
        share = -(-group // parts)
        items = num_work_items(batch, query_block)
        programs = items * kv_heads * parts
        context = batch.page_table.shape[1] * page_size
        splits = num_splits(programs, context, LATENT_PROGRAMS if latent else PROGRAMS)
        rows = max(SMALLEST_ROWS, _power_of_two(share * query_block))
        features = _power_of_two(value_dim)
        most = (LATENT_KEY_BYTES if latent else KEY_BYTES) // queries.dtype.itemsize
        limits = visible_keys(batch)
        if len(limits) == 2:
            limits = *limits, written_keys(batch, work, items)
        kernel = functools.partial(
            _kernel,
            rows=rows,
            key_block=min(FLOAT_KEYS if self._is_float else KEY_BLOCK, most // features),
            value_dim=value_dim,
            kv_heads=kv_heads,
            group=group,
            share=share,
            page_size=page_size,
            scale=scale,
            window=context + 1 if sliding_window is None else sliding_window,
            splits=splits,
            limits=len(limits),
            factors=len(cache.factors),
        )
        # Parts are kept in float32 until they are joined; a whole is not.
        dtype = jnp.dtype(jnp.float32) if splits > 1 else queries.dtype
        part = jax.ShapeDtypeStruct((splits, tokens, heads), jnp.float32)
        out, top, total = pl.pallas_call(
            kernel,
            out_shape=(jax.ShapeDtypeStruct((*part.shape, value_dim), dtype), part, part),
            # The heads of an item are neighbours: they read the same pages. Together with the
            # items on the first axis, as CUDA ends the others at 65,535.
            grid=(programs, splits),
            # 64 rows of values of 512 do not fit the registers of 4 warps, nor do those of float32.
            compiler_params=plgpu.CompilerParams(
                num_warps=8 if self._is_float or (rows > 32 and latent) else 4,
                num_stages=self._stages,
            ),
            interpret=self.interpret,
            name=NAME,
        )(
            jnp.asarray(cache.first_page, jnp.int32).reshape(1),
            *(field[:items] for field in (work.row, work.first_token, work.num_queries)),
            work.first_position[:items],
            batch.page_table,
            jnp.full(heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            queries,
            *limits,
            *cache.pages,
            *cache.factors,
        )
        joined = out[0] if splits == 1 else join_parts(out, top, total).astype(queries.dtype)
        live = (jnp.arange(tokens) < batch.num_tokens)[:, None, None]
        return jnp.where(live, joined, jnp.zeros_like(joined))

    def expected_work(self, load: AttentionLoad) -> dict[str, tuple[float, float]]:
        shape, tokens, context = self.shape, load.tokens, load.seen
        # A prompt's keys are read again by its next queries, from the L2 cache.
        keys = tokens * context if load.decode else max(tokens, context)
        pairs = tokens * context / (1 if load.decode else 2)  # of query and key
        of_token = shape.heads * (shape.head_dim + shape.value_elements)
        moved = keys * shape.cached_bytes + tokens * of_token * self._width
        return {NAME: (2.0 * pairs * of_token, float(moved))}


def num_splits(programs: int, context: int, wanted: int) -> int:
    """Into how many parts a context is split, so that a step has the `wanted` programs."""
    return max(1, min(wanted // programs, context // LEAST_KEYS))


def join_parts(out: jax.Array, top: jax.Array, total: jax.Array) -> jax.Array:
    """The parts of the softmax, [P, T, N, H] weighted by their maxima and sums [P, T, N]."""
    factor = jnp.exp(top - top.max(0))
    sums = (total * factor).sum(0)
    return (out * factor[..., None]).sum(0) / jnp.where(sums == 0, 1.0, sums)[..., None]


def _kernel(
    first_page, row_ref, first_token, num_queries, first_position, table, sinks, q_ref, *refs,
    rows, key_block, value_dim, kv_heads, group, share, page_size, scale, window, splits,
    limits=0, factors=0,
):  # fmt: skip
    """One work item, `share` of the heads of one key/value head, one part of the context.

    Sizes of blocks are powers of two, which is all that Triton has; what is too much is masked.
    `refs` begin with what `mask_offsets` say: the first key of each token, or with `limits` of 3
    also the last, and the end of what each item may see. Of pages in 8 bits their factors follow.
    """
    limit_refs, refs = refs[:limits], refs[limits:]
    *pages, out_ref, top_ref, total_ref = refs
    pages, of_pages = pages[: len(pages) - factors], pages[len(pages) - factors :]
    parts = -(-group // share)
    item, kv_head = pl.program_id(0) // (kv_heads * parts), pl.program_id(0) // parts % kv_heads
    part = pl.program_id(1)
    head_dim = q_ref.shape[2]
    count, base = num_queries[item], first_position[item]
    lane = jnp.arange(rows, dtype=jnp.int32)
    query, of_group = lane // share, pl.program_id(0) % parts * share + lane % share
    token = (first_token[item] + query)[:, None]
    head = (kv_head * group + of_group)[:, None]
    live = query < count
    if group % share:
        live &= of_group < group
    # The elements of a key: those that latent pages take for its value, and the rest.
    spans = [(0, value_dim), (value_dim, head_dim)][: 1 if value_dim == head_dim else 2]

    def block(mask, span):  # rows [N] -> columns, and a mask that broadcasts to [N, columns]
        start, stop = span
        width = _power_of_two(stop - start)
        feature = start + jnp.arange(width, dtype=jnp.int32)[None, :]
        whole = width == stop - start
        return feature, mask[:, None] if whole else mask[:, None] & (feature < stop)

    # Else the tensor cores round float32 to 10 bits.
    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    @pl.when(count > 0)
    def _():
        def read_queries(span):
            feature, mask = block(live, span)
            other = jnp.zeros((), q_ref.dtype)
            return plgpu.load(q_ref.at[token, head, feature], mask=mask, other=other)

        queries = [read_queries(span) for span in spans]
        position = base + query
        end = base + count  # of the keys that any of the queries sees
        highest, lowest = position, None
        if limits:
            lowest = plgpu.load(limit_refs[0].at[token[:, 0]], mask=live, other=0)
        if limits == 3:
            end = limit_refs[2][item]
            last = plgpu.load(limit_refs[1].at[token[:, 0]], mask=live, other=0)
            highest = jnp.minimum(last, end - 1)
        begin = jnp.maximum(base - window + 1, 0) // key_block
        per_part = -(-(-(-end // key_block) - begin) // splits)
        start = begin + part * per_part
        stop = jnp.minimum(start + per_part, -(-end // key_block))

        def read(ref, page, slot, written, span):
            feature, mask = block(written, span)
            found = plgpu.load(
                ref.at[page[:, None], slot[:, None], kv_head * head_dim + feature],
                mask=mask,
                other=jnp.zeros((), ref.dtype),
            )
            return numbers(found, q_ref.dtype)

        def read_factors(ref, page, slot, written):
            return plgpu.load(ref.at[page, slot, kv_head], mask=written, other=0.0)[None, :]

        def accumulate(turn, state):
            top, total, acc = state
            key = turn * key_block + jnp.arange(key_block, dtype=jnp.int32)
            # Pages before the window may be others', and hold NaN: 0 * NaN would be NaN.
            written = (key < end) & (key > base - window)
            page = plgpu.load(table.at[row_ref[item], key // page_size], mask=written, other=0)
            page += first_page[0]
            slot = key % page_size
            keys = [read(pages[0], page, slot, written, span) for span in spans]
            products = [
                plgpu.dot(q, k.T, precision=precision) for q, k in zip(queries, keys, strict=True)
            ]
            scores = sum(products[1:], products[0]) * scale
            if of_pages:
                scores *= read_factors(of_pages[0], page, slot, written)
            seen = (key[None, :] <= highest[:, None]) & (key[None, :] > position[:, None] - window)
            if lowest is not None:
                seen &= key[None, :] >= lowest[:, None]
            scores = jnp.where(seen & live[:, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(1))
            safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # no inf - inf
            weights = jnp.exp(scores - safe[:, None])
            shrink = jnp.exp(top - safe)
            values = keys[0] if len(pages) == 1 else read(pages[1], page, slot, written, spans[0])
            of_values = weights
            if of_pages:
                of_values = weights * read_factors(of_pages[-1], page, slot, written)
            update = plgpu.dot(of_values.astype(values.dtype), values, precision=precision)
            return new_top, total * shrink + weights.sum(1), acc * shrink[:, None] + update

        # The softmax of the first part starts with the sink, of weight exp(sink - top) = 1.
        sink = plgpu.load(
            sinks.at[head[:, 0]], mask=live & (part == 0), other=jnp.float32(-jnp.inf)
        )
        state = (
            sink,
            jnp.where(sink == -jnp.inf, 0.0, 1.0),
            jnp.zeros((rows, _power_of_two(value_dim)), jnp.float32),
        )
        top, total, acc = jax.lax.fori_loop(start, stop, accumulate, state)
        # A part without keys has no weight beside any other.
        top = jnp.where(top == -jnp.inf, jnp.finfo(jnp.float32).min, top)
        if splits == 1:
            acc = acc / jnp.where(total == 0, 1.0, total)[:, None]
        feature, mask = block(live, spans[0])
        plgpu.store(out_ref.at[part, token, head, feature], acc.astype(out_ref.dtype), mask=mask)
        plgpu.store(top_ref.at[part, token[:, 0], head[:, 0]], top, mask=live)
        plgpu.store(total_ref.at[part, token[:, 0], head[:, 0]], total, mask=live)


def _power_of_two(size: int) -> int:
    """The first that is not below `size`."""
    return 1 << (size - 1).bit_length()
