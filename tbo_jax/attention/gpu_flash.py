"""Causal attention of whole sequences on GPU, with a gradient: Pallas (Triton) kernels.

As in FlashAttention-2 (Dao 2023) no scores are written to memory: the forward pass keeps the
logarithm of each softmax's sum, and the backward pass computes the scores of a block of queries and
keys again, once for the gradient of the queries and once for that of keys and values. Heads of
queries that share keys are summed over by the program that has those keys. Blocks that causality or
a window hides are skipped.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import triton as plgpu
from tbo_jax.attention.kernel import AttentionLoad, AttentionShape
from tbo_jax.quantized.gpu_block import dot

FORWARD, QUERIES_GRAD = "tbo_flash_forward", "tbo_flash_queries_grad"  # names of kernels
KEYS_GRAD = "tbo_flash_keys_values_grad"
LARGEST_HEAD = 256  # elements
LEAST_FEATURES = 16  # that tensor cores sum over


@dataclass(frozen=True)
class GpuFlashAttention:
    """`dense_causal_attention` for GPUs, for one shape; `interpret` runs it without one, slowly."""

    shape: AttentionShape
    interpret: bool = False

    @classmethod
    def unsupported(cls, shape: AttentionShape, device: Any = None) -> str | None:
        """Why the kernels cannot run this shape; None if they can."""
        for name, size in (("head size", shape.head_dim), ("value size", shape.value_elements)):
            if size > LARGEST_HEAD:
                return f"{name} {size} is more than {LARGEST_HEAD}"
            if size % LEAST_FEATURES:
                return f"{name} {size} is no multiple of {LEAST_FEATURES}"
        return None

    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        length: int,
        scale: float,
        sliding_window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Takes and gives what `dense_causal_attention` does; differentiable in all arrays."""
        run = functools.partial(
            _Run, length, scale, length if sliding_window is None else sliding_window,
            self.interpret,
        )  # fmt: skip

        @jax.custom_vjp
        def attend(queries, keys, values, sinks):
            return run().forward(queries, keys, values, sinks)[0]

        def forward(queries, keys, values, sinks):
            out, sums = run().forward(queries, keys, values, sinks)
            return out, (queries, keys, values, sinks, out, sums)

        def backward(saved, grad):
            queries, keys, values, sinks, out, sums = saved
            return run().backward(queries, keys, values, sinks, out, sums, grad)

        attend.defvjp(forward, backward)
        return attend(queries, keys, values, sinks)

    def expected_work(self, load: AttentionLoad) -> dict[str, tuple[float, float]]:
        """Floating-point operations and bytes, by the name that XLA's text has for each kernel.

        A product counts the masked half of the blocks on the diagonal too.
        """
        shape, tokens = self.shape, load.tokens
        width = jnp.dtype(shape.dtype).itemsize
        size, values = shape.head_dim, shape.value_elements
        key_block = _blocks(load.context, jnp.dtype(shape.dtype), max(size, values))[1]
        product = tokens * shape.heads * (load.seen + key_block)  # 2 x half the pairs
        of_heads, of_keys = tokens * shape.heads, tokens * shape.kv_heads * (size + values)
        sums = 4 * of_heads  # a float32 for each query and head
        return {
            FORWARD: (
                float(product * (size + values)),
                float(width * (of_heads * (size + values) + of_keys) + sums),
            ),
            QUERIES_GRAD: (
                float(product * (2 * size + values)),
                float(width * (of_heads * (2 * size + values) + of_keys) + 2 * sums),
            ),
            KEYS_GRAD: (
                float(product * 2 * (size + values)),
                float(width * (of_heads * (size + values) + 2 * of_keys) + 2 * sums),
            ),
        }


