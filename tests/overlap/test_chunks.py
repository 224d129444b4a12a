"""A stage that runs in chunks: in what order, and with what result, on a toy layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tbo_jax import StackedLayers, Stage, run_layers
from tbo_jax.overlap.stages import Chunks

DEPTH, TOKENS, LAYERS = 4, 6, 3


def there(message: jax.Array, context: Any) -> jax.Array:
    context["log"].append("there")
    return message * 2


def back(message: jax.Array, context: Any) -> jax.Array:
    context["log"].append("back")
    return message + 1


class Grouped(nnx.Module):
    """The sum over groups of tanh(2 x w[group]) + 1; a carry counts the groups."""

    def __init__(self, rngs: nnx.Rngs, groups: int):
        self.weight = nnx.Param(0.3 * rngs.normal((groups, DEPTH, DEPTH)))
        self.groups = groups

    def send(self, x, received, cache, context):
        context["log"].append("send")
        messages = tuple(jnp.tanh(x + group) for group in range(self.groups))
        return (x, jnp.int32(0)), Chunks(messages) if context["chunks"] else sum(messages), cache

    def work(self, carry, received, cache, context):
        context["log"].append("work")
        x, group = carry
        return (x, group + 1), jnp.tanh(received @ self.weight[...][group]), cache

    def merge(self, carry, received, context):
        x, group = carry
        assert isinstance(received, Chunks) == context["chunks"]
        returned = received.messages if context["chunks"] else (received,)
        return x + group.astype(x.dtype) * sum(returned)

    stages = (Stage(send, there), Stage(work, back, chunked=True))


def by_hand(layers: list[Grouped], x: jax.Array) -> jax.Array:
    for layer in layers:
        sums = [
            jnp.tanh(2 * jnp.tanh(x + group) @ layer.weight[...][group]) + 1
            for group in range(layer.groups)
        ]
        x = x + layer.groups * sum(sums)
    return x


def make(groups: int) -> list[Grouped]:
    rngs = nnx.Rngs(0)
    return [Grouped(rngs, groups) for _ in range(LAYERS)]


def run(layers: Any, parts: list[jax.Array]) -> tuple[list[jax.Array], list[str]]:
    log: list[str] = []
    contexts = [{"log": log, "chunks": True}] * len(parts)
    return run_layers(layers, parts, contexts)[0], log


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_chunks_give_what_is_computed_by_hand(groups: int, lanes: int, scanned: bool) -> None:
    layers = make(groups)
    x = jax.random.normal(jax.random.key(1), (TOKENS, DEPTH))
    given = StackedLayers.stack(layers) if scanned else layers

    def whole(x: jax.Array) -> jax.Array:
        return jnp.concatenate(run(given, jnp.split(x, lanes))[0])

    np.testing.assert_allclose(jax.jit(whole)(x), by_hand(layers, x), atol=1e-5)
    # It has a gradient, too.
    found = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(whole(x)))))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(by_hand(layers, x))))(x)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("groups", "order"),
    [
        (1, "send there work"),
        (2, "send there there work back work"),
        (4, "send there there work there back work there back work back work"),
    ],
)
def test_the_next_chunk_arrives_beside_the_one_that_is_computed(groups: int, order: str) -> None:
    _, log = run(make(groups)[:1], [jnp.ones((2, DEPTH))])
    assert log == [*order.split(), "back"]


def test_one_message_is_computed_at_once() -> None:
    layers, x = make(1), jnp.ones((2, DEPTH))
    log: list[str] = []
    (found,), _ = run_layers(layers, [x], [{"log": log, "chunks": False}])
    np.testing.assert_allclose(found, by_hand(layers, x), atol=1e-5)
    assert log == ["send", "there", "work", "back"] * LAYERS


def test_each_compute_and_message_waits_for_the_one_before() -> None:
    layers = make(2)[:1]
    text = str(jax.make_jaxpr(lambda x: run(layers, [x])[0])(jnp.ones((2, DEPTH))))
    found = text.count("optimization_barrier")
    # The second message for the first; the second compute for the first one, and so its message
    # back; the last message back for the first.
    assert found == 4


def test_chunked_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="Stage.chunked of work must be True or False, got 2"):
        Stage(Grouped.work, chunked=2)  # type: ignore[arg-type]
