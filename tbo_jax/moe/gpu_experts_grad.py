"""Gated experts on GPU with a gradient: the kernels of `gpu_experts`, and those of their transpose.

The backward pass keeps nothing but what the forward pass was given. It computes the projections of
gate and up anew: kept, they would take 2F numbers for each choice that could be of this device (1.6
GB a layer for Qwen3-30B-A3B, 8,192 tokens and 8 devices), and computing them is a quarter of the
work of both passes' six products. Weights are read in place, transposed in registers. Each
expert's gradient is the sum over its own rows, which one program of the grid makes for each block
of the matrix, as MegaBlocks (Gale et al. 2023) has it; an expert without rows gets zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax._pallas import triton as plgpu
from tbo_jax.moe.gpu_experts import (
    INNER_BYTES,
    SMALLEST_TILE,
    SUM,
    TILE_BYTES,
    GpuExperts,
    _program,
    _run,
    _steps,
    _store,
    _sum_kernel,
    _tile_rows,
    sort_by_expert,
    tiles_of,
)
from tbo_jax.moe.gradient import apply_with_gradient
from tbo_jax.moe.kernel import ExpertLoad
from tbo_jax.quantized.gpu_block import dot

# Columns of the first kernel: three sums of 128 rows x 64 columns are 96 registers of 256 threads.
# With biases or narrow it takes half: else a thread spills up to 164 bytes, as ptxas 12.9 says.
ACTIVATION_COLUMNS, FEWER_COLUMNS = 64, 32
OUTER_BLOCKS = 128, 64  # of the rows and of the columns of a gradient of weights
HIDDEN_GRAD, ROWS_GRAD = "tbo_experts_hidden_grad", "tbo_experts_rows_grad"
GATE_UP_GRAD, DOWN_GRAD = "tbo_experts_gate_up_grad", "tbo_experts_down_grad"


@dataclass(frozen=True)
class DifferentiableGpuExperts(GpuExperts):
    """`GpuExperts`, differentiable in all but the choices: for training."""

    def __call__(self, rows, experts, weights, matrices):
        return apply_with_gradient(
            super().__call__, self._backward, rows, experts, weights, matrices
        )

    def _backward(self, rows, experts, weights, matrices, grad):
        """The gradients of rows, weights of the choices, and matrices, from that of the result."""
        num_rows, top_k = experts.shape
        num_experts = matrices.num_experts
        _, width, hidden = matrices.down.shape
        bound = num_rows * min(top_k, num_experts)
        index, place, group_sizes = sort_by_expert(experts, num_experts, bound)
        scale = jnp.zeros(bound, weights.dtype).at[place].set(weights, mode="drop")
        tile = _tile_rows(num_rows, num_experts, rows.dtype.itemsize)
        tiles = tiles_of(group_sizes, tile, bound // tile + num_experts)
        grid = tiles[0].shape[0]
        grad = grad.astype(rows.dtype)
        call = functools.partial(_call, interpret=self.interpret)
        warps = 8 if tile * rows.dtype.itemsize > TILE_BYTES // 2 else 4

        biased = matrices.down_bias is not None
        block = FEWER_COLUMNS if self.narrow or biased else ACTIVATION_COLUMNS
        columns = width // block
        activated, of_gate_up, of_weight = call(
            functools.partial(_hidden_grad_kernel, activation=matrices.activation),
            HIDDEN_GRAD, (grid, columns), tile, block, warps,
            (*tiles, rows, grad, index, scale, matrices.gate_up, matrices.down,
             matrices.gate_up_bias, matrices.down_bias),
            [((bound, width), rows.dtype), ((bound, 2 * width), rows.dtype),
             ((columns, bound), jnp.float32)],
            # A stage is 56 KB; a block has 99 KB on compute capability 8.6, 8.9 and 12.0.
            stages=2 if self.narrow else 3,
        )  # fmt: skip
        run = functools.partial(_run, dtype=rows.dtype, interpret=self.interpret)
        of_sorted = run(
            _rows_grad_kernel, ROWS_GRAD, grid, (*tiles, of_gate_up, matrices.gate_up),
            (bound, hidden), tile=tile,
        )  # fmt: skip
        here = place < bound
        of_rows = run(
            _sum_kernel, SUM, -(-num_rows // SMALLEST_TILE),
            (of_sorted, place, here.astype(weights.dtype)), (num_rows, hidden), tile=SMALLEST_TILE,
        )  # fmt: skip
        picked = of_weight[:, jnp.minimum(place, bound - 1)].sum(0)
        of_weights = jnp.where(here, picked, 0.0).astype(weights.dtype)

        end = jnp.cumsum(group_sizes)
        spans = end - group_sizes, end
        of_down, of_down_bias = _outer(
            call, DOWN_GRAD, spans, activated, None, grad, index, scale,
            matrices.down, matrices.down_bias,
        )  # fmt: skip
        of_matrix, of_bias = _outer(
            call, GATE_UP_GRAD, spans, rows, index, of_gate_up, None, None,
            matrices.gate_up, matrices.gate_up_bias,
        )  # fmt: skip
        of_own = replace(
            matrices,
            gate_up=of_matrix, down=of_down, gate_up_bias=of_bias, down_bias=of_down_bias,
        )  # fmt: skip
        return of_rows, of_weights, of_own

    def expected_work(self, load: ExpertLoad) -> dict[str, tuple[float, float]]:
        hidden, inner, width = self.shape.hidden, self.shape.inner, self._width
        chosen, num_experts = load.chosen, load.num_experts
        matrix = self.shape.weight_bytes * num_experts * hidden * inner  # of one projection
        product = 2.0 * chosen * hidden * inner
        of_hidden, of_inner = width * chosen * hidden, width * chosen * inner
        partial_sums = 4 * chosen * inner / ACTIVATION_COLUMNS
        return super().expected_work(load) | {
            HIDDEN_GRAD: (3 * product, 3 * matrix + 2 * of_hidden + 3 * of_inner + partial_sums),
            ROWS_GRAD: (2 * product, 2 * matrix + of_hidden + 2 * of_inner),
            DOWN_GRAD: (product, matrix + of_hidden + of_inner),
            GATE_UP_GRAD: (2 * product, 2 * matrix + of_hidden + 2 * of_inner),
        }


def _call(
    kernel, name, grid, tile, block, warps, operands, results, *, interpret, stages=3
):  # fmt: skip
    """Run a kernel with several results; operands that are None are left out, and it is told so."""
    given = tuple(operand is not None for operand in operands)
    return pl.pallas_call(
        functools.partial(_with_given, kernel, given, tile=tile, block=block),
        out_shape=[jax.ShapeDtypeStruct(shape, of) for shape, of in results],
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*(operand for operand in operands if operand is not None))


def _with_given(kernel, given, *refs, tile, block):
    """Call a kernel with None for each operand that was left out."""
    rest = iter(refs)
    operands = [next(rest) if there else None for there in given]
    kernel(*operands, *rest, tile=tile, block=block)


def _gathered(ref, row, start, size, live):
    """[M, size] of some rows, zero where not live: what is nobody's may be a NaN."""
    column = start + jnp.arange(size, dtype=jnp.int32)
    zero = jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[row[:, None], column[None, :]], mask=live[:, None], other=zero)