@dataclass(frozen=True)
class _Run:
    """The three kernels, called for sequences of `length` tokens."""

    length: int
    scale: float
    window: int
    interpret: bool

    def forward(self, queries, keys, values, sinks):
        """The result [T, N, V], and the logarithm of each softmax's sum, [N, T] float32."""
        tokens, heads, head_dim = queries.shape
        value_dim = values.shape[2]
        rows, columns = _blocks(self.length, queries.dtype, max(head_dim, value_dim))
        rows = min(2 * rows, _power_of_two(self.length)) if queries.dtype.itemsize == 2 else rows
        given = [queries, keys, values, *([] if sinks is None else [sinks.astype(jnp.float32)])]
        return self._call(
            _forward_kernel, FORWARD, (tokens // self.length * heads, -(-self.length // rows)),
            given,
            [((tokens, heads, value_dim), queries.dtype), ((heads, tokens), jnp.float32)],
            rows, columns,
        )  # fmt: skip

    def backward(self, queries, keys, values, sinks, out, sums, grad):
        """Gradients of queries, keys, values and sinks."""
        tokens, heads, head_dim = queries.shape
        sequences, kv_heads = tokens // self.length, keys.shape[1]
        rows, columns = _blocks(self.length, queries.dtype, max(head_dim, values.shape[2]))
        grad = grad.astype(queries.dtype)
        # What the softmax's transpose takes off: the mean of its gradient under its own weights.
        mean = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).T
        given = [queries, keys, values, grad, sums, mean]
        (of_queries,) = self._call(
            _queries_grad_kernel, QUERIES_GRAD, (sequences * heads, -(-self.length // rows)),
            given, [(queries.shape, queries.dtype)], rows, columns,
        )  # fmt: skip
        of_keys, of_values = self._call(
            _keys_grad_kernel, KEYS_GRAD, (sequences * kv_heads, -(-self.length // columns)),
            given, [(keys.shape, keys.dtype), (values.shape, values.dtype)], rows, columns,
        )  # fmt: skip
        of_sinks = None
        if sinks is not None:  # a score whose value is zero
            weight = jnp.exp(sinks.astype(jnp.float32)[:, None] - sums)
            of_sinks = -(weight * mean).sum(1).astype(sinks.dtype)
        return of_queries, of_keys, of_values, of_sinks

    def _call(self, kernel, name, grid, operands, results, rows, columns):
        shapes = [jax.ShapeDtypeStruct(*result) for result in results]
        return pl.pallas_call(
            functools.partial(
                kernel,
                length=self.length,
                scale=self.scale,
                window=self.window,
                rows=rows,
                columns=columns,
            ),
            out_shape=shapes,
            grid=grid,
            # Of 64 keys of 128 elements two sums are 64 registers of 256 threads.
            compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
            interpret=self.interpret,
            name=name,
        )(*operands)


def _blocks(length: int, dtype: Any, head: int) -> tuple[int, int]:
    """Queries and keys of a block: four of them, of all elements, fit in shared memory."""
    size = 64 if jnp.dtype(dtype).itemsize * head <= 256 else 32
    size = min(size, max(16, _power_of_two(length)))
    return size, size


def _power_of_two(size: int) -> int:
    """The first that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _parts(size: int) -> list[tuple[int, int]]:
    """Starts and lengths, powers of two, which is all that Triton has: 192 is 128 and 64."""
    parts, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            parts.append((start, 1 << bit))
            start += 1 << bit
    return parts


def _load(ref, token, head, live):
    """The parts of some tokens' elements of a head, zero where not live."""

    def part(start, size):
        feature = start + jnp.arange(size, dtype=jnp.int32)[None, :]
        other = jnp.zeros((), ref.dtype)
        return plgpu.load(ref.at[token[:, None], head, feature], mask=live[:, None], other=other)

    return [part(*bounds) for bounds in _parts(ref.shape[2])]


def _store(ref, token, head, live, parts):
    for (start, size), value in zip(_parts(ref.shape[2]), parts, strict=True):
        feature = start + jnp.arange(size, dtype=jnp.int32)[None, :]
        value = value.astype(ref.dtype)
        plgpu.store(ref.at[token[:, None], head, feature], value, mask=live[:, None])


def _scores(a, b):
    """Products of rows with rows, over all parts of their elements."""
    products = [dot(x, y.T) for x, y in zip(a, b, strict=True)]
    return sum(products[1:], products[0])


def _add(sums, weights, parts):
    return [total + dot(weights, part) for total, part in zip(sums, parts, strict=True)]


def _zeros(rows, size):
    return [jnp.zeros((rows, part), jnp.float32) for _, part in _parts(size)]


def _keys_of(block, rows, columns, length, window):
    """The first and the end of the blocks of keys that a block of queries sees."""
    start = jnp.maximum(block * rows - window + 1, 0) // columns
    return start, (jnp.minimum((block + 1) * rows, length) + columns - 1) // columns


def _forward_kernel(q, k, v, *refs, length, scale, window, rows, columns):
    *sinks, out, sums = refs
    heads = q.shape[1]
    sequence, head = pl.program_id(0) // heads, pl.program_id(0) % heads
    kv_head = head // (heads // k.shape[1])
    block = pl.num_programs(1) - 1 - pl.program_id(1)  # those with the most keys first
    query = block * rows + jnp.arange(rows, dtype=jnp.int32)
    live, token = query < length, sequence * length + query
    queries = _load(q, token, head, live)

    def accumulate(turn, state):
        top, total, acc = state
        key = turn * columns + jnp.arange(columns, dtype=jnp.int32)
        inside, at = key < length, sequence * length + key
        scores = _scores(queries, _load(k, at, kv_head, inside)) * scale
        seen = (key[None, :] <= query[:, None]) & (key[None, :] > query[:, None] - window)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # no inf - inf
        weights = jnp.exp(scores - safe[:, None])
        shrink = jnp.exp(top - safe)
        value = _load(v, at, kv_head, inside)
        acc = _add([part * shrink[:, None] for part in acc], weights.astype(v.dtype), value)
        return new_top, total * shrink + weights.sum(1), acc

    if sinks:  # a softmax starts with its sink, of weight exp(sink - top) = 1
        top = jnp.broadcast_to(sinks[0][head], (rows,))
        total = jnp.ones(rows, jnp.float32)
    else:
        top, total = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    state = top, total, _zeros(rows, v.shape[2])
    start, stop = _keys_of(block, rows, columns, length, window)
    top, total, acc = jax.lax.fori_loop(start, stop, accumulate, state)
    _store(out, token, head, live, [part / total[:, None] for part in acc])
    plgpu.store(sums.at[head, token], top + jnp.log(total), mask=live)


def _queries_grad_kernel(
    q, k, v, grad, sums, mean, out, *, length, scale, window, rows, columns
):  # fmt: skip
    heads = q.shape[1]
    sequence, head = pl.program_id(0) // heads, pl.program_id(0) % heads
    kv_head = head // (heads // k.shape[1])
    block = pl.num_programs(1) - 1 - pl.program_id(1)
    query = block * rows + jnp.arange(rows, dtype=jnp.int32)
    live, token = query < length, sequence * length + query
    queries, grads = _load(q, token, head, live), _load(grad, token, head, live)
    log_sum = plgpu.load(sums.at[head, token], mask=live, other=0.0)
    taken_off = plgpu.load(mean.at[head, token], mask=live, other=0.0)

    def accumulate(turn, acc):
        key = turn * columns + jnp.arange(columns, dtype=jnp.int32)
        inside, at = key < length, sequence * length + key
        keys = _load(k, at, kv_head, inside)
        seen = (key[None, :] <= query[:, None]) & (key[None, :] > query[:, None] - window)
        seen &= live[:, None]
        scores = jnp.where(seen, _scores(queries, keys) * scale - log_sum[:, None], -jnp.inf)
        of_weights = _scores(grads, _load(v, at, kv_head, inside))
        of_scores = jnp.exp(scores) * (of_weights - taken_off[:, None]) * scale
        return _add(acc, of_scores.astype(k.dtype), keys)

    start, stop = _keys_of(block, rows, columns, length, window)
    acc = jax.lax.fori_loop(start, stop, accumulate, _zeros(rows, q.shape[2]))
    _store(out, token, head, live, acc)


def _keys_grad_kernel(
    q, k, v, grad, sums, mean, keys_out, values_out, *, length, scale, window, rows, columns
):  # fmt: skip
    """A block of keys, and of all heads that share them the queries that see it, one by one."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    sequence, kv_head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
    begin = pl.program_id(1) * columns
    key = begin + jnp.arange(columns, dtype=jnp.int32)
    inside, at = key < length, sequence * length + key
    keys, values = _load(k, at, kv_head, inside), _load(v, at, kv_head, inside)
    first = begin // rows
    last = jnp.minimum(begin + columns - 1 + window, length)  # the end of the queries
    blocks = (last + rows - 1) // rows - first

    def accumulate(turn, state):
        of_keys, of_values = state
        head = kv_head * group + turn // blocks
        query = (first + turn % blocks) * rows + jnp.arange(rows, dtype=jnp.int32)
        live, token = query < length, sequence * length + query
        queries, grads = _load(q, token, head, live), _load(grad, token, head, live)
        log_sum = plgpu.load(sums.at[head, token], mask=live, other=0.0)
        taken_off = plgpu.load(mean.at[head, token], mask=live, other=0.0)
        seen = (key[:, None] <= query[None, :]) & (key[:, None] > query[None, :] - window)
        seen &= live[None, :]
        scores = jnp.where(seen, _scores(keys, queries) * scale - log_sum[None, :], -jnp.inf)
        weights = jnp.exp(scores)  # [keys, queries]: nothing is to be transposed in registers
        of_values = _add(of_values, weights.astype(grad.dtype), grads)
        of_weights = _scores(values, grads)
        of_scores = weights * (of_weights - taken_off[None, :]) * scale
        return _add(of_keys, of_scores.astype(q.dtype), queries), of_values

    state = _zeros(columns, k.shape[2]), _zeros(columns, v.shape[2])
    of_keys, of_values = jax.lax.fori_loop(0, group * blocks, accumulate, state)
    _store(keys_out, at, kv_head, inside, of_keys)
    _store(values_out, at, kv_head, inside, of_values)
