"""The schedules on toy layers with everything a real one has: two communications, a cache, a merge.

Two devices hold the halves of an all_to_all and of a psum. The cache is a running sum over tokens,
so that a micro-batch gives the right result only after the ones before it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from tbo_jax import StackedLayers, Stage, run_layers
from tbo_jax.parallel.sharding import RANKS, make_mesh

DEVICES, TOKENS, DEPTH, WIDTH = 2, 7, 4, 5  # tokens of one device
SHARDED, WHOLE = PartitionSpec(RANKS), PartitionSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """For each layer the sum over the tokens that it has seen."""

    totals: jax.Array  # [L, D]

    def layer(self, index: Any, after: Any = None) -> jax.Array:
        return self.totals[index]

    def with_layer(self, index: Any, view: jax.Array) -> Sums:
        return Sums(self.totals.at[index].set(view))


def exchange(message, context):
    return jax.lax.all_to_all(message, context["axis"], 0, 0)


def add_up(message, context):
    return jax.lax.psum(message, context["axis"])


class Mixture(nnx.Module):
    """Two stages: (look back, pick a sign | all_to_all), (project | psum)."""

    def __init__(self, rngs: nnx.Rngs, width: int = WIDTH):
        self.wide = nnx.Param(0.4 * rngs.normal((DEPTH, width)))
        self.back = nnx.Param(0.4 * rngs.normal((width, DEPTH)))
        self.gain = nnx.Param(rngs.normal((DEPTH,)))  # merging needs the layer that has sent

    def look_back(self, hidden, received, total, context):
        assert received is None
        scaled = hidden * context["scale"]
        hidden = hidden + jnp.tanh(jax.lax.cumsum(scaled) + total)
        total = total + scaled.sum(0)
        sign = jnp.where(hidden.sum(-1) > 0, 1, -1)  # whole numbers in the carry, like slots
        message = jax.lax.dot(hidden, self.wide[...])
        return (hidden, sign), jnp.stack([message, 0.5 * message]), total

    def project(self, carry, received, total, context):
        rank = jax.lax.axis_index(context["axis"]).astype(jnp.float32)
        mixed = jnp.tanh(received[0] - (1 + rank) * received[1])
        return carry, jax.lax.dot(mixed, self.back[...]), total

    def merge(self, carry, received, context):
        hidden, sign = carry
        signed = sign[:, None].astype(hidden.dtype) * received * self.gain[...]
        return hidden + signed / context["scale"]

    stages = (Stage(look_back, exchange), Stage(project, add_up))


class Plain(nnx.Module):
    """One stage that communicates nothing, like a dense first layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(0.4 * rngs.normal((DEPTH, DEPTH)))

    def feed(self, hidden, received, total, context):
        seen = jax.lax.cumsum(hidden) + total
        out = hidden + jnp.tanh(jax.lax.dot(seen, self.weight[...]))
        return out, context["scale"] * hidden, total + hidden.sum(0)

    def merge(self, hidden, received, context):
        return hidden + 0.1 * received

    stages = (Stage(feed),)


def layers_of(kinds: str) -> list[Any]:
    """PMM is a plain layer and then two mixtures."""
    rngs = nnx.Rngs(0)
    return [{"P": Plain, "M": Mixture}[kind](rngs) for kind in kinds]


def sizes_of(count: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(TOKENS), count)]


def scales() -> jax.Array:
    """A number for each token, which only its own context knows."""
    return jnp.linspace(0.5, 1.5, TOKENS)[:, None]


def forward(layers: Any, hidden: jax.Array, cache: Any, sizes: Sequence[int]) -> Any:
    """One device's part: [T, D] in micro-batches of these sizes."""
    bounds = np.cumsum(sizes)[:-1].tolist()
    carries = jnp.split(hidden, bounds)
    contexts = [{"axis": RANKS, "scale": scale} for scale in jnp.split(scales(), bounds)]
    out, cache = run_layers(layers, carries, contexts, cache)
    return jnp.concatenate(out), cache


