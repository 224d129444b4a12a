"""What layers write inside stages: it is kept, in the order of the micro-batches, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tbo_jax import StackedLayers, Stage, run_layers

WIDTH, LAYERS = 4, 2


class Writing(nnx.Module):
    """Counts its calls, keeps the latest mean that it saw, and drops out."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.weight = nnx.Param(rngs.normal((WIDTH, WIDTH)))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        self.calls[...] += 1
        self.mean[...] = 0.5 * self.mean[...] + x.mean(0)
        return x, self.drop(jax.lax.dot(x, self.weight[...])) + self.mean[...], cache

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        return x + received

    stages = (Stage(compute),)


class Merging(Writing):
    """Writes in `merge` as well."""

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        self.calls[...] += 10
        return x + received


class Adding(Writing):
    """Makes variables and attributes when it is called."""

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        seen = [*self.seen.get_value(), x.sum()] if hasattr(self, "seen") else [x.sum()]
        self.seen = nnx.Intermediate(tuple(seen))
        self.times = getattr(self, "times", 0) + 1
        return x, x, cache

    stages = (Stage(compute),)


def step(layers: Any, count: int, remat: bool) -> jax.Array:
    parts = jnp.split(jnp.linspace(-1.0, 2.0, 4 * WIDTH).reshape(4, WIDTH), count)
    out, _ = run_layers(layers, parts, [None] * count, remat=remat)
    return sum((part**2).sum() for part in out)


def plain(layers: list[Any], count: int) -> None:
    """The same without `run_layers`: micro-batch by micro-batch, layer by layer."""
    parts = jnp.split(jnp.linspace(-1.0, 2.0, 4 * WIDTH).reshape(4, WIDTH), count)
    for layer in layers:
        sent = [layer.compute(part, None, None, None) for part in parts]
        parts = [layer.merge(x, received, None) for x, received, _ in sent]


def functional(layers: Any, count: int, remat: bool) -> None:
    graph, state = nnx.split(layers)

    @jax.jit
    def run(state: Any) -> Any:
        inside = nnx.merge(graph, state)
        step(inside, count, remat)
        return nnx.state(inside)

    nnx.update(layers, run(state))


RUNS: dict[str, Callable[[Any, int, bool], Any]] = {
    "eager": step,
    "jax.jit": functional,
    "nnx.grad": nnx.jit(nnx.grad(step), static_argnums=(1, 2)),
}


def contents(layers: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(layers))
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(leaves, keys, strict=True)
    ]


@pytest.mark.parametrize(
    ("run", "count", "scanned", "remat"),
    [
        ("eager", 2, False, False),
        ("nnx.grad", 2, False, True),
        ("jax.jit", 2, True, False),
        ("nnx.grad", 2, True, True),
        *[
            pytest.param(run, count, scanned, remat, marks=pytest.mark.slow)
            for run in RUNS
            for count in (1, 2)
            for scanned in (False, True)
            for remat in (False, True)
        ],
    ],
)
def test_variables_are_kept(run: str, count: int, scanned: bool, remat: bool) -> None:
    layers, expected = (nnx.List([Writing(n) for n in range(3)]) for _ in range(2))
    given = StackedLayers.stack(list(layers)) if scanned else layers
    for _ in range(2):
        RUNS[run](given, count, remat)
        plain(list(expected), count)
    if scanned:
        given = nnx.List([given[index] for index in range(3)])
    assert [int(layer.calls[...]) for layer in given] == [2 * count] * 3
    for got, right in zip(contents(given), contents(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("count", "remat"), [(1, True), (2, False)])
def test_what_merge_writes_is_kept(count: int, remat: bool) -> None:
    layers = [Merging(n) for n in range(LAYERS)]
    step(layers, count, remat)
    assert [int(layer.calls[...]) for layer in layers] == [11 * count] * LAYERS


@pytest.mark.parametrize(("count", "remat"), [(1, False), (2, True)])
def test_new_variables_and_attributes_are_kept(count: int, remat: bool) -> None:
    layers = [Adding(n) for n in range(LAYERS)]
    step(layers, count, remat)
    step(layers, count, remat)
    for layer in layers:
        assert len(layer.seen.get_value()) == layer.times == 2 * count
    parts = jnp.split(jnp.linspace(-1.0, 2.0, 4 * WIDTH).reshape(4, WIDTH), count)
    np.testing.assert_allclose(
        layers[0].seen.get_value(), [float(part.sum()) for part in parts] * 2, rtol=1e-6
    )


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Adding, r"Adding\.(seen|times) is made or set in a stage of scanned layers"),
        (Merging, r"Merging\.calls is written in a scanned layer, but not by .* unrolled"),
    ],
)
def test_scanned_layers_refuse_by_name_what_they_cannot_keep(
    kind: Any, message: str, count: int
) -> None:
    if kind is Merging:
        kind = type("Merging", (Merging,), {"stages": (Stage(lambda s, x, r, c, _: (x, x, c)),)})
    with pytest.raises(TypeError, match=message):
        step(StackedLayers.stack([kind(n) for n in range(3)]), count, False)