def _hidden_grad_kernel(
    group, first, stop, rows, grad, index, scale, gate_up, down, bias, down_bias,
    hidden_out, gate_up_out, weight_out, *, tile, block, activation,
):  # fmt: skip
    """Activations again, their gradients, and each choice's part of the gradient of its weight."""
    start, end, expert, columns, row, live = _program(group, first, stop, tile, block)
    number, width = pl.program_id(1), down.shape[1]

    @pl.when(start < end)
    def _():
        source = plgpu.load(index.at[row], mask=live, other=0)
        factor = plgpu.load(scale.at[row], mask=live, other=jnp.zeros((), scale.dtype))
        size = rows.shape[1] // _steps(rows)

        def add(step, sums):
            inner = pl.ds(step * size, size)
            x = _gathered(rows, source, step * size, size, live)
            dy = _gathered(grad, source, step * size, size, live)
            gate = dot(x, gate_up[expert, inner, pl.ds(columns, block)])
            up = dot(x, gate_up[expert, inner, pl.ds(width + columns, block)])
            of_hidden = dot(dy, down[expert, pl.ds(columns, block), inner].T)
            of_bias = sums[3]
            if down_bias is not None:  # in the first block of columns, once for each choice
                inner_bias = down_bias[expert, inner].astype(jnp.float32)
                times_bias = (dy.astype(jnp.float32) * inner_bias[None, :]).sum(1)
                of_bias += jnp.where(number == 0, times_bias, 0.0)
            return sums[0] + gate, sums[1] + up, sums[2] + of_hidden, of_bias

        def first_sum(at):
            if bias is None:
                return jnp.zeros((tile, block), jnp.float32)
            row_bias = bias[expert, pl.ds(at, block)].astype(jnp.float32)
            return jnp.broadcast_to(row_bias, (tile, block))

        zeros = jnp.zeros((tile, block), jnp.float32), jnp.zeros(tile, jnp.float32)
        sums = first_sum(columns), first_sum(width + columns), *zeros
        gate, up, of_hidden, of_bias = jax.lax.fori_loop(0, _steps(rows), add, sums)
        hidden, transpose = jax.vjp(activation, gate, up)
        of_weight = (of_hidden * hidden).sum(1) + of_bias
        of_gate, of_up = transpose(of_hidden * factor.astype(jnp.float32)[:, None])
        _store(hidden_out, row, columns, hidden, live)
        _store(gate_up_out, row, columns, of_gate, live)
        _store(gate_up_out, row, width + columns, of_up, live)
        plgpu.store(weight_out.at[number, row], of_weight, mask=live)


