"""What somebody who writes layers of their own does wrong: one sentence, the same for one and two
micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tbo_jax import StackedLayers, Stage, run_layers

KEEP = Stage(lambda layer, x, received, cache, context: (x, x, cache))


class Block(nnx.Module):
    """A layer that is as it should be."""

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        return x, 2 * x, cache

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        return x + received

    stages: Any = (Stage(compute),)


def block(**attributes: Any) -> Any:
    """A `Block` of a class with other attributes."""
    return type("Block", (Block,), attributes)()


def giving(result: Callable[[Any, Any], Any]) -> Any:
    """A block whose second stage gives what `result` makes of (x, view)."""

    def give(self: Any, x: Any, received: Any, cache: Any, context: Any) -> Any:
        return result(x, cache)

    return block(stages=(KEEP, Stage(give)))


class NoStages:
    merge = Block.merge


class NoMerge:
    stages = Block.stages


@jax.tree_util.register_dataclass
@dataclass
class Numbers:
    """A cache."""

    values: Any

    def layer(self, index: Any, after: Any = None) -> Any:
        return self.values[index]

    def with_layer(self, index: Any, view: Any) -> Numbers:
        return Numbers(self.values.at[index].set(view))


def carries(count: int) -> list[Any]:
    return [jnp.ones((2, 3))] * count


def run(layer: Any, count: int, *, scanned: bool = False, **options: Any) -> Any:
    layers = StackedLayers.stack([layer] * 3) if scanned else [layer, layer]
    return run_layers(layers, carries(count), [None] * count, **options)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (NoStages(), TypeError, r"layers\[0\], NoStages, has no `stages`: expected a tuple of St"),
        (NoMerge(), TypeError, r"layers\[0\], NoMerge, has no method `merge\(carry, received, "),
        (Block, TypeError, r"layers\[0\] is the class Block: expected an instance of it"),
        (block(stages=()), ValueError, r"Block\.stages is empty: expected at least one Stage"),
        (block(stages=KEEP), TypeError, r"Block\.stages is of type Stage: expected a tuple of St"),
        (block(stages=None), TypeError, r"Block\.stages is None: expected a tuple of Stage"),
        (block(stages=(KEEP, len)), TypeError, r"Block\.stages\[1\] is of type builtin_func.*age"),
        (block(stages=lambda self, context: 3), TypeError, r"Block\.stages is 3: expected a tup"),
        (giving(lambda x, view: (x, x)), TypeError, r"Block\.give gave 2 values: expected three"),
        (giving(lambda x, view: None), TypeError, r"Block\.give gave None: expected three, \(car"),
        (
            giving(lambda x, view: jnp.zeros((3, 3))),
            TypeError,
            r"Block\.give gave an array of shape \(3, 3\): expected three, \(carry, outgoing",
        ),
        (giving(lambda x, view: ((x, 3), x, view)), TypeError, r"give gave a carry with 3: expec"),
        (giving(lambda x, view: (x, "no", view)), TypeError, r"give gave .* send with 'no': exp"),
        (giving(lambda x, view: (x, x, x)), TypeError, r"Block\.give: its view of the cache has "),
        (
            block(stages=(Stage(Block.compute, lambda message, context: None),)),
            TypeError,
            r"the communication after Block\.compute gave None: expected what is received",
        ),
        (block(merge=lambda self, x, r, c: [x, 0.5]), TypeError, r"Block\.merge gave 0\.5: expe"),
    ],
)
def test_mistakes_in_layers(layer: Any, error: Any, message: str, count: int) -> None:
    with pytest.raises(error, match=message):
        run(layer, count)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(layers=Block()), TypeError, "layers is of type Block: expected a list of layers, or"),
        (dict(layers=iter([Block()])), TypeError, "layers is of type list_iterator: expected a li"),
        (dict(layers=[]), ValueError, "needs layers and one context per carry, got 0 layers"),
        (dict(carries=jnp.ones((2, 3))), TypeError, r"carries is an array of shape \(2, 3\): exp"),
        (dict(carries={"a": jnp.ones(3)}), TypeError, "carries is of type dict: expected a list "),
        (dict(carries=[]), ValueError, "got 1 layers, 0 carries"),
        (dict(carries=[1.0, 1.0]), TypeError, r"carries\[0\] holds 1\.0: expected a pytree of ar"),
        (dict(contexts="axis"), TypeError, "contexts is 'axis': expected a list of one context f"),
        (dict(contexts=None), TypeError, "contexts is None: expected a list"),
        (dict(contexts=[None] * 3), ValueError, r"got 1 layers, \d carries, 3 contexts"),
        (dict(cache=jnp.ones(3)), TypeError, r"cache is an array of shape \(3,\): expected a met"),
        (dict(head=3), TypeError, r"head is 3: expected a function of \(carry, context\)"),
        (dict(layers=[NoStages()]), TypeError, "NoStages, has no `stages`"),
    ],
)
def test_mistakes_in_arguments(arguments: Any, error: Any, message: str, count: int) -> None:
    given = dict(layers=[Block()], carries=carries(count), contexts=[None] * count) | arguments
    if isinstance(given["carries"], list) and given["carries"]:
        given["carries"] = given["carries"][:count]
    with pytest.raises(error, match=message):
        run_layers(**given)


def test_micro_batches_of_different_structure() -> None:
    parts = [{"x": jnp.ones(3)}, {"x": jnp.ones(3), "y": jnp.ones(3)}]
    with pytest.raises(ValueError, match=r"carries\[1\] has the structure .*'y'.*carries\[0\]"):
        run_layers([Block()], parts, [None, None])


def test_contexts_that_ask_for_different_numbers_of_stages() -> None:
    layer = block(stages=lambda self, context: (KEEP,) * context)
    with pytest.raises(ValueError, match=r"Block\.stages gave 1, 2 stages for the micro-batches'"):
        run_layers([layer], carries(2), [1, 2])


def test_each_micro_batch_has_the_stages_of_its_context() -> None:
    def times(factor: int) -> Any:
        return Stage(lambda layer, x, received, cache, context: (x, factor * x, cache))

    layer = block(stages=lambda self, context: (times(context),))
    (one, two), _ = run_layers([layer], carries(2), [10, 20])
    assert (float(one[0, 0]), float(two[0, 0])) == (11.0, 21.0)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda view: None, r"Block\.give: its view of the cache has the structure .*None"),
        (lambda view: view[:2], r"view of the cache is float32\[2\]: expected float32\[3\]"),
        (lambda view: view.astype(jnp.int32), r"cache is int32\[3\]: expected float32\[3\]"),
    ],
)
def test_a_view_stays_what_it_was(change: Any, message: str, count: int) -> None:
    layer = giving(lambda x, view: (x, x, change(view)))
    with pytest.raises(TypeError, match=message):
        run(layer, count, cache=Numbers(jnp.ones((2, 3))))


def grown(x: Any, context: Any) -> Any:
    return jnp.concatenate([x, x])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (dict(merge=lambda self, x, r, c: grown(x, c)), r"keeps is float32\[4,3\]: expected floa"),
        (dict(merge=lambda self, x, r, c: x.astype(jnp.bfloat16)), r"keeps is bfloat16\[2,3\]: e"),
        (dict(merge=lambda self, x, r, c: (x, r)), r"keeps has the structure .*: expected "),
    ],
)
def test_scanned_layers_give_what_they_take(attributes: Any, message: str, count: int) -> None:
    layer = block(**attributes, stages=(KEEP,))
    with pytest.raises(TypeError, match=f"scanned Block: what micro-batch 0 {message}"):
        run(layer, count, scanned=True)


@pytest.mark.parametrize("compute", [3, None, jnp.ones(3)])
def test_stages_are_of_functions(compute: Any) -> None:
    with pytest.raises(TypeError, match=r"Stage\.compute must be a function of \(layer, carry, "):
        Stage(compute)
    with pytest.raises(TypeError, match=r"Stage\.communicate of compute must be None or a func"):
        Stage(Block.compute, 3)  # type: ignore[arg-type]


class Failing(nnx.Module):
    """Raises where its context says."""

    def __init__(self, number: int) -> None:
        self.number = nnx.Param(jnp.full((), number))

    def fail(self, place: str, context: Any) -> None:
        if context == place:
            raise KeyError("the user's own")

    def compute(self, x: Any, received: Any, cache: Any, context: Any) -> Any:
        self.fail("compute", context)
        return x, x, cache

    def merge(self, x: Any, received: Any, context: Any) -> Any:
        self.fail("merge", context)
        return received

    def send(message: Any, context: Any) -> Any:
        Failing.fail(None, "send", context)  # type: ignore[arg-type]
        return message

    stages = (Stage(compute, send),)


@pytest.mark.parametrize(("scanned", "remat"), [(False, False), (True, True)])
@pytest.mark.parametrize("place", ["compute", "merge", "send"])
def test_errors_of_a_layer_have_a_note(place: str, scanned: bool, remat: bool) -> None:
    layers: Any = [Failing(0), Failing(1)]
    layers = StackedLayers.stack(layers) if scanned else layers
    with pytest.raises(KeyError, match="the user's own") as caught:
        run_layers(layers, carries(2), [None, place], remat=remat)
    where = "scanned layers" if scanned and place != "compute" else "layer 0"
    assert caught.value.__notes__[0] == f"in Failing.{place}, {where}, micro-batch 1"


def test_errors_of_stages_and_head_have_a_note() -> None:
    def stages(self: Any, context: Any) -> Any:
        raise KeyError("own")

    with pytest.raises(KeyError) as caught:
        run(block(stages=stages), 1)
    assert caught.value.__notes__ == ["in Block.stages, layer 0, micro-batch 0"]

    def loss(x: Any, context: Any) -> Any:
        raise KeyError("own")

    with pytest.raises(KeyError) as caught:
        run(Block(), 2, head=loss)
    assert caught.value.__notes__ == ["in the head (loss), micro-batch 0"]


def test_functions_without_a_name_and_arrays_of_numpy_will_do() -> None:
    def compute(factor: float, layer: Any, x: Any, received: Any, cache: Any, context: Any) -> Any:
        return x, factor * x, cache

    layer = block(stages=[Stage(functools.partial(compute, 2.0))])
    parts = [np.ones((2, 3), np.float32)] * 2
    out, _ = run_layers((layer, layer), parts, (None, None))
    np.testing.assert_array_equal(jnp.stack(out), 9)


@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.hessian])
def test_forward_mode_is_refused_with_several_micro_batches(derivative: Any) -> None:
    def loss(x: jax.Array, count: int) -> jax.Array:
        out, _ = run_layers([Block()], jnp.split(x, count), [None] * count)
        return sum((part**2).sum() for part in out)

    x = jnp.ones((2, 3))
    assert np.isfinite(derivative(functools.partial(loss, count=1))(x)).all()
    with pytest.raises(TypeError, match=r"no forward-mode derivative .*: take a reverse-mode one"):
        derivative(functools.partial(loss, count=2))(x)
