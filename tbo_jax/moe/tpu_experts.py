"""Gated experts on TPU: Pallas (Mosaic) kernels over tiles of rows, in chunks of what is live.

As in MegaBlocks (Gale et al. 2023) rows are sorted by expert, a tile is visited once for each
expert that has rows in it, and the weights are read in place. A device may receive many more rows
than it has work for: the padded exchange sends R x T slots of K choices, of which one in R is of
this device. So choices are counted, and a loop moves them a chunk at a time. They come back to
their rows by a product with a matrix of weights: scattered rows are slow on TPU.

`jax.experimental.pallas.ops.tpu.megablox.gmm` was tried first. It takes some 70 small operations to
plan a call, among them scatters that XLA moves to the SparseCores of v5p and later, and it leaves
the activation to XLA, which writes three intermediates for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tbo_jax.moe.experts import apply_experts
from tbo_jax.moe.kernel import ExpertKernel, ExpertLoad, ExpertShape
from tbo_jax.quantized.array import QuantizedArray

LANES = 128
ROW_TILE = 128  # rows of a tile: fewer leave the matrix units waiting for weights
WEIGHT_TILE_BYTES = 4 << 20  # of one weight; gate and up, and two buffers of each, make it four
SUM_COLUMNS = 2048  # of a tile of the sums
FAST_MEMORY = 40 << 20  # bytes that a kernel may take, of 64 MiB (TPU7x) or more
# Rows of a chunk for each row that was received. Behind an even exchange a device has K / R choices
# a row: a turn for 8 devices and 8 choices, with room for uneven routing.
CHUNK = 1.25
CHUNKS = "expert_chunks"  # scope of the loop
GATE_UP, DOWN, SUM = "tbo_tpu_experts_gate_up", "tbo_tpu_experts_down", "tbo_tpu_experts_sum"


@dataclass(frozen=True)
class TpuExperts(ExpertKernel):
    """The kernels of this module; `interpret` runs them without a TPU, slowly."""

    interpret: bool = False

    @classmethod
    def unsupported(cls, shape: ExpertShape, device: Any = None) -> str | None:
        dtype = jnp.dtype(shape.dtype)
        if dtype != jnp.bfloat16:
            return f"{dtype.name} would be rounded to bfloat16 by the matrix units"
        largest = WEIGHT_TILE_BYTES // 2 // LANES
        for name, size in (("hidden size", shape.hidden), ("expert width", shape.inner)):
            if size % LANES or size > largest:
                return f"{name} {size} is no multiple of {LANES} up to {largest}"
        return None

    def __call__(self, rows, experts, weights, matrices):
        if any(isinstance(m, QuantizedArray) for m in (matrices.gate_up, matrices.down)):
            # The kernel reads bfloat16; XLA decodes those experts that have rows, one at a time.
            return apply_experts(rows, experts, weights, matrices)
        num_rows, top_k = experts.shape
        gate_up, down, num_experts = matrices.gate_up, matrices.down, matrices.num_experts
        _, width, hidden = down.shape
        bound = num_rows * min(top_k, num_experts)
        chunk = chunk_rows(num_rows, bound)
        choices, scales, ends = _sort_by_expert(
            experts, weights, num_experts, -(-bound // chunk) * chunk
        )
        row_tiles = -(-num_rows // ROW_TILE)
        run = functools.partial(_run, interpret=self.interpret)

        def add(number: jax.Array, sums: jax.Array) -> jax.Array:
            start = number * chunk
            place = jnp.arange(chunk, dtype=jnp.int32)
            choice, scale = (
                jax.lax.dynamic_slice_in_dim(a, start, chunk) for a in (choices, scales)
            )
            visits = _visit(jnp.clip(ends - start, 0, chunk), chunk)
            visits = visits._replace(group=matrices.place(visits.group))
            columns = _columns(hidden, width)
            taken = rows[jnp.minimum(choice // top_k, num_rows - 1)]
            kernel = functools.partial(_gate_up_kernel, activation=matrices.activation)
            activated = run(
                kernel, GATE_UP, visits, taken, gate_up, matrices.gate_up_bias, width, columns,
                first_columns=(0, width // columns),
            )  # fmt: skip
            results = run(
                _down_kernel, DOWN, visits, activated, down, matrices.down_bias, hidden,
                _columns(width, hidden),
            )  # fmt: skip
            # In the order of their rows, so that those of a tile of rows are neighbours.
            choice, place, scale = jax.lax.sort((choice, place, scale), num_keys=1, is_stable=False)
            tile_end = (jnp.arange(row_tiles, dtype=jnp.int32) + 1) * (ROW_TILE * top_k)
            tile_end = jnp.minimum(tile_end, num_rows * top_k)  # behind it: nobody's
            visits = _visit(
                jnp.sum(choice < tile_end[:, None], axis=1, dtype=jnp.int32), chunk, empty=True
            )
            return _add_up(visits, choice // top_k, scale, results[place], sums, self.interpret)

        # The number of turns is data; the name lets the schedule report assume one.
        with jax.named_scope(CHUNKS):
            sums = jnp.zeros((row_tiles * ROW_TILE, hidden), jnp.float32)
            sums = jax.lax.fori_loop(0, -(-ends[-1] // chunk), add, sums)
        return sums[:num_rows].astype(rows.dtype)

    def expected_turns(self, load: ExpertLoad) -> dict[str, float]:
        return {CHUNKS: float(-(-load.chosen // chunk_rows(load.rows, load.bound)))}

    def expected_work(self, load: ExpertLoad) -> dict[str, tuple[float, float]]:
        """Each turn reads the experts."""
        hidden, inner, width = self.shape.hidden, self.shape.inner, self._width
        rows, num_experts = load.rows, load.num_experts
        live = load.chosen / max(1.0, self.expected_turns(load)[CHUNKS])
        tiles = live / ROW_TILE + num_experts  # that are visited, and computed in full
        gate_up = num_experts * hidden * 2 * inner + live * (hidden + inner)
        down = num_experts * hidden * inner + live * (hidden + inner)
        summed = 2 * (live + rows) * ROW_TILE * hidden  # two products
        return {
            GATE_UP: (4.0 * tiles * ROW_TILE * hidden * inner, width * gate_up),
            DOWN: (2.0 * tiles * ROW_TILE * hidden * inner, width * down),
            SUM: (2.0 * summed, float(width * live * hidden + 2 * 4 * rows * hidden)),
        }


def _sort_by_expert(
    experts: jax.Array, weights: jax.Array, num_experts: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The choices of expert 0, then of 1, ... [size], as row * K + k, then M * K for nobody's;
    their weights [size] float32; where each expert's end [E].
    """
    chosen = experts.reshape(-1)
    here = (chosen >= 0) & (chosen < num_experts)
    chosen = jnp.where(here, chosen, num_experts)
    nobody = chosen.shape[0]
    choice = jnp.where(here, jnp.arange(nobody, dtype=jnp.int32), nobody)
    scale = weights.reshape(-1).astype(jnp.float32)
    _, choice, scale = jax.lax.sort((chosen, choice, scale), num_keys=1, is_stable=False)
    spare = max(0, size - nobody)
    choice = jnp.pad(choice, (0, spare), constant_values=nobody)[:size]
    scale = jnp.pad(scale, (0, spare))[:size]
    ends = chosen[:, None] <= jnp.arange(num_experts, dtype=jnp.int32)
    return choice, scale, jnp.sum(ends, axis=0, dtype=jnp.int32)


