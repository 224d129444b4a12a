"""Gated experts on GPU: Pallas (Triton) kernels over tiles of rows of one expert each.

As in other grouped matrix products (MegaBlocks, Gale et al. 2023) the rows of an expert are cut in
tiles, and every tile reads its expert's weights in place: no slice of the weights is written out,
nothing is padded to a capacity, and rows that no expert owns cost nothing.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import triton as plgpu
from tbo_jax.moe.kernel import ExpertKernel, ExpertLoad, ExpertShape
from tbo_jax.quantized.array import QuantizedArray
from tbo_jax.quantized.gpu_block import (
    Block,
    dot,
    is_readable,
    load_inputs,
    multiply,
    readable,
)

logger = logging.getLogger(__name__)

BLOCK_COLUMNS = 128, 64  # of the result of a tile: the first that divides all of them
INNER_BYTES = 128  # of a row, summed over at a time
SMALLEST_TILE = 16  # rows; tensor cores take 16 at least
TILE_BYTES = 256  # of a column of the largest tile: 128 rows, or 64 in float32
GATE_UP, DOWN, SUM = "tbo_experts_gate_up", "tbo_experts_down", "tbo_experts_sum"  # kernels


@dataclass(frozen=True)
class GpuExperts(ExpertKernel):
    """The kernels of this module; `interpret` runs them without a GPU, slowly.

    With `narrow`, large tiles of gate and up take half the columns. It is for GPUs whose tensor
    cores take their operands from registers: of 128 rows of bfloat16 and 128 columns of both, a
    thread keeps more than its 255 registers hold on compute capability 8.0, 8.6, 8.9 and 12.0 (228
    to 340 bytes spilt, as ptxas 12.9 says), and 174 on 9.0 and 10.0.
    """

    interpret: bool = False
    narrow: bool = False

    @classmethod
    def unsupported(cls, shape: ExpertShape, device: Any = None) -> str | None:
        for name, size in (("hidden size", shape.hidden), ("expert width", shape.inner)):
            if size % BLOCK_COLUMNS[-1]:
                return f"{name} {size} is no multiple of {BLOCK_COLUMNS[-1]}"
        return None

    @classmethod
    def for_device(cls, shape: ExpertShape, device: Any = None) -> Self:
        capability = str(getattr(device, "compute_capability", ""))
        return cls(shape, narrow=capability.partition(".")[0] in ("8", "12"))

    def __call__(self, rows, experts, weights, matrices):
        num_rows, top_k = experts.shape
        num_experts = matrices.num_experts
        _, width, hidden = matrices.down.shape
        bound = num_rows * min(top_k, num_experts)
        index, place, group_sizes = sort_by_expert(experts, num_experts, bound)
        tile = _tile_rows(num_rows, num_experts, rows.dtype.itemsize)
        group, *bounds = tiles_of(group_sizes, tile, bound // tile + num_experts)
        tiles = matrices.place(group), *bounds
        grid = group.shape[0]
        run = functools.partial(_run, dtype=rows.dtype, tile=tile, interpret=self.interpret)
        gate_up, down = matrices.gate_up, matrices.down
        operands = *tiles, rows, index, _operand(gate_up, rows.dtype), matrices.gate_up_bias
        kernel = functools.partial(_gate_up_kernel, activation=matrices.activation)
        large = tile * rows.dtype.itemsize == TILE_BYTES
        blocks = BLOCK_COLUMNS[-1:] if self.narrow and large else BLOCK_COLUMNS
        activated = run(kernel, GATE_UP, grid, operands, (bound, width), blocks=blocks)
        operands = *tiles, activated, _operand(down, rows.dtype), matrices.down_bias
        results = run(_down_kernel, DOWN, grid, operands, (bound, hidden))
        sums = functools.partial(
            _run, dtype=rows.dtype, tile=SMALLEST_TILE, interpret=self.interpret
        )
        grid = -(-num_rows // SMALLEST_TILE)
        return sums(_sum_kernel, SUM, grid, (results, place, weights), (num_rows, hidden))

    def expected_work(self, load: ExpertLoad) -> dict[str, tuple[float, float]]:
        hidden, inner, width = self.shape.hidden, self.shape.inner, self._width
        rows, chosen, num_experts = load.rows, load.chosen, load.num_experts
        matrices = self.shape.weight_bytes * num_experts * hidden * inner  # of one projection
        elements = width * chosen * (hidden + inner)
        return {
            GATE_UP: (4.0 * chosen * hidden * inner, 2 * matrices + elements),
            DOWN: (2.0 * chosen * hidden * inner, matrices + elements),
            SUM: (2.0 * chosen * hidden, width * (chosen + rows) * hidden),
        }


def _operand(stack, dtype):
    """Weights as a kernel takes them; decoded where it cannot read what they are."""
    if not isinstance(stack, QuantizedArray):
        return stack
    size = INNER_BYTES // jnp.dtype(dtype).itemsize
    if not is_readable(stack.format, -2, size):
        _warn_decoded(stack.format)
        return stack.decode(dtype)
    return readable(stack)


@functools.cache
def _warn_decoded(form):
    logger.warning(
        "experts of %s with factors for blocks of %s are decoded in every step: the kernel for "
        "GPUs takes blocks that divide or hold its own, of %d bytes of a row",
        form.kind, form.block, INNER_BYTES,
    )  # fmt: skip


def sort_by_expert(
    experts: jax.Array, num_experts: int, bound: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows of expert 0, then of 1, ... [N]; where each choice stands there [M, K]; sizes [E].

    A choice of an expert that is not here stands at N. Counted, not sorted: E is small.
    """
    chosen = experts.reshape(-1)
    mine = chosen[:, None] == jnp.arange(num_experts, dtype=jnp.int32)
    count = jnp.cumsum(mine, axis=0, dtype=jnp.int32)
    group_sizes = count[-1]
    before = jnp.cumsum(group_sizes) - group_sizes
    place = jnp.where(mine, before + count - 1, 0).sum(1, dtype=jnp.int32)
    place = jnp.where(mine.any(1), place, bound)
    row = jnp.arange(chosen.shape[0], dtype=jnp.int32) // experts.shape[1]
    index = jnp.zeros(bound, jnp.int32).at[place].set(row, mode="drop")
    return index, place.reshape(experts.shape), group_sizes


