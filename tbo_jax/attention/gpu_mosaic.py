"""Paged attention on Hopper: one Pallas (Mosaic GPU) kernel for ragged batches, decode and prefill.

A program is one warpgroup. It takes the queries of one work item that share a key/value head, 64
rows of them, which is what the tensor cores multiply at once (wgmma), and a part of their keys. The
transfer engine (TMA) brings the keys and values in, a page at a time, of the number that the page
table says, while the block before is computed; the softmax runs over key blocks as in
FlashAttention (Dao et al. 2022). Rows of decode are the heads of one token, rows of prefill 8
queries of each head, since the tiles of shared memory have 8 rows. A step with few rows splits the
context over several programs (flash-decoding, Dao et al. 2023).

Unlike Pallas' Triton backend, deprecated since jax 0.11, this one stays. Values that a thread holds
have their layout said (`with_layout`): searching for them took minutes (jax 0.10.2).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import interpret_mosaic, load_mosaic, mosaic, store_mosaic
from tbo_jax.attention.gpu_paged import PROGRAMS, join_parts, num_splits
from tbo_jax.attention.kernel import AttentionKernel, AttentionLoad, AttentionShape
from tbo_jax.attention.work import num_work_items

ROWS = 64  # that wgmma multiplies
TILE_ROWS, SWIZZLE = 8, 128  # of a tile of shared memory: rows, and bytes of one
STAGES = 2  # key blocks in shared memory; two programs fit a multiprocessor
KEYS = 64  # of a block: registers hold rows by 64
STATISTICS = 16  # columns: 8 of a row's maximum, 8 of its sum; a transfer has 16 bytes at least
NAME = "tbo_mosaic_attention"


@dataclass(frozen=True)
class MosaicAttention(AttentionKernel):
    """The kernel of this module; `interpret` runs it without a GPU, slowly."""

    interpret: bool = False

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        if shape.latent:
            return "latent keys are not written for Mosaic yet"
        if shape.cache_dtype is not None:
            return f"keys and values in {shape.cache_dtype} are not written for Mosaic yet"
        if shape.masked:
            return "mask offsets are not written for Mosaic yet"
        if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
            return f"wgmma rounds {jnp.dtype(shape.dtype)} to 10 bits"
        if shape.head_dim not in (64, 128):  # two blocks of 256 and its parts do not fit
            return f"head size {shape.head_dim} is neither 64 nor 128"
        capability = getattr(device, "compute_capability", None)
        if capability not in (None, "9.0"):
            return f"compute capability {capability} has no wgmma, 9.0 has"
        return None

    @property
    def ignores_unseen(self) -> bool:
        return True

    @property
    def query_block(self) -> int:
        heads = 1 << (self.shape.group - 1).bit_length()
        return max(TILE_ROWS, ROWS // heads)

    def __call__(
        self, queries, cache, batch, work, *, query_block, scale, sliding_window=None, sinks=None
    ):
        plgpu = mosaic()
        tokens, heads, head_dim = queries.shape
        page_size, kv_heads = cache.page_size, cache.num_kv_heads(head_dim)
        key_block = KEYS
        copied = min(page_size, key_block)  # keys of one transfer
        if copied % TILE_ROWS or key_block % copied or page_size % copied:
            raise ValueError(
                f"Mosaic attention takes pages of 8, 16, 32 or a multiple of 64 tokens, "
                f"got {page_size}"
            )
        group = heads // kv_heads
        queries_each = 1 if query_block == 1 else -(-query_block // TILE_ROWS) * TILE_ROWS
        if queries_each > ROWS:
            raise ValueError(f"query_block must be at most {ROWS}, got {query_block}")
        parts = -(-group // (ROWS // queries_each))
        share = -(-group // parts)  # heads of a program
        items = num_work_items(batch, query_block)
        programs = items * kv_heads * parts
        context = batch.page_table.shape[1] * page_size
        splits = num_splits(programs, context, PROGRAMS)
        # Of each program's rows; the heads of an item are neighbours: they read the same pages.
        row = jnp.arange(ROWS)
        of_group = jnp.arange(parts)[:, None] * share + row // queries_each
        head = (jnp.arange(kv_heads)[:, None, None] * group + of_group).reshape(-1, ROWS)
        if sinks is None:
            first = jnp.full(head.shape, -jnp.inf, jnp.float32)
        else:
            first = jnp.asarray(sinks, jnp.float32)[jnp.minimum(head, heads - 1)]
        loaded = jnp.asarray(queries)
        few = tokens * heads < ROWS if queries_each == 1 else tokens < queries_each
        # The transfer engine reads zeros behind an array's end, if the array has a whole transfer.
        if few or self.interpret:
            loaded = jnp.pad(loaded, ((0, ROWS), (0, 0), (0, 0)))
        if queries_each == 1:
            loaded = loaded.reshape(-1, head_dim)
        # Parts are kept in float32 until they are joined; a whole is not.
        dtype = jnp.dtype(jnp.float32) if splits > 1 else queries.dtype
        outputs = [jax.ShapeDtypeStruct((splits, tokens, heads, head_dim), dtype)]
        if splits > 1:
            wide = (splits, tokens, heads, STATISTICS)
            outputs.append(jax.ShapeDtypeStruct(wide, jnp.float32))

        def shared(*axes: int) -> Any:
            swizzle = min(SWIZZLE, axes[-1] * queries.dtype.itemsize)
            tile = plgpu.TilingTransform((TILE_ROWS, swizzle // queries.dtype.itemsize))
            transforms = (tile, plgpu.SwizzleTransform(swizzle))
            return plgpu.SMEM(axes, queries.dtype, transforms=transforms)

        scratch = dict(
            q_smem=shared(ROWS, head_dim),
            k_smem=shared(STAGES, key_block, head_dim),
            v_smem=shared(STAGES, key_block, head_dim),
            weights=shared(ROWS, key_block),
            out_smem=plgpu.SMEM((ROWS, head_dim), dtype),
            statistics=plgpu.SMEM((ROWS, STATISTICS), jnp.float32),
            q_arrived=plgpu.Barrier(num_arrivals=1 if queries_each == 1 else share),
            k_arrived=plgpu.Barrier(num_arrivals=key_block // copied, num_barriers=STAGES),
            v_arrived=plgpu.Barrier(num_arrivals=key_block // copied, num_barriers=STAGES),
        )
        body = functools.partial(
            _kernel,
            key_block=key_block,
            copied=copied,
            group=group,
            share=share,
            parts=parts,
            queries_each=queries_each,
            page_size=page_size,
            scale=scale,
            window=context + 1 if sliding_window is None else sliding_window,
            splits=splits,
            interpret=self.interpret,
        )
        attend = plgpu.kernel(
            body,
            out_type=outputs,
            scratch_types=scratch,
            grid=(programs, splits),
            grid_names=("program", "part"),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
            ),
            kernel_name=NAME,
        )
        with interpret_mosaic() if self.interpret else contextlib.nullcontext():
            found = attend(
                jnp.asarray(cache.first_page, jnp.int32).reshape(1),
                *(field[:items] for field in (work.row, work.first_token, work.num_queries)),
                work.first_position[:items],
                batch.page_table,
                first,
                loaded,
                *cache.pages,
            )
        if splits == 1:
            joined = found[0][0]
        else:
            out, statistics = found
            top, total = statistics[..., 0], statistics[..., STATISTICS // 2]
            joined = join_parts(out, top, total).astype(queries.dtype)
        live = (jnp.arange(tokens) < batch.num_tokens)[:, None, None]
        return jnp.where(live, joined, jnp.zeros_like(joined))

    def expected_work(self, load: AttentionLoad) -> dict[str, tuple[float, float]]:
        shape, tokens, context = self.shape, load.tokens, load.seen
        # A prompt's keys are read again by its next queries, from the L2 cache.
        keys = tokens * context if load.decode else max(tokens, context)
        pairs = tokens * context / (1 if load.decode else 2)  # of query and key
        # All 64 rows are multiplied, however few are queries.
        block = 1 if load.decode else self.query_block
        parts = -(-shape.group // (ROWS // block))
        padded = shape.kv_heads * parts * ROWS / block  # rows for each query
        computed = 2.0 * pairs * padded * (shape.head_dim + shape.value_elements)
        of_token = shape.heads * (shape.head_dim + shape.value_elements)
        moved = keys * shape.cached_elements + tokens * of_token
        return {NAME: (computed, float(moved * self._width))}


def _kernel(
    first_page, row_ref, first_token, num_queries, first_position, table, sinks, q_ref, k_ref,
    v_ref, out_ref, *refs, q_smem, k_smem, v_smem, weights, out_smem, statistics, q_arrived,
    k_arrived, v_arrived, key_block, copied, group, share, parts, queries_each, page_size, scale,
    window, splits, interpret,
):  # fmt: skip
    """One work item, `share` of the heads of one key/value head, one part of the context."""
    plgpu = mosaic()
    head_dim = q_smem.shape[1]
    kv_heads = k_ref.shape[2] // head_dim
    program, part = jax.lax.axis_index("program"), jax.lax.axis_index("part")
    item, of_item = _split(program, kv_heads * parts)
    kv_head, share_index = _split(of_item, parts)
    count, base, token = num_queries[item], first_position[item], first_token[item]
    first_head = kv_head * group + share_index * share
    matrix = plgpu.Layout.WGMMA
    column = matrix.reduce(1)

    def with_layout(value, layout):
        return value if interpret else plgpu.layout_cast(value, layout)

    def iota(shape, axis):
        if interpret:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=matrix)

    def across(value, columns):
        return jax.lax.broadcast_in_dim(value, (ROWS, columns), (0,))

    def product(columns, left, right, turned=False):
        if interpret and turned:  # jax 0.10.2 interprets no reference that is transposed
            return jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)

        def multiply(accumulator):
            plgpu.wgmma(accumulator, left, _turned(right) if turned else right)
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))

    @pl.when(count > 0)
    def _():
        if queries_each == 1:  # heads behind `share` are others', and their rows are not kept
            rows = -(-share // TILE_ROWS) * TILE_ROWS
            start = token * (kv_heads * group) + first_head
            plgpu.copy_gmem_to_smem(
                q_ref.at[pl.ds(start, rows)], q_smem.at[pl.ds(0, rows)], q_arrived
            )
        else:
            for number in range(share):
                head = jnp.minimum(first_head + number, kv_heads * group - 1)
                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(token, queries_each), head],
                    q_smem.at[pl.ds(number * queries_each, queries_each)],
                    q_arrived,
                )
        end = base + count  # of the keys that any of the queries sees
        oldest = jnp.maximum(base - window + 1, 0)
        begin = jax.lax.div(oldest, key_block)
        blocks = jax.lax.div(end + (key_block - 1), key_block)
        per_part = jax.lax.div(blocks - begin + (splits - 1), splits)
        start = begin + part * per_part
        stop = jnp.minimum(start + per_part, blocks)
        newest_page = jax.lax.div(end - 1, page_size)
        oldest_page = jax.lax.div(oldest, page_size)
        sequence = row_ref[item]

        def fetch(turn):
            slot = jax.lax.rem(turn, STAGES)
            for number in range(key_block // copied):
                place, within = _split(turn * key_block + number * copied, page_size)
                # A page that nobody sees is not fetched: its number may be anything.
                place = jnp.clip(place, oldest_page, newest_page)
                page = first_page[0] + table[sequence, place]
                for source, target, arrived in (
                    (k_ref, k_smem, k_arrived), (v_ref, v_smem, v_arrived),
                ):  # fmt: skip
                    plgpu.copy_gmem_to_smem(
                        source.at[page, pl.ds(within, copied), pl.ds(kv_head * head_dim, head_dim)],
                        target.at[slot, pl.ds(number * copied, copied)],
                        arrived.at[slot],
                    )

        for ahead in range(STAGES):
            pl.when(start + ahead < stop)(functools.partial(fetch, start + ahead))
        plgpu.barrier_wait(q_arrived)

        position = base + jax.lax.rem(iota((ROWS, key_block), 0), queries_each)

        def accumulate(turn, state):
            top, total, acc = state
            slot = jax.lax.rem(turn, STAGES)
            plgpu.barrier_wait(k_arrived.at[slot])
            scores = product(key_block, q_smem, k_smem.at[slot], turned=True) * scale
            key = turn * key_block + iota((ROWS, key_block), 1)
            seen = (key <= position) & (key > position - window) & (key < end)
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(1))
            safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # no inf - inf
            weight = jnp.exp(scores - across(safe, key_block))
            shrink = jnp.exp(top - safe)
            weights[...] = weight.astype(weights.dtype)
            plgpu.barrier_wait(v_arrived.at[slot])
            first_key = turn * key_block

            # What nobody wrote, and what is before the window, may be NaN: 0 * NaN would be NaN.
            @pl.when((first_key + key_block > end) | (first_key < oldest))
            def _():
                number = first_key + iota(v_smem.shape[1:], 0)
                values = with_layout(v_smem[slot], matrix)
                written = (number >= oldest) & (number < end)
                v_smem[slot] = jnp.where(written, values, jnp.zeros_like(values))

            plgpu.commit_smem()
            update = product(head_dim, weights, v_smem.at[slot])
            plgpu.commit_smem()  # all warps have read the slot
            pl.when(turn + STAGES < stop)(functools.partial(fetch, turn + STAGES))
            return new_top, total * shrink + weight.sum(1), acc * across(shrink, head_dim) + update

        # The softmax of the first part starts with the sink, of weight exp(sink - top) = 1.
        sink = load_mosaic(sinks, (of_item,), column, interpret)
        sink = jnp.where(part == 0, sink, -jnp.inf)
        state = (
            sink,
            jnp.where(sink == -jnp.inf, 0.0, 1.0),
            with_layout(jnp.zeros((ROWS, head_dim), jnp.float32), matrix),
        )
        top, total, acc = jax.lax.fori_loop(start, stop, accumulate, state)
        if splits == 1:
            acc = acc / across(jnp.where(total == 0, 1.0, total), head_dim)
        else:
            half = STATISTICS // 2
            # A part without keys has no weight beside any other.
            lowest = float(jnp.finfo(jnp.float32).min)
            best = jnp.where(top == -jnp.inf, lowest, top)
            store_mosaic(statistics.at[:, pl.ds(0, half)], across(best, half), interpret)
            store_mosaic(statistics.at[:, pl.ds(half, half)], across(total, half), interpret)
        store_mosaic(out_smem, acc.astype(out_smem.dtype), interpret)
        plgpu.commit_smem()

        def store(number, query):
            source, head = number * queries_each + query, first_head + number
            plgpu.copy_smem_to_gmem(out_smem.at[source], out_ref.at[part, token + query, head])
            if splits > 1:
                plgpu.copy_smem_to_gmem(
                    statistics.at[source], refs[0].at[part, token + query, head]
                )

        kept = jnp.minimum(share, group - share_index * share)

        @pl.loop(0, count)
        def _(query):
            @pl.loop(0, kept)
            def _(number):
                store(number, query)

        plgpu.wait_smem_to_gmem(0)


def _split(number, size):
    return jax.lax.div(number, jnp.int32(size)), jax.lax.rem(number, jnp.int32(size))


def _turned(ref):
    """A matrix's transpose; jax 0.12 has it as a method, and warns of the function."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return mosaic().transpose_ref(ref, (1, 0))