def over_devices(layers: Any, sizes: Sequence[int]) -> Callable[..., Any]:
    """`(leaves of layers, hidden [R * T, D]) -> (hidden, sums [R, L, D])`."""
    structure = jax.tree.structure(layers)

    def local(leaves, hidden):
        sums = Sums(jnp.full((len(layers), DEPTH), 0.1))
        out, sums = forward(jax.tree.unflatten(structure, leaves), hidden, sums, sizes)
        return out, sums.totals[None]

    return jax.shard_map(
        local, mesh=make_mesh(DEVICES), in_specs=(WHOLE, SHARDED), out_specs=SHARDED,
        check_vma=False,
    )  # fmt: skip


def hidden_states() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (DEVICES * TOKENS, DEPTH))


def model_of(kinds: str, scanned: bool) -> Any:
    layers = layers_of(kinds)
    return StackedLayers.stack(layers) if scanned else layers


@cache
def outputs(kinds: str, count: int, scanned: bool) -> Any:
    """Hidden states and sums."""
    model = model_of(kinds, scanned)
    run = jax.jit(over_devices(model, sizes_of(count)))
    return jax.tree.map(np.asarray, run(jax.tree.leaves(model), hidden_states()))


@cache
def gradients(count: int, scanned: bool) -> Any:
    """Of three mixtures: in the input, and in the weights of each kind [L, ...]."""
    model = model_of("MMM", scanned)
    run = over_devices(model, sizes_of(count))
    direction = jax.random.normal(jax.random.key(2), (DEVICES * TOKENS, DEPTH))

    def loss(leaves, hidden):
        out, sums = run(leaves, hidden)
        return jnp.sum(out * direction) + jnp.sum(sums**2)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    weights, inputs = grad(jax.tree.leaves(model), hidden_states())
    if not scanned:
        each = map(jax.tree.leaves, jax.tree.unflatten(jax.tree.structure(model), weights))
        weights = [jnp.stack(same) for same in zip(*each, strict=True)]
    return jax.tree.map(np.asarray, (inputs, weights))


def plain_python(layers: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Both devices and all tokens at once, layer by layer, in numpy; no stages."""
    hidden = np.asarray(hidden_states()).reshape(DEVICES, TOKENS, DEPTH)
    scale, sums = np.asarray(scales()), []
    for layer in layers:
        if isinstance(layer, Plain):
            seen = np.cumsum(hidden, axis=1) + 0.1
            sums.append(seen[:, -1])
            hidden = hidden + np.tanh(seen @ np.asarray(layer.weight[...])) + 0.1 * scale * hidden
            continue
        seen = np.cumsum(hidden * scale, axis=1) + 0.1
        sums.append(seen[:, -1])
        hidden = hidden + np.tanh(seen)
        sign = np.where(hidden.sum(-1, keepdims=True) > 0, 1, -1)
        message = hidden @ np.asarray(layer.wide[...])
        # Device r gets entry r of each device's stack: 1 for device 0, 0.5 for device 1.
        mixed = [
            np.tanh(factor * message[0] - (1 + rank) * factor * message[1])
            for rank, factor in enumerate([1, 0.5])
        ]
        projected = sum(m @ np.asarray(layer.back[...]) for m in mixed)
        hidden = hidden + sign * projected * np.asarray(layer.gain[...]) / scale
    return hidden.reshape(-1, DEPTH), np.stack(sums, axis=1)


def assert_close(left: Any, right: Any) -> None:
    """Equal up to 1e-5 of the largest number of each array."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0),
        left, right,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", ["MMM", "PMM"])
def test_one_micro_batch_equals_plain_python(kinds: str) -> None:
    assert_close(outputs(kinds, 1, False), plain_python(layers_of(kinds)))


@pytest.mark.parametrize(
    ("kinds", "count", "scanned"),
    [
        ("MMM", 2, False), ("MMM", 3, False), ("PMM", 2, False), ("PPM", 2, False),
        ("MMM", 1, True), ("MMM", 2, True), ("MMM", 3, True),
    ],
)  # fmt: skip
def test_every_schedule_gives_the_same_values(kinds: str, count: int, scanned: bool) -> None:
    assert_close(outputs(kinds, count, scanned), plain_python(layers_of(kinds)))


@pytest.mark.parametrize("scanned", [False, True])
def test_two_micro_batches_have_the_gradients_of_one(scanned: bool) -> None:
    expected = gradients(1, False)
    assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(expected))
    assert_close(gradients(2, scanned), expected)


