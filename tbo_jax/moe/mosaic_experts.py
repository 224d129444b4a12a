"""Gated experts on GPU: Pallas (Mosaic) kernels over tiles of rows of one expert each, for Hopper.

The tiles are those of `gpu_experts`, whose kernels are of Triton. Here the tensor memory
accelerator brings rows and weights to shared memory, where the tensor cores read both (wgmma).
It reads rows that lie side by side, so the first kernel brings those of an expert together: only
as many as there are. A tile computes whatever rows it has beyond its expert's, and does not store
them: as in JAX's `ragged_dot_mgpu`, by copies of 1, 2, 4, ... rows, since those have fixed sizes.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tbo_jax import _pallas
from tbo_jax.moe.experts import apply_experts
from tbo_jax.moe.gpu_experts import sort_by_expert, tiles_of
from tbo_jax.moe.kernel import ExpertKernel, ExpertLoad, ExpertShape
from tbo_jax.quantized.array import QuantizedArray

logger = logging.getLogger(__name__)

TILE = 64  # rows; what wgmma takes for a warp group
COLUMNS = 128, 64  # of the result of a tile: the first that divides all of them
INNER = 64  # elements of a row, summed over at a time: the 128 bytes that are swizzled
STEPS = 4  # of the sum, that are in shared memory at once
ROWS = 16  # that a program gathers or adds up
GATHER, GATE_UP = "tbo_mosaic_experts_gather", "tbo_mosaic_experts_gate_up"  # kernels
DOWN, SUM = "tbo_mosaic_experts_down", "tbo_mosaic_experts_sum"


@dataclass(frozen=True)
class MosaicExperts(ExpertKernel):
    """The kernels of this module; `interpret` runs them without a GPU, slowly."""

    interpret: bool = False

    @classmethod
    def unsupported(cls, shape: ExpertShape, device: Any = None) -> str | None:
        capability = str(getattr(device, "compute_capability", "") or "9.0")
        if capability != "9.0":
            return f"it multiplies as Hopper does, and compute capability {capability} does not"
        if jnp.dtype(shape.dtype) != jnp.bfloat16:
            return f"it takes bfloat16, not {jnp.dtype(shape.dtype).name}"
        for name, size in (("hidden size", shape.hidden), ("expert width", shape.inner)):
            if size % COLUMNS[0]:
                return f"{name} {size} is no multiple of {COLUMNS[0]}"
        return None

    def __call__(self, rows, experts, weights, matrices):
        for stack in (matrices.gate_up, matrices.down):
            if isinstance(stack, QuantizedArray):
                _warn_quantised(stack.format.kind)
                return apply_experts(rows, experts, weights, matrices)
        if self.interpret:
            with _pallas.interpret_mosaic():
                return _apply(rows, experts, weights, matrices, self.interpret)
        return _apply(rows, experts, weights, matrices, self.interpret)

    def expected_work(self, load: ExpertLoad) -> dict[str, tuple[float, float]]:
        hidden, inner, width = self.shape.hidden, self.shape.inner, self._width
        rows, chosen, num_experts = load.rows, load.chosen, load.num_experts
        matrices = self.shape.weight_bytes * num_experts * hidden * inner  # of one projection
        elements = width * chosen * (hidden + inner)
        return {
            GATHER: (0.0, 2.0 * width * chosen * hidden),
            GATE_UP: (4.0 * chosen * hidden * inner, 2 * matrices + elements),
            DOWN: (2.0 * chosen * hidden * inner, matrices + elements),
            SUM: (2.0 * chosen * hidden, width * (chosen + rows) * hidden),
        }


@functools.cache
def _warn_quantised(kind):
    logger.warning(
        "the Mosaic kernel for experts is not used: it reads none of %s; XLA's own is slower", kind
    )


def _apply(rows, experts, weights, matrices, interpret):
    num_rows, top_k = experts.shape
    num_experts = matrices.num_experts
    bound = num_rows * min(top_k, num_experts)
    index, place, group_sizes = sort_by_expert(experts, num_experts, bound)
    group, first, stop = tiles_of(group_sizes, TILE, bound // TILE + num_experts)
    tiles = jnp.stack([matrices.place(group), first, stop])
    held = max(bound, TILE)  # a tile is read whole
    gathered = _gather(rows, index, group_sizes.sum()[None], held)
    product = functools.partial(_product, interpret=interpret)
    gate_up = matrices.gate_up, matrices.gate_up_bias, matrices.activation
    activated = product(GATE_UP, tiles, gathered, *gate_up)
    results = product(DOWN, tiles, activated, matrices.down, matrices.down_bias, None)
    return _sum(results, place, weights, bound)


def _kernel(body, name, shape, dtype, grid, grid_names, semantics="Warpgroup"):
    plgpu = _pallas.mosaic()
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=grid,
        grid_names=grid_names,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=getattr(plgpu.LoweringSemantics, semantics)
        ),
        kernel_name=name,
    )


def _gather(rows, index, count, held):
    """[held, D]: row `index[i]` for each i below `count` [1]; the rest is undefined."""
    most = index.shape[0]

    def body(rows, index, count, out):
        start = jax.lax.axis_index("block") * ROWS
        number = jnp.minimum(ROWS, count[0] - start)

        def copy(i, _):
            out[start + i] = rows[index[start + i]]

        jax.lax.fori_loop(0, number, copy, None)

    grid = -(-most // ROWS)
    shape = held, rows.shape[1]
    return _kernel(body, GATHER, shape, rows.dtype, (grid,), ("block",))(rows, index, count)


def _sum(results, place, weights, bound):
    """[M, D]: the weighted sum of the results at `place` [M, K], those at `bound` left out."""
    num_rows, top_k = place.shape
    hidden = results.shape[1]

    def body(results, place, weights, out):
        row = jax.lax.axis_index("row")
        total = jnp.zeros((hidden,), jnp.float32)
        for choice in range(top_k):
            source = place[row * top_k + choice]

            def add(total, source=source, choice=choice):
                weight = weights[row * top_k + choice].astype(jnp.float32)
                return total + weight * results[source].astype(jnp.float32)

            # What is not live is not read: it is nobody's, and may be a NaN.
            total = jax.lax.cond(source < bound, add, lambda total: total, total)
        out[row] = total.astype(out.dtype)

    run = _kernel(body, SUM, (num_rows, hidden), results.dtype, (num_rows,), ("row",))
    return run(results, place.reshape(-1), weights.reshape(-1))


def _product(name, tiles, rows, weights, bias, activation, interpret=False):
    """Rows of each tile times the matrix of its expert, [N, K], [G, K, C] -> [N, C].

    `tiles` [3, T] has place of the expert, first row and end row. With an `activation` the columns
    are those of gate and up, and the result has half as many.
    """
    plgpu = _pallas.mosaic()
    held, inner = rows.shape
    parts = 1 if activation is None else 2
    columns = weights.shape[2] // parts
    block = next(size for size in COLUMNS if columns % size == 0)
    biases = () if bias is None else (bias,)
    # As wgmma reads shared memory: rows of 128 bytes, eight at a time, swizzled.
    swizzled = plgpu.TilingTransform((8, INNER)), plgpu.SwizzleTransform(2 * INNER)
    spec = functools.partial(plgpu.BlockSpec, transforms=swizzled, delay_release=1)

    def body(tiles, rows, weights, *rest):
        *bias, out = rest
        number, column = jax.lax.axis_index("tile"), jax.lax.axis_index("column")
        expert, first, stop = tiles[0, number], tiles[1, number], tiles[2, number]

        @pl.when(first < stop)
        def _():
            start = jnp.minimum(first, held - TILE)  # of the tile as it is read

            def sums(*totals):
                def step(_, x, *matrices):
                    for total, matrix in zip(totals, matrices, strict=True):
                        plgpu.wgmma(total, x, matrix)

                plgpu.emit_pipeline(
                    step,
                    grid=(inner // INNER,),
                    in_specs=[
                        spec((TILE, INNER), lambda k: (0, k)),
                        *(
                            spec(
                                (INNER, block),
                                lambda k, part=part: (k, part * (columns // block) + column),
                            )
                            for part in range(parts)
                        ),
                    ],
                    max_concurrent_steps=min(STEPS, inner // INNER),
                )(rows.at[pl.ds(start, TILE)], *[weights.at[expert]] * parts)
                return [total[...] for total in totals]

            found = pl.run_scoped(sums, *[plgpu.ACC((TILE, block))] * parts)
            if bias:
                found = [
                    total
                    + _bias(bias[0], expert, part * columns + column * block, block, interpret)
                    for part, total in enumerate(found)
                ]
            (value,) = found if activation is None else (activation(*found),)

            @functools.partial(pl.run_scoped, buffer=plgpu.SMEM((TILE, block), out.dtype))
            def _(buffer):
                _pallas.store_mosaic(buffer, value.astype(out.dtype), interpret)
                plgpu.commit_smem()
                _store(plgpu, buffer, out, start, first, stop, column * block)

    grid = tiles.shape[1], columns // block
    # With the semantics of warp groups JAX 0.10.2 looks for layouts for minutes, and finds none.
    run = _kernel(body, name, (held, columns), rows.dtype, grid, ("tile", "column"), "Lane")
    return run(tiles, rows, weights, *biases)


def _bias(bias, expert, start, block, interpret):
    """A part of an expert's bias for each row of a tile, [TILE, block] float32."""
    layout = _pallas.mosaic().Layout.WGMMA.reduce(0)
    part = _pallas.load_mosaic(bias, (expert, pl.ds(start, block)), layout, interpret)
    return jax.lax.broadcast_in_dim(part.astype(jnp.float32), (TILE, block), (1,))


def _store(plgpu, buffer, out, start, first, stop, column):
    """Copies rows `first` to `stop` of a buffer of those from `start` on; sizes are fixed."""
    tile, block = buffer.shape
    at, count, size = first - start, stop - first, tile
    while size:
        here = count & size != 0

        @pl.when(here)
        def _(at=at, size=size):
            plgpu.copy_smem_to_gmem(
                buffer.at[pl.ds(at, size)],
                out.at[pl.ds(start + at, size), pl.ds(column, block)],
            )

        at += count & size
        size //= 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
