"""`run_layers` inside `jax.shard_map` as people write it: with its checks of varying axes."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from tbo_jax import StackedLayers, Stage, run_layers

WIDTH = 4
WHOLE, SHARDED = PartitionSpec(), PartitionSpec(("rows", "columns"))


def add_up(message: Any, context: Any) -> Any:
    return jax.lax.psum(message, "columns")


class Parallel(nnx.Module):
    """Tensor parallelism: carries that are alike on all columns, partial sums that are not."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.weight = nnx.Param(0.3 * rngs.normal((WIDTH, WIDTH)))
        self.gain = nnx.Param(0.3 * rngs.normal((WIDTH,)))

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        factor = 1 + jax.lax.axis_index("columns").astype(x.dtype)
        return x, factor * jnp.tanh(jax.lax.dot(x, self.weight[...])), cache

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        return x + received * self.gain[...]

    stages: Any = (Stage(compute, add_up),)


class Local(Parallel):
    """Nothing is added up: carries that are alike do not stay so."""

    stages = (Stage(Parallel.compute),)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "columns"))


def model(kind: type, scanned: bool) -> Any:
    layers = [kind(seed) for seed in range(2)]
    return StackedLayers.stack(layers) if scanned else nnx.List(layers)


def loss_of(kind: type, count: int, scanned: bool, spec: PartitionSpec, head: bool) -> Any:
    """`(weights, x) -> loss`, and the weights."""
    graph, weights = nnx.split(model(kind, scanned))

    def local(weights: Any, x: jax.Array) -> jax.Array:
        def squares(x: jax.Array, context: Any) -> jax.Array:
            return (x**2).sum()

        layers, parts = nnx.merge(graph, weights), jnp.split(x, count)
        out, _ = run_layers(layers, parts, [None] * count, head=squares if head else None)
        total = sum(out if head else [squares(part, None) for part in out])
        varying = jax.typeof(total).manual_axis_type.varying
        return jax.lax.psum(total, tuple(varying)) if varying else total

    return jax.shard_map(local, mesh=mesh(), in_specs=(WHOLE, spec), out_specs=WHOLE), weights


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (8, WIDTH))


@cache
def of_one(kind: type, scanned: bool, spec: PartitionSpec) -> Any:
    loss, weights = loss_of(kind, 1, scanned, spec, False)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, inputs())


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "count", "scanned", "spec", "jitted"),
    [
        (Parallel, 2, False, WHOLE, True),
        (Parallel, 2, True, WHOLE, True),
        (Local, 2, True, SHARDED, True),
        *[
            pytest.param(kind, count, scanned, spec, jitted, marks=slow)
            for kind in (Parallel, Local)
            for count in (1, 2)
            for scanned in (False, True)
            for spec in (WHOLE, SHARDED)
            for jitted in (True, False)
            if not (kind is Local and scanned and spec == WHOLE)  # refused, see below
        ],
    ],
)
def test_value_and_gradient_are_those_of_one_micro_batch(
    kind: type, count: int, scanned: bool, spec: PartitionSpec, jitted: bool
) -> None:
    loss, weights = loss_of(kind, count, scanned, spec, head=count > 1)
    run = jax.value_and_grad(loss, argnums=(0, 1))
    got = (jax.jit(run) if jitted else run)(weights, inputs())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        got, of_one(kind, scanned, spec),
    )  # fmt: skip


def test_without_jit_each_operation_runs_by_itself() -> None:
    loss, weights = loss_of(Parallel, 2, False, WHOLE, False)
    expected, _ = of_one(Parallel, False, WHOLE)
    np.testing.assert_allclose(loss(weights, inputs()), expected, rtol=1e-5)


def test_a_carry_that_comes_to_vary_is_refused_when_scanned() -> None:
    for count in (1, 2):
        loss, weights = loss_of(Local, count, True, WHOLE, False)
        message = r"scanned Local: what micro-batch 0 keeps is .*V:columns.*: expected float32\["
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(loss, weights, inputs())


def test_what_is_alike_on_all_devices_stays_so() -> None:
    """Also the result, which `out_specs` says is replicated."""

    def local(x: jax.Array) -> jax.Array:
        out, _ = run_layers(model(Parallel, False), jnp.split(x, 2), [None] * 2)
        return jnp.concatenate(out)

    run = jax.shard_map(local, mesh=mesh(), in_specs=WHOLE, out_specs=WHOLE)
    assert jax.eval_shape(run, inputs()).shape == (8, WIDTH)