# What the traced program fixes: read from its data flow


class Operation(NamedTuple):
    lane: str  # A or B or C
    stage: int
    index: int  # among the equations of the program


@dataclasses.dataclass(frozen=True)
class Program:
    """The matrix products and the communications of one device's program, in order."""

    computes: list[Operation]
    communications: list[Operation]
    ancestors: list[set[int]]  # for each equation, the equations that it needs

    def independent(self, one: Operation, other: Operation) -> bool:
        return (
            one.index not in self.ancestors[other.index]
            and other.index not in self.ancestors[one.index]
        )


def ancestors_of(jaxpr: Any) -> list[set[int]]:
    """For each equation, the equations that it needs."""
    made_by: dict[Any, int] = {}
    ancestors: list[set[int]] = []
    for index, eqn in enumerate(jaxpr.eqns):
        parents = {made_by[v] for v in eqn.invars if isinstance(v, Var) and v in made_by}
        ancestors.append(parents.union(*(ancestors[p] for p in parents)))
        made_by |= dict.fromkeys(eqn.outvars, index)
    return ancestors


def program_of(jaxpr: Any, sizes: Sequence[int]) -> Program:
    """Lanes are told apart by their number of tokens, stages by the width of their arrays."""
    lanes = dict(zip(sizes, "ABC", strict=False))
    assert len(lanes) == len(sizes)
    program = Program([], [], ancestors_of(jaxpr))
    for index, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        if name in ("dot_general", "all_to_all") or name.startswith("psum"):
            *_, size, width = eqn.outvars[0].aval.shape
            found = program.computes if name == "dot_general" else program.communications
            found.append(Operation(lanes[size], 0 if width == WIDTH else 1, index))
    return program


def inner(jaxpr: Any, primitive: str) -> Any:
    """The body of the only equation of this primitive."""
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == primitive)
    body = eqn.params["jaxpr"]
    return getattr(body, "jaxpr", body)


def traced(sizes: Sequence[int], scanned: bool = False) -> Any:
    """One device's program for three mixtures."""
    model = model_of("MMM", scanned)
    run = over_devices(model, sizes)
    jaxpr = jax.make_jaxpr(run)(jax.tree.leaves(model), hidden_states())
    return inner(jaxpr, "shard_map")


def count_barriers(jaxpr: Any) -> int:
    """Barriers in a program and in the programs inside it."""
    bodies = [body for eqn in jaxpr.eqns for body in jax.tree.leaves(list(eqn.params.values()))]
    here = sum(eqn.primitive.name == "optimization_barrier" for eqn in jaxpr.eqns)
    return here + sum(count_barriers(body) for body in bodies if hasattr(body, "eqns"))


def names(operations: Sequence[Operation]) -> list[str]:
    return [f"{operation.lane}.{operation.stage}" for operation in operations]


TWO, THREE = [4, 3], [4, 2, 1]
ORDER_OF_TWO = ["A.0", "B.0", "A.1", "B.1"]
ORDER_OF_THREE = ["A.0", "B.0", "C.0", "A.1", "B.1", "C.1"]


@pytest.mark.parametrize("scanned", [False, True])
def test_one_micro_batch_has_no_barrier(scanned: bool) -> None:
    assert count_barriers(traced([TOKENS], scanned)) == 0


@pytest.mark.parametrize(
    ("sizes", "scanned", "barriers"),
    # All computes of three layers but the first; scanned: the peeled layer and the loop body.
    [(TWO, False, 3 * 4 - 1), (THREE, False, 3 * 6 - 1), (TWO, True, 4 - 1 + 4)],
)
def test_every_compute_but_the_first_has_a_barrier(
    sizes: list[int], scanned: bool, barriers: int
) -> None:
    assert count_barriers(traced(sizes, scanned)) == barriers