def test_variables_of_another_shape_are_refused_when_scanned() -> None:
    class Growing(Writing):
        def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
            self.mean.set_value(jnp.zeros(WIDTH + 1))
            return x, x, cache

        stages = (Stage(compute),)

    with pytest.raises(TypeError, match=r"Growing\.mean is set to another structure, shape or"):
        step(StackedLayers.stack([Growing(0), Growing(1)]), 2, False)


def test_what_two_names_share_stays_shared() -> None:
    class Sharing(nnx.Module):
        def __init__(self) -> None:
            self.one = self.two = nnx.Variable(jnp.zeros((), jnp.int32))

        def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
            self.one[...] += 1
            self.two[...] += 1
            return x, x, cache

        merge = Writing.merge
        stages = (Stage(compute),)

    layer = Sharing()
    step([layer, layer], 2, False)  # and the same layer twice
    assert layer.one is layer.two
    assert int(layer.one[...]) == 8


def test_removing_a_variable_is_refused() -> None:
    class Removing(Writing):
        def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
            del self.mean
            return x, x, cache

        stages = (Stage(compute),)

    with pytest.raises(TypeError, match=r"Removing\.mean was removed inside a stage"):
        step([Removing(0)], 2, False)


@jax.tree_util.register_dataclass
@dataclass
class Arrays:
    """A layer that is a pytree of arrays."""

    scale: Any

    def compute(self, x: Any, received: Any, cache: Any, writes: bool) -> Any:
        out = x * self.scale
        if writes:
            self.scale = self.scale + 1
        return x, out, cache

    def merge(self, x: Any, received: Any, writes: bool) -> Any:
        return received

    stages = (Stage(compute),)


def test_a_pytree_of_arrays_may_not_be_written() -> None:
    parts = [jnp.ones((2, 3))] * 2
    out, _ = run_layers([Arrays(jnp.full(3, 2.0))] * 2, parts, [False] * 2)
    np.testing.assert_array_equal(jnp.stack(out), 4)
    with pytest.raises(TypeError, match=r"Arrays\.scale was written .*: expected an nnx\.Module"):
        run_layers([Arrays(jnp.full(3, 2.0))], parts, [True] * 2)


class Counting:
    """A layer that JAX knows nothing of."""

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        self.calls += 1
        return x, 2 * x, cache

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        return received

    stages = (Stage(compute),)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_need_not_be_flax_modules(remat: bool) -> None:
    layer = Counting()
    step([layer], 2, remat)
    assert layer.calls == 2


class Drawing(nnx.Module):
    """Draws keys from a stream that all layers share, in its stage and in `merge`."""

    def __init__(self, stream: nnx.RngStream) -> None:
        self.weight = nnx.Param(jnp.ones(WIDTH))
        self.stream = stream

    def noise(self) -> jax.Array:
        return jax.random.normal(self.stream(), (WIDTH,))

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        return x, x * self.weight[...] + self.noise(), cache

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        return x + received + self.noise()

    stages = (Stage(compute),)


@pytest.mark.parametrize(
    ("run", "count", "remat"),
    [("eager", 2, False), ("nnx.grad", 1, True), ("nnx.grad", 2, True)],
)
@pytest.mark.parametrize("same", [False, True])
def test_what_layers_share_is_written_by_all_of_them(
    run: str, count: int, remat: bool, same: bool
) -> None:
    stream = nnx.Rngs(noise=0).noise
    made = [Drawing(stream) for _ in range(LAYERS + 1)]
    layers = nnx.List([made[0]] * len(made) if same else made)
    RUNS[run](layers, count, remat)
    assert all(layer.stream is stream for layer in layers)
    assert int(stream.count[...]) == 2 * count * len(made)  # a key for each draw


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_are_kept_or_refused_when_scanned(count: int) -> None:
    class Setting(Writing):
        value: Any = 0.5

        def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
            self.mean.set_value(self.value)
            return x, x, cache

        stages = (Stage(compute),)

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.mean = nnx.BatchStat(jnp.zeros(()))

    layers = StackedLayers.stack([Setting(n) for n in range(3)])
    step(layers, count, False)
    np.testing.assert_array_equal(layers.stacked.mean[...], [0.5] * 3)
    for Setting.value in (1, "one"):
        with pytest.raises(TypeError, match=r"Setting\.mean is set to another structure, shape or"):
            step(StackedLayers.stack([Setting(n) for n in range(2)]), count, False)