def _rows_grad_kernel(group, first, stop, of_gate_up, gate_up, out, *, tile, block):
    """Gradients of gate and up times an expert's matrix, transposed."""
    start, end, expert, columns, row, live = _program(group, first, stop, tile, block)

    @pl.when(start < end)
    def _():
        size = of_gate_up.shape[1] // _steps(of_gate_up)

        def add(step, total):
            inner = pl.ds(step * size, size)
            d = _gathered(of_gate_up, row, step * size, size, live)
            return total + dot(d, gate_up[expert, pl.ds(columns, block), inner].T)

        total = jnp.zeros((tile, block), jnp.float32)
        _store(out, row, columns, jax.lax.fori_loop(0, _steps(of_gate_up), add, total), live)


def _outer(call, name, spans, lhs, lhs_index, rhs, rhs_index, rhs_scale, matrix, bias):
    """For each expert the product of its rows, `lhs.T @ rhs`, and the sums of `rhs`.

    [E, K, N] and, where there is a bias, [E, N]. Rows are those of the choices, or with an index
    those that it names; `rhs_scale` multiplies them.
    """
    experts, inner, width = matrix.shape
    # Of float32 more is spilt: the cores that multiply all its bits sum in registers.
    blocks = OUTER_BLOCKS if lhs.dtype.itemsize == 2 else OUTER_BLOCKS[-1:]
    tall, wide = (next(b for b in blocks if size % b == 0) for size in (inner, width))
    tile = max(16, INNER_BYTES // lhs.dtype.itemsize)
    results = [(matrix.shape, matrix.dtype)]
    if bias is not None:
        results.append((bias.shape, bias.dtype))
    kernel = functools.partial(_outer_kernel, tall=tall)
    out, *of_bias = call(
        kernel, name, (experts, inner // tall, width // wide), tile, wide, 8,
        (*spans, lhs, lhs_index, rhs, rhs_index, rhs_scale), results,
    )  # fmt: skip
    return out, of_bias[0] if of_bias else None


def _outer_kernel(
    starts, ends, lhs, lhs_index, rhs, rhs_index, rhs_scale, out, *bias_out, tile, block, tall
):  # fmt: skip
    expert, down, across = (pl.program_id(axis) for axis in range(3))
    start, end = starts[expert], ends[expert]

    def add(step, sums):
        total, columns = sums
        row = start + step * tile + jnp.arange(tile, dtype=jnp.int32)
        live = row < end

        def source(index):
            return row if index is None else plgpu.load(index.at[row], mask=live, other=0)

        a = _gathered(lhs, source(lhs_index), down * tall, tall, live)
        b = _gathered(rhs, source(rhs_index), across * block, block, live)
        if rhs_scale is not None:
            zero = jnp.zeros((), rhs_scale.dtype)
            factor = plgpu.load(rhs_scale.at[row], mask=live, other=zero).astype(jnp.float32)
            b = (b.astype(jnp.float32) * factor[:, None]).astype(b.dtype)
        return total + dot(a.T, b), columns + b.astype(jnp.float32).sum(0)

    sums = jnp.zeros((tall, block), jnp.float32), jnp.zeros(block, jnp.float32)
    total, columns = jax.lax.fori_loop(0, (end - start + tile - 1) // tile, add, sums)
    out[expert, pl.ds(down * tall, tall), pl.ds(across * block, block)] = total.astype(out.dtype)
    if bias_out:

        @pl.when(down == 0)
        def _():
            bias_out[0][expert, pl.ds(across * block, block)] = columns.astype(bias_out[0].dtype)