def chunk_rows(num_rows: int, bound: int) -> int:
    """Rows of a chunk, a whole number of tiles, for M = `num_rows` with `bound` choices at most."""
    wanted = min(int(num_rows * CHUNK), bound)
    return max(1, -(-wanted // ROW_TILE)) * ROW_TILE


def _columns(inner: int, columns: int) -> int:
    """Columns of a tile of weights: all of `inner` is in one, so that each is read once."""
    return _largest(columns, WEIGHT_TILE_BYTES // 2 // inner)


def _largest(size: int, most: int) -> int:
    """The largest multiple of 128 that divides `size` and is `most` at most."""
    return max(n for n in range(LANES, max(most, LANES) + 1, LANES) if size % n == 0)


class _Visits(NamedTuple):
    """What the programs of a kernel work on: a tile, and the rows of one group in it."""

    group: jax.Array  # [V]
    tile: jax.Array  # [V]
    start: jax.Array  # [V], of the group
    stop: jax.Array  # [V]
    first: jax.Array  # [V], the group's first visit
    total: jax.Array  # [], visits that there are


def _visit(ends: jax.Array, size: int, empty: bool = False) -> _Visits:
    """Visits of groups of rows that lie one after another, in `size` rows; of empty ones if told.

    Picked by comparison: XLA moves a gather of single numbers to the SparseCores.
    """
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first_tile = jnp.minimum(starts // ROW_TILE, size // ROW_TILE - 1)
    number = (ends - 1) // ROW_TILE - first_tile + 1
    number = jnp.where(ends > starts, number, int(empty))
    visit_end = jnp.cumsum(number, dtype=jnp.int32)
    visit = jnp.arange(size // ROW_TILE + ends.shape[0], dtype=jnp.int32)[:, None]
    mine = (visit < visit_end) & (visit >= visit_end - number)

    def pick(of_group: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine, of_group, 0), axis=1, dtype=jnp.int32)

    index = pick(jnp.arange(ends.shape[0], dtype=jnp.int32))
    step = visit[:, 0] - pick(visit_end - number)
    tile = pick(first_tile) + jnp.where(mine.any(1), step, 0)
    first = (step == 0).astype(jnp.int32)
    return _Visits(index, tile, pick(starts), pick(ends), first, visit_end[-1])


def _run(
    kernel, name, visits, lhs, weights, bias, columns, block, *, interpret, first_columns=(0,)
):  # fmt: skip
    """Rows [C, I] with weights [G, I, ...] and a bias [G, ...] or None -> [C, columns].

    The kernel gets of both the columns from each of the `first_columns` on, counted in blocks.
    """
    inner = lhs.shape[1]
    stacks = [weights] if bias is None else [weights, bias[:, None]]

    def spec(stack: jax.Array, begin: int) -> pl.BlockSpec:
        shape = (None, stack.shape[1], block)
        return pl.BlockSpec(shape, lambda n, v, group, *_: (group[v], 0, begin + n))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((lhs.shape[0], columns), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            # The visits of an expert are neighbours in the grid: its weights stay where they are.
            grid=(columns // block, visits.total),
            in_specs=[
                pl.BlockSpec((ROW_TILE, inner), lambda n, v, group, tile, *_: (tile[v], 0)),
                *(spec(stack, begin) for stack in stacks for begin in first_columns),
            ],
            out_specs=pl.BlockSpec((ROW_TILE, block), lambda n, v, group, tile, *_: (tile[v], n)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        interpret=interpret,
        name=name,
    )(*visits[:4], lhs, *(stack for stack in stacks for _ in first_columns))


def _dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jax.lax.dot(lhs, rhs, preferred_element_type=jnp.float32)


def _mine(tile, start, stop, shape):
    """Which elements of a tile are in the rows of the group that is visited."""
    visit = pl.program_id(1)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + tile[visit] * ROW_TILE
    return (row >= start[visit]) & (row < stop[visit])


def _store(out, value, tile, start, stop):
    """The visited group's rows only: the others in the tile belong to its neighbours."""
    mine = _mine(tile, start, stop, out.shape)
    out[...] = jnp.where(mine, value, out[...].astype(jnp.float32)).astype(out.dtype)


def _gate_up_kernel(group, tile, start, stop, rows, gate, up, *biases_and_out, activation):
    *biases, out = biases_and_out
    sums = [_dot(rows[...], weights[...]) for weights in (gate, up)]
    _store(out, activation(*_biased(sums, biases)), tile, start, stop)


def _down_kernel(group, tile, start, stop, rows, weights, *bias_and_out):
    *bias, out = bias_and_out
    (value,) = _biased([_dot(rows[...], weights[...])], bias)
    _store(out, value, tile, start, stop)


def _biased(sums, biases):
    if not biases:
        return sums
    return [value + bias[...].astype(jnp.float32) for value, bias in zip(sums, biases, strict=True)]


def _add_up(visits, row, scale, results, sums, interpret):
    """sums [M, D] with scale x results [C, D] added to the rows [C], which ascend."""
    hidden = sums.shape[1]
    block = _largest(hidden, SUM_COLUMNS)
    of_tile = pl.BlockSpec((1, ROW_TILE), lambda n, v, group, tile, *_: (0, tile[v]))
    of_group = pl.BlockSpec((ROW_TILE, block), lambda n, v, group, *_: (group[v], n))
    taken = pl.BlockSpec((ROW_TILE, block), lambda n, v, group, tile, *_: (tile[v], n))
    return pl.pallas_call(
        _sum_kernel,
        out_shape=jax.ShapeDtypeStruct(sums.shape, sums.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(hidden // block, visits.total),
            in_specs=[of_tile, of_tile, taken, of_group],
            out_specs=of_group,
        ),
        input_output_aliases={8: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        interpret=interpret,
        name=SUM,
    )(*visits[:5], row[None], scale[None], results, sums)


def _sum_kernel(group, tile, start, stop, first, row, scale, results, sums, out):
    visit = pl.program_id(1)

    @pl.when(first[visit] == 1)
    def _():
        out[...] = sums[...]

    mine = _mine(tile, start, stop, results.shape)
    value = jnp.where(mine, results[...].astype(jnp.float32), 0.0)
    # A product spreads what is not finite over all rows of the tile: it is left out, and its place
    # is found by a second product.
    finite = jnp.abs(value) < jnp.inf
    shape = (ROW_TILE, ROW_TILE)
    here = row[...] - group[visit] * ROW_TILE == jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    factor = jnp.where(here, scale[...], 0.0).astype(results.dtype)
    clean = _dot(factor, jnp.where(finite, value, 0.0).astype(results.dtype))
    broken = jnp.where(finite, 0.0, 1.0).astype(results.dtype)
    broken = _dot(here.astype(jnp.float32).astype(results.dtype), broken)
    out[...] += jnp.where(broken > 0, jnp.nan, clean)
