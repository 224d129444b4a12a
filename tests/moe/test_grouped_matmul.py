from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import apply_experts
from tbo_jax.moe.grouped_matmul import (
    BLOCK_ROWS,
    block_sizes,
    expected_turns,
    for_each_block,
    grouped_matmul,
)
from tests.moe.stacks import CLAMPED, between_others, one_by_one

ROWS, GROUPS, DEPTH, WIDTH = 600, 8, 5, 3

product = jax.jit(grouped_matmul)


@jax.jit
def gradients(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, weight: jax.Array) -> Any:
    def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(lhs, rhs, sizes) * weight)

    return jax.grad(loss, argnums=(0, 1))(lhs, rhs)


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small whole numbers, so that float32 sums are exact in any order."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, DEPTH), (GROUPS, DEPTH, WIDTH), (ROWS, WIDTH)
    lhs, rhs, weight = (rng.integers(-4, 5, shape).astype(np.float32) for shape in shapes)
    return lhs, rhs, weight


def pieces(sizes: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, size in enumerate(sizes):
        yield group, slice(start, start + size)
        start += size


@st.composite
def sizes_of_groups(draw: st.DrawFn) -> list[int]:
    """Sizes around those of blocks, with a sum of at most ROWS."""
    size = st.one_of(st.sampled_from([0, 1, 3, 4, 5, 15, 17, 64, 255, 257]), st.integers(0, ROWS))
    sizes: list[int] = []
    for _ in range(GROUPS):
        sizes.append(min(draw(size), ROWS - sum(sizes)))
    return sizes


@settings(max_examples=60, deadline=None)
@given(sizes_of_groups())
@example([0] * GROUPS)
@example([0, 0, 0, ROWS, 0, 0, 0, 0])
@example([1] * GROUPS)
@example([75] * GROUPS)
@example([ROWS - 7, *[1] * 7])
@example([0, 256, 0, 0, 4, 0, 0, 63])
def test_product_and_gradients_equal_the_reference(sizes: list[int]) -> None:
    lhs, rhs, weight = operands()
    expected = np.zeros((ROWS, WIDTH), np.float32)
    lhs_grad, rhs_grad = np.zeros_like(lhs), np.zeros_like(rhs)
    for group, rows in pieces(sizes):
        expected[rows] = lhs[rows] @ rhs[group]
        lhs_grad[rows] = weight[rows] @ rhs[group].T
        rhs_grad[group] = lhs[rows].T @ weight[rows]
    group_sizes = np.array(sizes, np.int32)
    np.testing.assert_array_equal(product(lhs, rhs, group_sizes), expected)
    found = gradients(lhs, rhs, group_sizes, weight)
    np.testing.assert_array_equal(found[0], lhs_grad)
    np.testing.assert_array_equal(found[1], rhs_grad)


def test_large_groups_have_large_blocks() -> None:
    assert block_sizes(2047, 2) == [1, 4, 16, 64]
    assert block_sizes(2048, 2) == [1, 4, 16, 64, 256]
    assert block_sizes(1 << 18, 16)[-1] == 1024
    assert expected_turns(600, 2, 2048) == {
        "expert_blocks_1": 0, "expert_blocks_4": 0, "expert_blocks_16": 0, "expert_blocks_64": 0,
        "expert_blocks_256": 6,
    }  # fmt: skip
    rng = np.random.default_rng(2)
    lhs, rhs, weight = (
        rng.integers(-4, 5, shape).astype(np.float32)
        for shape in ((2048, DEPTH), (2, DEPTH, WIDTH), (2048, WIDTH))
    )
    sizes = np.array([1500, 300], np.int32)
    expected = np.concatenate([lhs[:1500] @ rhs[0], lhs[1500:1800] @ rhs[1]])
    np.testing.assert_array_equal(product(lhs, rhs, sizes)[:1800], expected)
    _, rhs_grad = gradients(lhs, rhs, sizes, weight)
    np.testing.assert_array_equal(rhs_grad[0], lhs[:1500].T @ weight[:1500])
    np.testing.assert_array_equal(rhs_grad[1], lhs[1500:1800].T @ weight[1500:1800])


def test_rows_past_the_groups_are_not_read() -> None:
    lhs, rhs, _ = operands()
    sizes = np.array([3, 0, 70, 0, 1, 0, 0, 20], np.int32)
    lhs[94:] = np.nan
    rhs[[1, 3, 5, 6]] = np.nan  # the empty groups
    out = np.asarray(product(lhs, rhs, sizes))
    assert np.isfinite(out).all()
    assert not out[94:].any()


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_few_rows(rows: int) -> None:
    lhs, rhs, _ = operands()
    sizes = np.array([0, rows, 0, 0, 0, 0, 0, 0], np.int32)
    out = grouped_matmul(jnp.asarray(lhs[:rows]), jnp.asarray(rhs), sizes)
    np.testing.assert_array_equal(out, lhs[:rows] @ rhs[1])


def test_bfloat16_accumulates_in_float32() -> None:
    # 1 + 256 x 2^-9 is 1.5; a sum in bfloat16 would stay at 1.
    lhs = jnp.ones((1, 257), jnp.bfloat16)
    rhs = jnp.full((1, 257, 1), 2.0**-9, jnp.bfloat16).at[0, 0, 0].set(1)
    out = grouped_matmul(lhs, rhs, jnp.array([1], jnp.int32))
    assert out.dtype == jnp.bfloat16
    assert out[0, 0] == 1.5


# Cost


@jax.jit
def times_computed(sizes: jax.Array) -> jax.Array:
    """[ROWS] how often each row is multiplied."""

    def block(out: jax.Array, start: jax.Array, group: jax.Array, rows: int) -> jax.Array:
        taken = jax.lax.dynamic_slice_in_dim(out, start, rows)
        return jax.lax.dynamic_update_slice_in_dim(out, taken + 1, start, 0)

    return for_each_block(block, jnp.zeros(ROWS, jnp.int32), sizes, ROWS)


@jax.jit
def blocks_run(sizes: jax.Array) -> jax.Array:
    """[] number of products."""
    return for_each_block(lambda count, *_: count + 1, jnp.int32(0), sizes, ROWS)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([8, 128]), st.integers(0, ROWS), st.integers(0, 99), st.floats(0.05, 5))