def _tile_rows(num_rows: int, num_experts: int, itemsize: int) -> int:
    """Rows of a tile: about what an expert gets, in a power of two."""
    average = max(1, num_rows // num_experts)
    return min(max(1 << (average - 1).bit_length(), SMALLEST_TILE), TILE_BYTES // itemsize)


def tiles_of(group_sizes: jax.Array, tile: int, bound: int) -> tuple[jax.Array, ...]:
    """[bound] expert, first row, end row of each tile; tiles that do not exist are empty."""
    end = jnp.cumsum(group_sizes)
    per_group = -(-group_sizes // tile)
    tile_end = jnp.cumsum(per_group)
    number = jnp.arange(bound, dtype=jnp.int32)
    group = jnp.sum(tile_end <= number[:, None], axis=1, dtype=jnp.int32)
    live = group < group_sizes.shape[0]
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    within = number - (tile_end[group] - per_group[group])
    first = end[group] - group_sizes[group] + within * tile
    stop = jnp.minimum(first + tile, end[group])
    first, stop = (jnp.where(live, x, 0).astype(jnp.int32) for x in (first, stop))
    return group, first, stop


def _run(
    kernel, name, num_tiles, operands, shape, *, dtype, tile, interpret, blocks=BLOCK_COLUMNS
):  # fmt: skip
    """Run a kernel over tiles of rows and blocks of columns of a result of `shape`.

    Of the operands a bias that is None is left out.
    """
    block = next(size for size in blocks if shape[1] % size == 0)
    warps = 8 if tile * jnp.dtype(dtype).itemsize > TILE_BYTES // 2 else 4
    return pl.pallas_call(
        functools.partial(kernel, tile=tile, block=block),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        # Tiles of an expert are neighbours in the grid: they share its weights in the L2 cache.
        grid=(num_tiles, shape[1] // block),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=3),
        interpret=interpret,
        name=name,
    )(*(operand for operand in operands if operand is not None))


def _gate_up_kernel(
    group, first, stop, rows, index, weights, *bias_and_out, tile, block, activation
):  # fmt: skip
    *bias, out = bias_and_out
    start, end, expert, columns, row, live = _program(group, first, stop, tile, block)
    width = weights.shape[2] // 2

    @pl.when(start < end)
    def _():
        source = plgpu.load(index.at[row], mask=live, other=0)

        def add(step, sums):
            gate, up = _products(
                rows, source, step, live, weights, expert, (columns, width + columns), block
            )
            return sums[0] + gate, sums[1] + up

        starts = (
            _first_sum(bias, expert, column, (tile, block)) for column in (columns, width + columns)
        )
        gate, up = jax.lax.fori_loop(0, _steps(rows), add, tuple(starts))
        _store(out, row, columns, activation(gate, up), live)


def _down_kernel(group, first, stop, rows, weights, *bias_and_out, tile, block):
    *bias, out = bias_and_out
    start, end, expert, columns, row, live = _program(group, first, stop, tile, block)

    @pl.when(start < end)
    def _():
        def add(step, total):
            (product,) = _products(rows, row, step, live, weights, expert, (columns,), block)
            return total + product

        total = _first_sum(bias, expert, columns, (tile, block))
        _store(out, row, columns, jax.lax.fori_loop(0, _steps(rows), add, total), live)


def _first_sum(bias, expert, columns, shape):
    """Where the sums of products begin: at the bias, if there is one."""
    if not bias:
        return jnp.zeros(shape, jnp.float32)
    return jnp.broadcast_to(bias[0][expert, pl.ds(columns, shape[1])].astype(jnp.float32), shape)


def _sum_kernel(results, place, weights, out, *, tile, block):
    num_rows, top_k = place.shape
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    columns = pl.program_id(1) * block
    column = (columns + jnp.arange(block, dtype=jnp.int32))[None, :]
    inside = row < num_rows
    total = jnp.zeros((tile, block), jnp.float32)
    for choice in range(top_k):
        source = plgpu.load(place.at[row, choice], mask=inside, other=0)
        live = inside & (source < results.shape[0])
        weight = plgpu.load(weights.at[row, choice], mask=live, other=jnp.zeros((), weights.dtype))
        # What is not live is not read: it is nobody's, and may be a NaN.
        value = plgpu.load(
            results.at[source[:, None], column],
            mask=live[:, None],
            other=jnp.zeros((), results.dtype),
        )
        total += weight.astype(jnp.float32)[:, None] * value.astype(jnp.float32)
    _store(out, row, columns, total, inside)


def _products(rows, row, step, live, weights, expert, starts, block):
    """Block `step` of some rows times an expert's, for `block` columns from each of `starts`."""
    size = rows.shape[1] // _steps(rows)
    inputs = load_inputs(rows, row, step * size, size, live, weights)
    if not isinstance(weights, QuantizedArray):
        x, inner = inputs[0], pl.ds(step * size, size)
        return [dot(x, weights[expert, inner, pl.ds(start, block)]) for start in starts]
    columns = [start + jnp.arange(block, dtype=jnp.int32) for start in starts]
    blocks = [Block((expert,), step * size, size, column) for column in columns]
    return [multiply(inputs, weights, block, -2) for block in blocks]


def _steps(ref):
    """Number of blocks of the summed axis."""
    return ref.shape[1] * ref.dtype.itemsize // INNER_BYTES


def _store(ref, row, columns, value, live):
    column = columns + jnp.arange(value.shape[1], dtype=jnp.int32)
    value = value.astype(ref.dtype)
    plgpu.store(ref.at[row[:, None], column[None, :]], value, mask=live[:, None])


def _program(group, first, stop, tile, block):
    """What a program of the grid works on."""
    number = pl.program_id(0)
    start, end = first[number], stop[number]
    row = start + jnp.arange(tile, dtype=jnp.int32)
    return start, end, group[number], pl.program_id(1) * block, row, row < end
