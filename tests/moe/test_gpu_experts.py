"""The GPU kernels, interpreted on CPU, against one expert after another in numpy."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tbo_jax.moe import gpu_experts
from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.kernel import ExpertShape
from tests.gpu_lowering import lower_for_gpu
from tests.moe.stacks import CLAMPED, between_others, one_by_one

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}  # of the largest element


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows M that choose K of E experts each; hidden D, width F."""

    rows: int
    top_k: int
    experts: int
    hidden: int = 128
    width: int = 128
    dtype: Any = np.float32
    biased: bool = False  # and clamped
    narrow: bool = False  # of the kernel

    @property
    def of_experts(self) -> ExpertShape:
        """As the kernel wants it."""
        return ExpertShape(self.hidden, self.width, self.dtype)

    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of rows, weights of the choices, gate and up, down, and of the biases."""
        hidden, width, experts = self.hidden, self.width, self.experts
        gate_up, down = (experts, hidden, 2 * width), (experts, width, hidden)
        biases = ((experts, 2 * width), (experts, hidden)) if self.biased else ()
        return (self.rows, hidden), (self.rows, self.top_k), gate_up, down, *biases


SHAPES = {
    "more experts than rows": Shape(5, 3, 16),
    "more choices than experts": Shape(20, 4, 2, width=256),
    "large tiles": Shape(150, 2, 2),
    "large tiles, narrow": Shape(150, 2, 2, narrow=True),
    "bfloat16": Shape(40, 2, 4, hidden=256, dtype=jnp.bfloat16),
    "biased, narrow blocks": Shape(30, 2, 4, hidden=192, width=64, biased=True),
    "biased, bfloat16": Shape(30, 2, 4, dtype=jnp.bfloat16, biased=True),
}


@cache
def compiled(shape: Shape) -> Any:
    rows, weights, *matrices = (
        jax.ShapeDtypeStruct(axes, shape.dtype) for axes in shape.operands()
    )
    ids = jax.ShapeDtypeStruct((shape.rows, shape.top_k), jnp.int32)

    def apply(rows, ids, weights, *arrays):
        activation = CLAMPED if shape.biased else SwiGlu()
        matrices = between_others(*arrays, activation=activation)
        kernel = GpuExperts(shape.of_experts, interpret=True, narrow=shape.narrow)
        return kernel(rows, ids, weights, matrices)

    lowered = jax.jit(apply).lower(rows, ids, weights, *matrices)
    return lowered.compile({"xla_backend_optimization_level": "0"})


def choices(shape: Shape, seed: int, skew: float, outside: float) -> np.ndarray:
    """[M, K] ids without a repetition in a row; `outside` is the share of those that are not here.

    With a large `skew` most rows choose the same few experts.
    """
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.arange(shape.experts), np.arange(-shape.top_k, 0), [2**30, 200]])
    here = np.arange(len(ids)) < shape.experts
    score = rng.gumbel(size=(shape.rows, len(ids))) + skew * rng.permutation(len(ids))
    score += np.where(here, 0, np.where(rng.random(score.shape) < outside, 1e6, -1e6))
    return ids[np.argsort(-score)[:, : shape.top_k]].astype(np.int32)


def draw(shape: Shape, ids: np.ndarray, seed: int) -> list[np.ndarray]:
    """Rows, ids, weights, gate and up, down; NaN in all that nobody owns."""
    rng = np.random.default_rng(seed)
    scales = 1, 1, shape.hidden**-0.5, shape.width**-0.5, 1, 1
    rows, weights, *arrays = (
        (rng.normal(size=axes) * scale).astype(shape.dtype)
        for axes, scale in zip(shape.operands(), scales)
    )
    here = (ids >= 0) & (ids < shape.experts)
    rows[~here.any(1)] = np.nan
    weights[~here] = np.nan
    idle = ~np.isin(np.arange(shape.experts), ids)
    for array in arrays:
        array[idle] = np.nan
    return [rows, ids, weights, *arrays]


def check(shape: Shape, operands: list[np.ndarray]) -> None:
    out = compiled(shape)(*operands)
    assert out.dtype == shape.dtype
    expected = one_by_one(*operands)
    tolerance = TOLERANCE[out.dtype.name]
    found = np.asarray(out).astype(np.float32)
    np.testing.assert_allclose(found, expected, atol=tolerance * (1 + abs(expected).max()))
    ids = operands[1]
    assert not found[((ids < 0) | (ids >= shape.experts)).all(1)].any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 99),
    skew=st.sampled_from([0.0, 0.3, 9.0]),
    outside=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
@example(seed=0, skew=0.0, outside=0.0)
@example(seed=1, skew=9.0, outside=0.0)
@example(seed=2, skew=0.0, outside=1.0)
def test_equals_the_reference(shape: Shape, seed: int, skew: float, outside: float) -> None:
    check(shape, draw(shape, choices(shape, seed, skew, outside), seed))


@pytest.mark.parametrize("broken", [0, 7, 19])
def test_a_broken_row_breaks_no_other(broken: int) -> None:
    shape = SHAPES["more choices than experts"]
    operands = draw(shape, choices(shape, 3, 0, 0), 3)
    operands[0][broken] = np.nan
    found = np.asarray(compiled(shape)(*operands))
    assert np.isnan(found).any(axis=1).tolist() == [row == broken for row in range(shape.rows)]


GROUPS, BOUND = 5, 400  # experts, and rows that they have at most
cover = jax.jit(gpu_experts.tiles_of, static_argnums=(1, 2))


@st.composite
def sizes_of_groups(draw: st.DrawFn) -> list[int]:
    size = st.one_of(st.sampled_from([0, 0, 1, 15, 16, 17, 128]), st.integers(0, BOUND))
    sizes: list[int] = []
    for _ in range(GROUPS):
        sizes.append(min(draw(size), BOUND - sum(sizes)))
    return sizes


@settings(max_examples=60, deadline=None)
@given(sizes_of_groups(), st.sampled_from([16, 128]))
@example([0] * GROUPS, 16)
@example([1, 1, 1, 1, BOUND - 4], 16)
@example([0, BOUND, 0, 0, 0], 128)
def test_tiles_cover_every_row_once(sizes: list[int], tile: int) -> None:
    tiles = cover(np.array(sizes, np.int32), tile, BOUND // tile + GROUPS)
    covered = [
        (group, row)
        for group, first, stop in zip(*(np.asarray(x).tolist() for x in tiles))
        for row in range(first, stop)
    ]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    assert covered == list(zip(owner.tolist(), range(sum(sizes))))
    assert (tiles[2] - tiles[1] <= tile).all()


sort_all = jax.jit(gpu_experts.sort_by_expert, static_argnums=(1, 2))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.3, 9.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_choices_are_sorted_by_expert(seed: int, skew: float, outside: float) -> None:
    shape = SHAPES["bfloat16"]
    ids = choices(shape, seed, skew, outside)
    bound = shape.rows * shape.top_k
    index, place, sizes = sort_all(ids, shape.experts, bound)
    flat = np.where((ids >= 0) & (ids < shape.experts), ids, shape.experts).reshape(-1)
    order = np.argsort(flat, kind="stable")
    count = (flat < shape.experts).sum()
    np.testing.assert_array_equal(sizes, np.bincount(flat, minlength=shape.experts + 1)[:-1])
    np.testing.assert_array_equal(index[:count], order[:count] // shape.top_k)
    expected = np.where(flat < shape.experts, np.argsort(order), bound)
    np.testing.assert_array_equal(np.reshape(place, -1), expected)


@pytest.mark.parametrize(
    ("hidden", "width", "reason"),
    [
        (2048, 768, None),
        (2880, 2880, None),
        (2000, 768, "hidden size 2000 is no multiple of 64"),
        (128, 16, "expert width 16 is no multiple of 64"),
    ],
)
def test_unsupported(hidden: int, width: int, reason: str | None) -> None:
    assert GpuExperts.unsupported(ExpertShape(hidden, width, jnp.bfloat16)) == reason


@pytest.mark.parametrize(
    ("rows", "narrow", "expected"),
    [(5000, False, [128, 128, 128]), (5000, True, [64, 128, 128]), (64, True, [128, 128, 128])],
)
def test_only_gate_and_up_of_large_tiles_are_narrow(
    rows: int, narrow: bool, expected: list[int]
) -> None:
    shape = Shape(rows, 6, 12, dtype=jnp.bfloat16)
    x, weights, *arrays = (jax.ShapeDtypeStruct(axes, jnp.bfloat16) for axes in shape.operands())
    ids = jax.ShapeDtypeStruct((rows, shape.top_k), jnp.int32)
    text = str(
        jax.make_jaxpr(GpuExperts(shape.of_experts, narrow=narrow))(
            x, ids, weights, ExpertWeights(*arrays, activation=SwiGlu())
        )
    )
    grids = re.findall(r"grid=\((\d+), (\d+)\)", text)
    assert [128 // int(columns) for _, columns in grids] == expected


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 64, 700, 5000])
def test_lowers_for_a_gpu(rows: int, dtype: Any) -> None:
    """Triton takes the shapes of all blocks, for every size of a tile."""
    for biased, hidden in ((False, 384), (True, 320)):
        shape = Shape(rows, 6, 12, hidden=hidden, width=640, dtype=dtype, biased=biased)
        x, weights, *arrays = (jax.ShapeDtypeStruct(axes, dtype) for axes in shape.operands())
        ids = jax.ShapeDtypeStruct((rows, shape.top_k), jnp.int32)
        matrices = ExpertWeights(*arrays, activation=CLAMPED if biased else SwiGlu())
        lower_for_gpu(GpuExperts(shape.of_experts), (x, ids, weights, matrices))