def test_the_backward_pass_has_the_reverse_order() -> None:
    sizes = [6, 1]  # no width is 6 or 1
    layers = layers_of("MMM")
    structure = jax.tree.structure(layers)

    def local(leaves, hidden):
        def loss(leaves, hidden):
            model = jax.tree.unflatten(structure, leaves)
            sums = Sums(jnp.full((3, DEPTH), 0.1))
            return forward(model, hidden, sums, sizes)[0].sum()

        return jax.grad(loss, argnums=(0, 1))(leaves, hidden)

    run = jax.shard_map(
        local, mesh=make_mesh(DEVICES), in_specs=(WHOLE, SHARDED), out_specs=(WHOLE, SHARDED),
        check_vma=False,
    )  # fmt: skip
    jaxpr = inner(jax.make_jaxpr(run)(jax.tree.leaves(layers), hidden_states()), "shard_map")
    ancestors = ancestors_of(jaxpr)
    dots = [(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    dots = dots[3 * 4 :]  # behind those of the forward pass
    # For each compute the product that gives its input's gradient, and the one of its weight.
    by_input = [(i, eqn) for i, eqn in dots if eqn.outvars[0].aval.shape[0] in sizes]
    by_weight = [(i, eqn) for i, eqn in dots if eqn.outvars[0].aval.shape[0] not in sizes]
    lanes = "".join("AB"[sizes.index(eqn.outvars[0].aval.shape[0])] for _, eqn in by_input)
    assert lanes == "BA" * 6
    assert len(by_weight) == 12
    for (one, eqn), (later, _) in itertools.pairwise(by_input):
        grad = next(v for v in eqn.invars if v.aval.shape[0] in sizes)
        (weight,) = (i for i, other in by_weight if grad in other.invars)
        assert {one, weight} <= ancestors[later]
    sent = [
        (i, eqn.outvars[0].aval.shape[-2])
        for i, eqn in enumerate(jaxpr.eqns[dots[0][0] :], dots[0][0])
        if eqn.primitive.name == "all_to_all" or eqn.primitive.name.startswith("psum")
    ]
    assert len(sent) >= 11  # the very first is before all of them
    for index, size in sent[:-1]:
        assert any(
            eqn.outvars[0].aval.shape[0] != size
            and index not in ancestors[i]
            and i not in ancestors[index]
            for i, eqn in by_input
        )


def without_jit(closed: Any) -> Any:
    """The same program with what is jitted within it in place: jax 0.12 leaves that to later."""

    def run(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(var: Any) -> Any:
            return values[var] if isinstance(var, Var) else var.val

        for eqn in jaxpr.eqns:
            given = [read(var) for var in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                results = run(inner.jaxpr, inner.consts, given)
            else:
                params = eqn.primitive.get_bind_params(eqn.params)
                results = eqn.primitive.bind(*given, **params)
                results = results if eqn.primitive.multiple_results else [results]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def test_gradients_of_weights_come_out_of_barriers_that_hold_the_token() -> None:
    """Of each compute but the first one, and the backward pass goes on with the token.

    Else XLA leaves them to the end of the step, and keeps all that they need until then.
    """

    def loss(leaves: Any, hidden: jax.Array) -> jax.Array:
        layers = jax.tree.unflatten(structure, leaves)
        contexts = [{"scale": 1.0}] * 2
        out, _ = run_layers(layers, jnp.split(hidden, 2), contexts, Sums(jnp.zeros((3, DEPTH))))
        return sum((part**3).sum() for part in out)

    layers = layers_of("PPP")
    structure = jax.tree.structure(layers)
    hidden = jnp.ones((2 * WIDTH, DEPTH))  # a product [D, D] is of a weight
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jax.tree.leaves(layers), hidden)
    jaxpr = without_jit(traced).jaxpr
    ancestors = ancestors_of(jaxpr)
    users: dict[Any, list[int]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for var in eqn.invars:
            if isinstance(var, Var):
                users.setdefault(var, []).append(index)
    dots = [(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    assert len(dots) == 3 * 6
    by_weight = [(i, eqn.outvars[0]) for i, eqn in dots if eqn.outvars[0].aval.shape[0] == DEPTH]
    by_input = [i for i, eqn in dots[6:] if eqn.outvars[0].aval.shape[0] == WIDTH]
    assert len(by_weight) == len(by_input) == 6
    held = []
    for _, grad in by_weight[:-1]:
        (user,) = users[grad]
        while jaxpr.eqns[user].primitive.name == "transpose":
            (grad,) = jaxpr.eqns[user].outvars
            (user,) = users[grad]  # and it is no result, nor added to another
        barrier = jaxpr.eqns[user]
        assert barrier.primitive.name == "optimization_barrier"
        assert grad not in jaxpr.outvars
        passed = barrier.outvars[barrier.invars.index(grad)]
        assert passed in users or passed in jaxpr.outvars  # what comes out is what is used
        tokens = [var for var in barrier.outvars if not var.aval.shape]
        assert len(tokens) == 1
        assert tokens[0] in users
        held.append(user)
    for barrier, later in zip(held, by_input[1:], strict=True):
        assert barrier in ancestors[later]
    # Gradients of inputs are not held up by it: they may travel while the weights' are computed.
    for barrier in held:
        inputs = [v for v in jaxpr.eqns[barrier].outvars if v.aval.shape[:1] == (WIDTH,)]
        assert not any(var in users for var in inputs)


@pytest.mark.parametrize(("sizes", "order"), [(TWO, ORDER_OF_TWO * 3), (THREE, ORDER_OF_THREE * 3)])
def test_compute_alternates_and_the_order_is_in_the_data(
    sizes: list[int], order: list[str]
) -> None:
    program = program_of(traced(sizes), sizes)
    assert names(program.computes) == order
    for earlier, later in itertools.pairwise(program.computes):
        assert earlier.index in program.ancestors[later.index]


def test_compute_of_one_micro_batch_follows_its_own_communication() -> None:
    program = program_of(traced([TOKENS]), [TOKENS])
    assert names(program.computes) == ["A.0", "A.1"] * 3
    for sent, later in zip(program.communications, program.computes[1:], strict=False):
        assert sent.index in program.ancestors[later.index]


@pytest.mark.parametrize("sizes", [TWO, THREE])
def test_a_communication_and_the_next_compute_are_independent(sizes: list[int]) -> None:
    """Whatever A sends travels while B computes, and neither waits for the other."""
    program = program_of(traced(sizes), sizes)
    # The k-th communication of a lane and stage is that of its k-th compute.
    order, windows = names(program.computes), 0
    for label in set(order):
        starts = [at for at, name in enumerate(order) if name == label]
        sent = [c for c, name in zip(
            program.communications, names(program.communications), strict=True
        ) if name == label]  # fmt: skip
        for communication, start in zip(sent, starts, strict=True):
            assert program.computes[start].index in program.ancestors[communication.index]
            for beside in program.computes[start + 1 : start + len(sizes)]:
                assert program.independent(communication, beside)
                windows += 1
    # Nothing computes beside the last lane's last communication.
    assert windows == sum(
        min(len(sizes) - 1, len(order) - 1 - start) for start in range(len(order))
    )


def test_communications_of_a_loop_body_overlap_as_well() -> None:
    """The last lane's communication of the layer before travels beside the first lane's compute."""
    program = program_of(inner(traced(TWO, scanned=True), "scan"), TWO)
    assert names(program.computes) == ORDER_OF_TWO
    assert sorted(names(program.communications)) == sorted(ORDER_OF_TWO)
    beside = {"A.0": "B.0", "B.0": "A.1", "A.1": "B.1", "B.1": "A.0"}
    computes = dict(zip(ORDER_OF_TWO, program.computes, strict=True))
    for communication in program.communications:
        (name,) = names([communication])
        assert program.independent(communication, computes[beside[name]])
        arrives = {"A.0": "A.1", "B.0": "B.1", "B.1": "B.0"}.get(name)  # A.1: in the next turn
        if arrives:
            assert communication.index in program.ancestors[computes[arrives].index]


# Cache, contexts, errors


class Step:
    """A layer of one stage, without weights: adds what its context says."""

    def compute(self, carry: Any, received: Any, view: Any, context: Any) -> Any:
        return carry + context, None, view

    def merge(self, carry: Any, received: Any, context: Any) -> Any:
        return 10 * carry

    stages = (Stage(compute),)


class Recorder:
    """A cache that notes how it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def layer(self, index: Any, after: Any = None) -> Any:
        self.calls.append((index, after is not None))
        return jnp.zeros(2)

    def with_layer(self, index: Any, view: Any) -> Recorder:
        return self


@pytest.mark.parametrize(
    ("count", "calls"),
    [
        (1, [(0, False), (1, False)]),
        (2, [(0, False), (0, True), (1, True), (1, True)]),
    ],
)
def test_a_view_waits_for_the_compute_before_it(count: int, calls: list[Any]) -> None:
    cache = Recorder()
    carries = [jnp.zeros(3)] * count
    _, returned = run_layers([Step(), Step()], carries, [1.0] * count, cache)
    assert returned is cache
    assert cache.calls == calls


def test_each_micro_batch_has_its_own_context_and_training_no_cache() -> None:
    out, cache = run_layers([Step(), Step()], [jnp.zeros(1)] * 3, [1.0, 2.0, 3.0])
    assert cache is None
    assert [float(carry[0]) for carry in out] == [110.0, 220.0, 330.0]


@pytest.mark.parametrize(
    ("layers", "carries", "contexts"),
    [(0, 1, 1), (1, 0, 0), (1, 2, 1), (1, 1, 2)],
)
def test_run_layers_refuses_what_does_not_match(layers: int, carries: int, contexts: int) -> None:
    message = f"got {layers} layers, {carries} carries, {contexts} contexts"
    with pytest.raises(ValueError, match=message):
        run_layers([Step()] * layers, [jnp.zeros(1)] * carries, [1.0] * contexts)


def test_stacked_layers_give_each_layer_back() -> None:
    layers = layers_of("MMM")
    stacked = StackedLayers.stack(layers)
    assert len(stacked) == 3
    for index in (1, jnp.int32(1)):
        jax.tree.map(np.testing.assert_array_equal, stacked[index], layers[1])
    assert stacked[0].stages is Mixture.stages


def test_a_single_stacked_layer_runs() -> None:
    assert_close(outputs("M", 2, True), plain_python(layers_of("M")))


class Windowed(nnx.Module):
    def __init__(self, window: int | None, dtype: Any = jnp.float32, width: int = 3) -> None:
        self.window = window
        self.weight = nnx.Param(jnp.ones(width, dtype))


class Doubly(nnx.Module):
    def __init__(self, window: int, extra: bool = False) -> None:
        self.inner = nnx.List([Windowed(4), Windowed(window)])
        if extra:
            self.bias = nnx.Param(jnp.zeros(3))


@pytest.mark.parametrize(
    ("layers", "difference"),
    [
        (layers_of("PM"), r"layers\[0\] and layers\[1\] .* class, Plain and Mixture"),
        (layers_of("MMP"), r"layers\[0\] and layers\[2\] .* class, Mixture and Plain"),
        ([Windowed(None), Windowed(8)], r"Windowed\.window, None and 8"),
        ([Windowed(4), Windowed(8), Windowed(16)], r"Windowed\.window, 4 and 8"),
        ([Windowed(4, width=3), Windowed(4, width=5)], r"weight, float32\[3\] and float32\[5\]"),
        ([Windowed(4), Windowed(4, jnp.bfloat16)], r"Windowed\.weight, float32\[3\] and bfloat16"),
        ([Doubly(4), Doubly(5)], r"Doubly\.inner\.1\.window, 4 and 5"),
        ([Doubly(4), Doubly(4, extra=True)], r"Doubly\.bias, which one of them has not"),
    ],
)
def test_layers_that_differ_cannot_be_stacked(layers: list[Any], difference: str) -> None:
    with pytest.raises(ValueError, match=f"{difference}.*: run them unrolled"):
        StackedLayers.stack(layers)


def test_only_flax_modules_are_stacked() -> None:
    with pytest.raises(ValueError, match="needs at least one layer, got 0"):
        StackedLayers.stack([])
    with pytest.raises(TypeError, match=r"layers\[1\] is of type Step: expected an instance of"):
        StackedLayers.stack([Windowed(4), Step()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"layers\[0\] is the class Windowed"):
        StackedLayers.stack([Windowed])  # type: ignore[list-item]


def test_stacked_layers_end() -> None:
    stacked = StackedLayers.stack([Windowed(4), Windowed(4)])
    assert len(list(stacked)) == 2
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"layer {index} of 2"):
            stacked[index]


def test_a_carry_may_hold_empty_and_complex_arrays() -> None:
    class Scaling(nnx.Module):
        def compute(self, carry: Any, received: Any, cache: Any, context: Any) -> Any:
            return carry, jax.tree.map(lambda leaf: 2 * leaf, carry), cache

        def merge(self, carry: Any, received: Any, context: Any) -> Any:
            return received

        stages = (Stage(compute),)

    def loss(carry: Any) -> jax.Array:
        outputs, _ = run_layers([Scaling()] * 2, [carry] * 2, [None] * 2)
        return sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(outputs))

    carry = {"a": jnp.zeros((0, 3)), "b": jnp.ones(2, jnp.complex64), "c": jnp.ones(2)}
    for leaf in jax.tree.leaves(jax.grad(loss)(carry)):
        np.testing.assert_array_equal(leaf, 8)
    with_complex_alone = jax.grad(loss)({"b": carry["b"]})
    np.testing.assert_array_equal(with_complex_alone["b"], 8)


class Announcing(nnx.Module):
    """Adds to the carry what had arrived before each compute, times a number for the compute."""

    def __init__(self, rngs: nnx.Rngs):
        self.gain = nnx.Param(rngs.normal(()))

    def first(self, carry, received, cache, context, *, arrived):
        sent, seen = carry
        context["seen"].append(arrived)
        return (sent, seen + 0 if arrived is None else seen + arrived * self.gain), sent + 1, cache

    def second(self, carry, received, cache, context):
        return (received, carry[1]), received + 1, cache

    def merge(self, carry, received, context):
        return received, carry[1]

    # What is sent is even after the one communication, and odd after the other.
    stages = (
        Stage(first, lambda sent, context: sent + 1, announces=True),
        Stage(second, lambda sent, context: sent),
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_announces_is_given_the_message_before(count: int) -> None:
    """That of the micro-batch before, and for the first one the last one's of the layer before."""
    layers = [Announcing(nnx.Rngs(n)) for n in range(3)]
    seen: list[Any] = []
    contexts = [{"seen": seen}] * count
    carries = [(jnp.float32(1000 * n), jnp.float32(0)) for n in range(count)]
    run_layers(layers, carries, contexts)
    last = count - 1
    expected = [
        # After a layer 3 were added: 2 by its first stage, and 1 by its second.
        1000 * (lane - 1) + 3 * layer + 2 if lane else 1000 * last + 3 * layer
        for layer in range(3)
        for lane in range(count)
    ]
    if count == 1:
        assert seen == [None] * 3
    else:
        assert seen[0] is None  # nothing was sent yet
        assert [float(value) for value in seen[1:]] == expected[1:]


def test_a_scan_is_given_the_messages_of_the_unrolled_layers() -> None:
    layers = [Announcing(nnx.Rngs(n)) for n in range(4)]
    carries = [(jnp.float32(1000 * n), jnp.float32(0)) for n in range(2)]
    expected, _ = run_layers(layers, carries, [{"seen": []}] * 2)
    found, _ = run_layers(StackedLayers.stack(layers), carries, [{"seen": []}] * 2)
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-6)
    assert float(expected[1][1]) != 0


def test_what_announces_waits_for_no_message_itself() -> None:
    """The message is in flight beside the compute, which takes it for what it sends alone."""

    def run(one, two):
        layers = [Announcing(nnx.Rngs(0))]
        carries = [(one, jnp.zeros(3)), (two, jnp.zeros(3))]
        return run_layers(layers, carries, [{"seen": []}] * 2)[0][1][0]

    # What the second micro-batch sends does not depend on the first one's message.
    jacobian = jax.jacrev(run)(jnp.ones(3), jnp.ones(3))
    assert not jacobian.any()
