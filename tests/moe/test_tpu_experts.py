"""The TPU kernels, interpreted on CPU, against one expert after another in numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tbo_jax.moe import tpu_experts
from tbo_jax.moe.activation import SwiGlu
from tbo_jax.moe.kernel import ExpertLoad, ExpertShape
from tbo_jax.moe.tpu_experts import TpuExperts
from tests.moe.stacks import CLAMPED, between_others, one_by_one

HIDDEN, WIDTH = 128, 256
# Rows, choices of each, experts here. The second takes three turns of the loop if all are here.
SHAPES = {"more experts than rows": (5, 3, 16), "several tiles": (150, 4, 4)}


@cache
def compiled(shape: tuple[int, int, int], biased: bool = False) -> Any:
    rows, top_k, experts = shape
    bf16 = jnp.bfloat16

    def apply(rows, ids, weights, *arrays):
        matrices = between_others(*arrays, activation=CLAMPED if biased else SwiGlu())
        kernel = TpuExperts(ExpertShape(HIDDEN, WIDTH, bf16), interpret=True)
        return kernel(rows, ids, weights, matrices)

    lowered = jax.jit(apply).lower(
        jax.ShapeDtypeStruct((rows, HIDDEN), bf16),
        jax.ShapeDtypeStruct((rows, top_k), jnp.int32),
        jax.ShapeDtypeStruct((rows, top_k), bf16),
        jax.ShapeDtypeStruct((experts, HIDDEN, 2 * WIDTH), bf16),
        jax.ShapeDtypeStruct((experts, WIDTH, HIDDEN), bf16),
        *(jax.ShapeDtypeStruct((experts, n), bf16) for n in (2 * WIDTH, HIDDEN) if biased),
    )
    return lowered.compile({"xla_backend_optimization_level": "0"})


def draw(
    shape: tuple[int, int, int], seed: int, here: float, skew: float, biased: bool = False
) -> list[np.ndarray]:
    """Rows, ids, weights, gate and up, down, and the biases.

    `here` is the share of choices of this device.
    """
    rng = np.random.default_rng(seed)
    rows, top_k, experts = shape
    order = rng.gumbel(size=(rows, experts)) + skew * np.arange(experts)
    ids = np.argsort(-order)[:, :top_k]
    elsewhere = rng.choice([-1, experts, 2**30], size=ids.shape)
    ids = np.where(rng.random(ids.shape) < here, ids, elsewhere).astype(np.int32)
    weights = np.where((ids >= 0) & (ids < experts), rng.normal(size=ids.shape), np.nan)
    operands = (
        rng.normal(size=(rows, HIDDEN)),
        weights,
        rng.normal(size=(experts, HIDDEN, 2 * WIDTH)) * HIDDEN**-0.5,
        rng.normal(size=(experts, WIDTH, HIDDEN)) * WIDTH**-0.5,
        *(rng.normal(size=(experts, n)) for n in (2 * WIDTH, HIDDEN) if biased),
    )
    hidden, weights, *arrays = (a.astype(jnp.bfloat16) for a in operands)
    return [hidden, ids, weights, *arrays]


def check(found: jax.Array, expected: np.ndarray) -> None:
    assert found.dtype == jnp.bfloat16
    tolerance = 2e-2 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found.astype(np.float32), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("shape", "biased"),
    [
        pytest.param(shape, biased, id=f"{name}, biased" if biased else name)
        for name, shape in SHAPES.items()
        for biased in (False, True)
    ],
)
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 9.0]))
@example(0, 1.0, 0.0)
@example(1, 0.0, 0.0)
def test_equal_one_expert_after_another(
    shape: tuple[int, int, int], biased: bool, seed: int, here: float, skew: float
) -> None:
    operands = draw(shape, seed, here, skew, biased)
    check(compiled(shape, biased)(*operands), one_by_one(*operands))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_row_breaks_no_other(value: float) -> None:
    shape = SHAPES["several tiles"]
    operands = draw(shape, 3, 1.0, 0.0)
    expected = one_by_one(*operands)
    operands[0][140] = value
    found = compiled(shape)(*operands)
    assert np.isnan(found[140].astype(np.float32)).all()
    others = np.arange(shape[0]) != 140
    check(found[others], expected[others])


visit = jax.jit(tpu_experts._visit, static_argnums=(1, 2))
SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 127, 128, 129, 200]), min_size=5, max_size=5)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.booleans())
@example([0] * 5, True)
@example([0] * 5, False)
@example([128, 128, 128, 0, 0], True)
@example([200] * 5, True)
def test_each_row_of_a_group_is_visited_once(sizes: list[int], empty: bool) -> None:
    tile = tpu_experts.ROW_TILE
    ends = np.cumsum(sizes).astype(np.int32)
    total = 8 * tile
    visits = visit(ends, total, empty)
    count = int(visits.total)
    assert count <= len(visits.group)
    group, at, start, stop, first = (np.asarray(a)[:count] for a in visits[:5])
    assert (np.diff(at) >= 0).all() and (np.diff(group) >= 0).all()  # blocks are visited in a row
    assert (at < total // tile).all()
    assert first.tolist() == [int(n == 0 or group[n] != group[n - 1]) for n in range(count)]
    rows = [
        (int(g), row)
        for g, t, begin, end in zip(group, at, start, stop)
        for row in range(max(begin, t * tile), min(end, (t + 1) * tile))
    ]
    assert rows == [(g, r) for g, n in enumerate(sizes) for r in range(ends[g] - n, ends[g])]
    assert not empty or set(group.tolist()) == set(range(len(sizes)))


@pytest.mark.parametrize(
    ("hidden", "width", "dtype", "reason"),
    [
        (2048, 768, jnp.bfloat16, None),
        (6144, 16384, jnp.bfloat16, None),
        (2048, 768, jnp.float32, "float32 would be rounded"),
        (2000, 768, jnp.bfloat16, "hidden size 2000 is no multiple of 128 up to 16384"),
        (2048, 20480, jnp.bfloat16, "expert width 20480 is no multiple of 128 up to 16384"),
    ],
)
def test_unsupported(hidden: int, width: int, dtype: Any, reason: str | None) -> None:
    found = TpuExperts.unsupported(ExpertShape(hidden, width, dtype))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("rows", "chosen", "turns"), [(1024, 1024, 1), (1024, 8192, 7), (1, 1, 1), (1024, 0, 0)]
)
def test_turns_follow_what_is_here(rows: int, chosen: float, turns: float) -> None:
    kernel = TpuExperts(ExpertShape(HIDDEN, WIDTH, jnp.bfloat16))
    load = ExpertLoad(rows, top_k=8, chosen=chosen, num_experts=16)
    assert kernel.expected_turns(load) == {tpu_experts.CHUNKS: turns}