@example(8, ROWS, 0, 1.0)
@example(128, ROWS, 0, 1.0)
def test_cost_does_not_grow_with_the_experts(
    experts: int, tokens: int, seed: int, evenness: float
) -> None:
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(experts, evenness))
    sizes = rng.multinomial(tokens, share / share.sum()).astype(np.int32)
    times = np.asarray(times_computed(sizes))
    assert (times[:tokens] >= 1).all()
    assert not times[tokens:].any()
    assert times.sum() < 2 * tokens or tokens == 0
    # Few and large products: at most four a group, or as many as a large one has largest blocks.
    most = np.maximum(4, -(-sizes // BLOCK_ROWS[-1]))
    assert blocks_run(sizes) <= most[sizes > 0].sum()


def shapes_in(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of everything that a program computes, inner programs included."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns"):
                yield from shapes_in(getattr(inner, "jaxpr", inner))


def test_no_array_of_rows_times_groups() -> None:
    rows, groups = 67, 131  # both prime: no other dimension is a multiple of them
    lhs, rhs = jnp.ones((rows, DEPTH)), jnp.ones((groups, DEPTH, WIDTH))
    sizes, weight = jnp.zeros(groups, jnp.int32), jnp.ones((rows, WIDTH))
    for function, args in ((product, (lhs, rhs, sizes)), (gradients, (lhs, rhs, sizes, weight))):
        found = list(shapes_in(jax.make_jaxpr(function)(*args).jaxpr))
        assert (rows, WIDTH) in found  # the walk does see the product
        assert not [s for s in found if np.prod(s) % (rows * groups) == 0]


def test_memory_does_not_grow_with_rows_times_groups() -> None:
    rows, groups = 256, 128
    compiled = product.lower(
        jax.ShapeDtypeStruct((rows, 64), jnp.float32),
        jax.ShapeDtypeStruct((groups, 64, 64), jnp.float32),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * rows * 64 * 4


# Experts


@pytest.mark.parametrize("top_k", [2, 3])
def test_experts_of_other_devices_add_nothing(top_k: int) -> None:
    """Two experts here; ids outside [0, 2) belong elsewhere, and no id twice in a row."""
    rng = np.random.default_rng(1)
    rows, depth, width = 9, 4, 3
    hidden = rng.normal(size=(rows, depth)).astype(np.float32)
    weights = rng.normal(size=(rows, top_k)).astype(np.float32)
    gate_up = rng.normal(size=(2, depth, 2 * width)).astype(np.float32)
    down = rng.normal(size=(2, width, depth)).astype(np.float32)
    ids = np.array([rng.permutation([-1, 0, 1, 2, 5])[:top_k] for _ in range(rows)], np.int32)
    expected = one_by_one(hidden, ids, weights, gate_up, down)
    found = jax.jit(apply_experts)(hidden, ids, weights, ExpertWeights(gate_up, down))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_blocks_of_one_size_give_a_row_the_same_bits_in_any_group() -> None:
    """Alone, amid others that choose as it does, and beside one that is not finite."""
    rng = np.random.default_rng(2)
    rows, depth, width, experts = 70, 64, 32, 3
    hidden = rng.normal(size=(rows, depth)).astype(np.float32)
    weights = rng.normal(size=(rows, 2)).astype(np.float32)
    matrices = ExpertWeights(
        rng.normal(size=(experts, depth, 2 * width)).astype(np.float32),
        rng.normal(size=(experts, width, depth)).astype(np.float32),
    )
    ids = np.array([rng.permutation([-1, *range(experts)])[:2] for _ in range(rows)], np.int32)
    apply = jax.jit(functools.partial(apply_experts, block_rows=16))
    whole = np.asarray(apply(hidden, ids, weights, matrices))
    expected = one_by_one(hidden, ids, weights, matrices.gate_up, matrices.down)
    np.testing.assert_allclose(whole, expected, atol=1e-2, rtol=1e-4)
    hidden[0] = np.nan
    for row in range(1, 9):
        keep = rng.random(rows) < 0.3
        keep[[0, row]] = True
        found = np.asarray(apply(hidden, np.where(keep[:, None], ids, -1), weights, matrices))
        assert found[row].tobytes() == whole[row].tobytes()


@pytest.mark.parametrize("broken", range(3))
def test_a_broken_row_breaks_no_other(broken: int) -> None:
    """More choices than experts here, and every row uses every expert here."""
    hidden = np.ones((3, 4), np.float32)
    hidden[broken] = np.nan
    ids = np.array([[0, 9]] * 3, np.int32)
    found = jax.jit(apply_experts)(
        hidden, ids, np.ones((3, 2), np.float32),
        ExpertWeights(np.ones((1, 4, 6), np.float32), np.ones((1, 3, 4), np.float32)),
    )  # fmt: skip
    assert np.isnan(found).any(axis=1).tolist() == [row == broken for row in range(3)]


def test_experts_among_those_of_all_layers() -> None:
    """Result and gradients are those of the layer's own weights; the others get none."""
    rng = np.random.default_rng(2)
    rows, depth, width, experts = 20, 4, 3, 3
    hidden = rng.normal(size=(rows, depth)).astype(np.float32)
    weights = rng.normal(size=(rows, 2)).astype(np.float32)
    gate_up = rng.normal(size=(experts, depth, 2 * width)).astype(np.float32)
    down = rng.normal(size=(experts, width, depth)).astype(np.float32)
    ids = np.array([rng.permutation(experts + 1)[:2] for _ in range(rows)], np.int32)

    def loss(make, hidden, gate_up, down):
        out = apply_experts(hidden, ids, weights, make(gate_up, down))
        return jnp.sum(out**2), out

    def run(make):
        grad = jax.grad(functools.partial(loss, make), argnums=(0, 1, 2), has_aux=True)
        return jax.jit(grad)(hidden, gate_up, down)

    jax.tree.map(np.testing.assert_array_equal, run(between_others), run(ExpertWeights))


@pytest.mark.parametrize("top_k", [1, 3])
def test_biased_and_clamped_experts(top_k: int) -> None:
    """Result and gradients against all experts applied to all rows; ids 3 and 4 are elsewhere."""
    rng = np.random.default_rng(top_k)
    rows, depth, width, experts = 40, 4, 3, 3
    ids = np.array([rng.permutation(experts + 2)[:top_k] for _ in range(rows)], np.int32)
    hidden, weights, *arrays = (
        rng.normal(size=shape).astype(np.float32)
        for shape in [
            (rows, depth), (rows, top_k), (experts, depth, 2 * width), (experts, width, depth),
            (experts, 2 * width), (experts, depth),
        ]
    )  # fmt: skip

    def dense(hidden, weights, gate_up, down, gate_up_bias, down_bias):
        both = jnp.einsum("md,edf->mef", hidden, gate_up) + gate_up_bias
        gate, up = jnp.split(both, 2, axis=-1)
        inner = CLAMPED(gate, up)
        out = jnp.einsum("mef,efd->med", inner, down) + down_bias
        taken = (ids[..., None] == np.arange(experts)).astype(np.float32)
        share = jnp.sum(weights[..., None] * taken, axis=1)
        return jnp.einsum("med,me->md", out, share)

    def ours(hidden, weights, *arrays):
        matrices = between_others(*arrays, activation=CLAMPED)
        return apply_experts(hidden, ids, weights, matrices)

    def run(function):
        def loss(*operands):
            out = function(*operands)
            return jnp.sum(jnp.sin(out)), out

        grad = jax.grad(loss, argnums=tuple(range(2 + len(arrays))), has_aux=True)
        return jax.jit(grad)(hidden, weights, *arrays)

    (found, out), (expected, _) = run(ours), run(dense)
    np.testing.assert_allclose(out, one_by_one(hidden, ids, weights, *arrays), atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=1e-5)
