"""Stages: the one definition of a decoder layer, and the schedules that run it.

A layer is a short tuple of stages. A stage computes, then communicates:

    compute(layer, carry, received, cache, context) -> carry, outgoing, cache
    communicate(outgoing, context) -> received

`run_layers` runs the stages plainly for one micro-batch, and interleaved for several
(A.0, B.0, A.1, B.1, ...), so that the communication of one is in flight while another computes. The
order of compute is fixed by data dependence (`order.py`), which leaves XLA's scheduler only the
collectives to move. The backward pass has the reverse order, and interleaves too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax.overlap.order import Order, in_order, waiting
from tbo_jax.overlap.stacked import StackedLayers
from tbo_jax.overlap.written import Path, changes, contents, full_name, take_apart, write


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """Several messages that a compute sends, in the order in which they are needed.

    Each is communicated on its own. If the next stage is `chunked`, it runs once for each.
    """

    messages: tuple[Any, ...]


@dataclass(frozen=True)
class Stage:
    """One compute, and the communication that follows it.

    `compute(layer, carry, received, cache, context)` gives `(carry, outgoing, cache)`. `carry` is
    what stays on this device, `received` what the previous stage of the same layer communicated
    (None in the first stage), `cache` this layer's view of the key/value cache (None in training),
    `context` whatever the caller passed for the micro-batch. Without `communicate`, `outgoing` is
    handed on as it is. All but `context` are pytrees of arrays.

    With `announces`, `compute` sends something small itself, such as the sizes of what
    `communicate` is to send. It then takes a keyword argument `arrived`: what came of the message
    before, of another micro-batch (None: there is none). What it sends should wait for that, by a
    `jax.lax.optimization_barrier`. XLA:GPU has one collective on its way at a time, and otherwise
    may hold back that message until this one is over.

    With `chunked`, `compute` can do its work in parts. Where the stage before sent `Chunks`, it
    runs once for each: `received` is what came of one message, and the carry goes from one to the
    next. The later messages are on their way while the first ones are computed, and what each run
    sends is on its way beside the next run. What they sent is received as `Chunks` again. Where the
    stage before sent one message, it runs once.

    Raises:
        TypeError: what is to be called cannot be.
    """

    compute: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Any]]
    communicate: Callable[[Any, Any], Any] | None = None
    announces: bool = False
    chunked: bool = False

    def __post_init__(self) -> None:
        if not callable(self.compute):
            raise TypeError(
                "Stage.compute must be a function of (layer, carry, received, cache, context), got "
                f"{_kind(self.compute)}"
            )
        if self.communicate is not None and not callable(self.communicate):
            raise TypeError(
                f"Stage.communicate of {_name(self.compute)} must be None or a function of "
                f"(outgoing, context), got {_kind(self.communicate)}"
            )
        for name in ("announces", "chunked"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"Stage.{name} of {_name(self.compute)} must be True or False, got "
                    f"{_kind(getattr(self, name))}"
                )


class Layer(Protocol):
    """What `run_layers` needs of a layer, usually an `nnx.Module` with `stages` in its class."""

    stages: tuple[Stage, ...] | Callable[[Any], tuple[Stage, ...]]  # or a method of a context

    def merge(self, carry: Any, received: Any, context: Any) -> Any:
        """Fold what the last stage communicated into the carry: the input of the next layer.

        Runs at the head of the next layer's first stage, so that the last communication of a layer
        is in flight beside the compute of another micro-batch.
        """


class Cache(Protocol):
    """Key/value cache of all layers, as `run_layers` threads it."""

    def layer(self, index: Any, after: Any = None) -> Any:
        """The view of layer `index` (traced when layers are scanned).

        With several micro-batches `after` is what the latest compute gave: the view must not be
        written before that compute has read its own.
        """

    def with_layer(self, index: Any, view: Any) -> Cache:
        """The cache with layer `index` replaced by its updated view."""


def run_layers(
    layers: Sequence[Any] | StackedLayers,
    carries: Sequence[Any],
    contexts: Sequence[Any],
    cache: Any = None,
    *,
    head: Callable[[Any, Any], Any] | None = None,
    remat: bool = False,
) -> tuple[list[Any], Any]:
    """Run all layers over one or more micro-batches.

    What a stage writes into its layer (a dropout's count, batch statistics, `sow`, any
    `nnx.Variable`) is kept, and seen by the next micro-batch and step: micro-batches write one
    after another. Scanned layers keep what a stage writes into variables that they have already.

    It runs inside `jax.shard_map` too, with `check_vma` on or off. With JAX 0.10 and `check_vma`,
    an array that does not vary over a mesh axis waits for no array that does, so that XLA may
    reorder computes that take nothing else; then turn `check_vma` off, or take a newer JAX.

    An error that a layer raises has a note that says which layer, stage and micro-batch.

    Args:
        layers: a sequence of `Layer`s (run unrolled), or `StackedLayers` (run as one `lax.scan`).
        carries: the input of the first layer, one per micro-batch, in the order in which their
            tokens stand in the batch: a later micro-batch sees the keys that earlier ones wrote.
        contexts: one per micro-batch, handed to every stage.
        cache: see `Cache`; None when layers keep nothing.
        head: `head(carry, context)` follows the last layer, such as the logits and the loss. The
            last communication of one micro-batch is in flight beside the head of another.
        remat: for the backward pass keep what goes into each compute and what was received, and
            compute the rest anew (`jax.checkpoint`). Nothing is communicated twice.

    Returns:
        The carries after the last layer, or what `head` made of them, and the cache.

    Raises:
        ValueError: no layers, carries and contexts of different number, or micro-batches or stages
            that differ in structure.
        TypeError: an argument, a layer or what a stage gives is not what it should be; or several
            micro-batches in a forward-mode derivative (`jax.jvp`), which they do not have.
    """
    _check_arguments(layers, carries, contexts, cache, head)
    lanes = [_Lane(n, *c) for n, c in enumerate(zip(contexts, carries, strict=True))]
    run = _Run(layers, lanes, cache, Order.start(carries) if len(lanes) > 1 else None, remat)
    if isinstance(layers, StackedLayers):
        run.scan()
    else:
        for index in range(len(layers)):
            run.run_layer(index)
    return run.finish(head), run.cache


@dataclass
class _Lane:
    """One micro-batch on its way through the layers (trace time only)."""

    number: int
    context: Any
    carry: Any
    message: Any = None  # what the latest compute sent; once asked for, what came of it
    stage: Stage | None = None  # whose communication is still to be done with it
    layer: Any = None  # that has sent
    index: Any = None  # of that layer
    arrived: int = 0  # how many of the `Chunks` in `message` have been communicated

    def receive(self) -> Any:
        """What the latest compute sent, communicated where this is first called."""
        stage, self.stage = self.stage, None
        first, self.arrived = self.arrived, 0
        if stage is not None and stage.communicate is not None:
            if isinstance(self.message, Chunks):
                of = list(self.message.messages)
                of[first:] = [
                    self.communicate(stage, sent, f"/chunk_{number}")
                    for number, sent in enumerate(of[first:], first)
                ]
                self.message = Chunks(tuple(of))
            else:
                self.message = self.communicate(stage, self.message)
        return self.message

    def communicate(self, stage: Stage, sent: Any, part: str = "") -> Any:
        """What comes of one message, of a stage that communicates."""
        assert stage.communicate is not None
        with _at(self.layer, self.index, self, stage.communicate, part):
            received = stage.communicate(sent, self.context)
        if received is None and jax.tree.leaves(sent):
            raise TypeError(
                f"the communication after {type(self.layer).__name__}.{_name(stage.compute)} "
                "gave None: expected what is received"
            )
        return received


@dataclass
class _Run:
    """A program on its way through the layers (trace time only)."""

    layers: Any
    lanes: list[_Lane]
    cache: Any
    order: Order | None  # None: nothing is fixed
    remat: bool
    written: dict[Path, None] = field(default_factory=dict)  # into stacked layers

    def run_layer(self, index: Any) -> None:
        """Layer `index` for all lanes; the last lane's last message is left to who needs it."""
        layer = self.layers[index]
        previous = self.layers[index - 1] if _in_loop(index) or index else None
        of_lanes = [_stages(layer, index, lane) for lane in self.lanes]
        if len({len(stages) for stages in of_lanes}) > 1:
            raise ValueError(
                f"{type(layer).__name__}.stages gave {', '.join(str(len(s)) for s in of_lanes)} "
                "stages for the micro-batches' contexts: expected as many for each"
            )
        for number, stages in enumerate(zip(*of_lanes, strict=True)):
            for lane, stage in zip(self.lanes, stages, strict=True):
                if number and stage.chunked and isinstance(lane.message, Chunks):
                    self._compute_chunks(index, layer, lane, stage)
                else:
                    self._compute(index, layer, previous if number == 0 else None, lane, stage)
                if lane is not self.lanes[-1]:
                    lane.receive()

    def _compute_chunks(self, index: Any, layer: Any, lane: _Lane, stage: Stage) -> None:
        """A stage's compute for each of the chunks; the last one's message is left as others are.

        The order is fixed, of computes and of what travels. While chunk i computes, chunk i + 1
        arrives and then what chunk i - 1 gave goes back. So what arrives for chunk i + 2 is sent
        when chunk i has been computed.
        """
        before, coming, last = lane.stage, lane.message.messages, len(lane.message.messages) - 1
        arrived, sent = list(coming), []
        if before is not None and before.communicate is not None:
            arrived = []
        link = computed = None  # what came latest, and what was computed latest

        def fetch() -> None:
            nonlocal link
            number = len(arrived)
            if before is not None and number <= last:
                message = waiting(coming[number], (link, computed))
                link = lane.communicate(before, message, f"/chunk_{number}")
                arrived.append(link)

        fetch()
        fetch()
        for number in range(len(coming)):
            lane.stage, lane.message = None, arrived[number]
            if self.order is None:
                lane.message = waiting(lane.message, computed)
            self._compute(index, layer, None, lane, stage, f"/chunk_{number}")
            computed = lane.message
            fetch()
            message = waiting(computed, link)
            if number < last and stage.communicate is not None:
                message = link = lane.communicate(stage, message, f"/chunk_{number}")
            sent.append(message)
        lane.message, lane.arrived = Chunks(tuple(sent)), last

    def _compute(
        self, index: Any, layer: Any, before: Any, lane: _Lane, stage: Stage, part: str = ""
    ) -> None:
        """One stage's compute; `before` is the layer before, of which this compute is the merge.

        `part` is what its name scope has behind the stage.
        """

        more = {}
        if stage.announces:  # not among the inputs, which all of the compute waits for
            others = len(self.lanes) > 1
            more["arrived"] = self.lanes[lane.number - 1].receive() if others else None

        def compute(used: list[Any], carry: Any, received: Any, view: Any) -> Any:
            if before is not None:
                carry, received = _merge(used[1], index - 1, lane, carry, received), None
            with _noted(layer, index, lane, stage.compute):
                result = stage.compute(used[0], carry, received, view, lane.context, **more)
            carry, outgoing, kept = _checked(result, layer, stage, view)
            return (carry, outgoing), kept

        received = lane.receive()
        with _scope(index, lane, stage.compute, part):
            after = None if self.order is None else self.order.after
            view = None if self.cache is None else self.cache.layer(index, after)
            touched = [(index, layer)] + ([] if before is None else [(index - 1, before)])
            # A turn of a scan ends with the gradients of its weights as it is.
            held = not _in_loop(index)
            sent, view = self._call(compute, touched, held, lane.carry, received, view)
        self.cache = None if self.cache is None else self.cache.with_layer(index, view)
        lane.carry, lane.message = sent
        lane.stage, lane.layer, lane.index = stage, layer, index

    def finish(self, head: Callable[[Any, Any], Any] | None) -> list[Any]:
        """The last merge of all lanes, and the head."""
        if head is None:  # nothing is computed that others could wait for
            self.order, self.remat = None, False
        index = len(self.layers) - 1
        last = self.layers[index]
        return [self._finish_lane(index, last, lane, head) for lane in self.lanes]

    def _finish_lane(self, index: int, last: Any, lane: _Lane, head: Any) -> Any:
        def compute(used: list[Any], carry: Any, received: Any) -> Any:
            carry = _merge(used[0], index, lane, carry, received)
            if head is None:
                return carry, None
            with _noted(None, None, lane, head):
                return head(carry, lane.context), None

        received = lane.receive()
        with jax.named_scope(f"head/micro_batch_{lane.number}") if head else nullcontext():
            result, _ = self._call(compute, [(index, last)], False, lane.carry, received)
        return result

    def _call(self, compute: Any, touched: list[tuple[Any, Any]], held: bool, *inputs: Any) -> Any:
        """`compute(layers, *inputs)`, in its place in the order.

        Args:
            compute: gives (what others wait for, what they do not).
            touched: (index, layer) of each layer that it takes.
            held: whether the gradients of the first one's weights are held by the order.
            inputs: pytrees of arrays.

        Returns:
            What it gave. What it wrote into the layers is in them.
        """
        stacked = isinstance(self.layers, StackedLayers)
        held = held and (self.remat or self.order is not None)
        in_loop = _in_loop(touched[0][0])
        copied = held or (self.remat and not in_loop)
        arrays, copy = take_apart(*(layer for _, layer in touched)) if copied else ([], None)
        arrays = arrays if held else [None] * len(arrays)
        found: list[tuple[int, Path]] = []
        fixed: list[tuple[int, Path, Any]] = []

        def take(arrays: Any) -> list[Any]:
            if copy is not None:
                return copy(arrays)
            if self.remat:  # in here, so that a turn keeps no slice
                return [self.layers[index] for index, _ in touched]
            return [layer for _, layer in touched]

        def run(arrays: Any, *inputs: Any) -> Any:
            used = take(arrays)
            watched = [
                (number, layer, contents(layer))
                for number, layer in enumerate(used)
                if stacked or layer is not touched[number][1]
            ]
            outputs, others = compute(used, *inputs)
            values = []
            for number, layer, before in watched:
                for path, value in changes(layer, before):
                    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
                        found.append((number, path))
                        values.append(value)
                    else:
                        fixed.append((number, path, value))
            return outputs, (others, values)

        run = jax.checkpoint(run) if self.remat else run
        if self.order is None:
            outputs, (others, values) = run(arrays, *inputs)
        else:
            (outputs, (others, values)), self.order = in_order(run, arrays, inputs, self.order)
        for (number, path), value in zip(found, values, strict=True):
            fixed.append((number, path, value))
        for number, path, value in fixed:
            index, layer = touched[number]
            write(layer, path, value)
            if stacked:
                self.layers.write(index, path, value)
                self.written[path] = None
        return outputs, others

    def scan(self) -> None:
        """Layer 0 peeled, then one loop body for the others.

        The last lane runs a communication behind: what it sends at the end of a layer travels over
        the loop boundary as the loop's carry and is communicated beside the first lane's compute.
        What layer 0 wrote into its variables, the others may write too: it is carried as well.
        """
        self.run_layer(0)
        if len(self.layers) == 1:
            return
        last, layers, written = self.lanes[-1], self.layers, list(self.written)
        stage, layer, arrived = last.stage, last.layer, last.arrived

        def body(state: Any, index: jax.Array) -> tuple[Any, None]:
            before = self._restore(state)
            self.layers = layers.with_contents(written, before)
            self.written = {}
            last.stage, last.layer, last.index, last.arrived = stage, layer, index - 1, arrived
            self.run_layer(index)
            for path in self.written:
                if path not in written:
                    raise TypeError(
                        f"{full_name(layer, path)} is written in a scanned layer, but not by the "
                        "stages of the first one: run the layers unrolled"
                    )
            after = self._state(written)
            self._check_turn(state, after)
            return after, None

        indices = jnp.arange(1, len(layers), dtype=jnp.int32)
        state, _ = jax.lax.scan(body, self._state(written), indices)
        self.layers = layers
        for path, value in zip(written, self._restore(state), strict=True):
            write(layers.stacked, path, value)
        last.stage, last.layer, last.index = stage, layer, len(layers) - 1
        last.arrived = arrived

    def _state(self, written: list[Path]) -> Any:
        """What a turn of the loop hands to the next."""
        sent = [(lane.carry, lane.message) for lane in self.lanes]
        token = None if self.order is None else self.order.token
        return sent, self.cache, token, self.layers.contents(written)

    def _restore(self, state: Any) -> list[Any]:
        """Take over what a turn left; the latest compute was the last lane's.

        Returns what the layers wrote.
        """
        sent, self.cache, token, written = state
        for lane, (carry, message) in zip(self.lanes, sent, strict=True):
            lane.carry, lane.message = carry, message
        self.order = None if token is None else Order(sent[-1], token)
        return written

    def _check_turn(self, before: Any, after: Any) -> None:
        """Raise TypeError unless a layer left what the one before it did."""
        name, last = type(self.lanes[-1].layer).__name__, len(self.lanes) - 1
        for number, (got, expected) in enumerate(zip(after[0], before[0], strict=True)):
            what = "sends" if number == last else "has received"
            for part, one, other in zip(("keeps", what), got, expected, strict=True):
                _check_same(one, other, f"scanned {name}: what micro-batch {number} {part}")
        _check_same(after[1], before[1], f"scanned {name}: the cache")


def _in_loop(index: Any) -> bool:
    return not isinstance(index, int)


def _merge(layer: Any, index: Any, lane: _Lane, carry: Any, received: Any) -> Any:
    with _noted(layer, index, lane, layer.merge):
        merged = layer.merge(carry, received, lane.context)
    _check_arrays(merged, f"{type(layer).__name__}.merge gave")
    return merged


def _stages(layer: Any, index: Any, lane: _Lane) -> Sequence[Stage]:
    """The layer's stages for a micro-batch."""
    name, stages = type(layer).__name__, layer.stages
    if callable(stages):
        with _noted(layer, index, lane, stages):
            stages = stages(lane.context)
    if isinstance(stages, Stage) or not isinstance(stages, Sequence):
        raise TypeError(f"{name}.stages is {_kind(stages)}: expected a tuple of Stage")
    if not stages:
        raise ValueError(f"{name}.stages is empty: expected at least one Stage")
    for number, stage in enumerate(stages):
        if not isinstance(stage, Stage):
            raise TypeError(f"{name}.stages[{number}] is {_kind(stage)}: expected a Stage")
    return stages


def _check_arguments(layers: Any, carries: Any, contexts: Any, cache: Any, head: Any) -> None:
    """Raise what `run_layers` says."""
    for name, value, of in (
        ("layers", layers, "layers, or StackedLayers"),
        ("carries", carries, "pytrees, one for each micro-batch"),
        ("contexts", contexts, "one context for each micro-batch"),
    ):
        if isinstance(value, StackedLayers) and name == "layers":
            continue
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise TypeError(f"run_layers: {name} is {_kind(value)}: expected a list of {of}")
    if not len(layers) or len(carries) != len(contexts) or not carries:
        raise ValueError(
            f"run_layers needs layers and one context per carry, got {len(layers)} layers, "
            f"{len(carries)} carries, {len(contexts)} contexts"
        )
    if isinstance(layers, StackedLayers):
        _check_layer(layers.stacked, "the stacked layer")
    else:
        for index in range(len(layers)):
            _check_layer(layers[index], f"layers[{index}]")
    for number, carry in enumerate(carries):
        _check_arrays(carry, f"run_layers: carries[{number}] holds")
        structure: Any = jax.tree.structure(carry)
        first: Any = jax.tree.structure(carries[0])
        if structure != first:
            raise ValueError(
                f"run_layers: carries[{number}] has the structure {structure}: expected that of "
                f"carries[0], {first}"
            )
    for method in ("layer", "with_layer"):
        if cache is not None and not callable(getattr(cache, method, None)):
            raise TypeError(f"run_layers: cache is {_kind(cache)}: expected a method {method!r}")
    if head is not None and not callable(head):
        raise TypeError(
            f"run_layers: head is {_kind(head)}: expected a function of (carry, context)"
        )


def _check_layer(layer: Any, what: str) -> None:
    if isinstance(layer, type):
        raise TypeError(f"{what} is the class {layer.__name__}: expected an instance of it")
    name = type(layer).__name__
    if not hasattr(layer, "stages"):
        raise TypeError(
            f"{what}, {name}, has no `stages`: expected a tuple of Stage, or a method that gives "
            "one for a context"
        )
    if not callable(getattr(layer, "merge", None)):
        raise TypeError(f"{what}, {name}, has no method `merge(carry, received, context)`")


def _checked(result: Any, layer: Any, stage: Stage, view: Any) -> tuple[Any, Any, Any]:
    """What a compute gave, if it is what it should be."""
    name = f"{type(layer).__name__}.{_name(stage.compute)}"
    if not isinstance(result, tuple | list) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else _kind(result)
        raise TypeError(f"{name} gave {got}: expected three, (carry, outgoing, cache)")
    carry, outgoing, kept = result
    _check_arrays(carry, f"{name} gave a carry with")
    _check_arrays(outgoing, f"{name} gave something to send with")
    _check_same(kept, view, f"{name}: its view of the cache", axes=False)
    return carry, outgoing, kept


def _check_arrays(tree: Any, what: str) -> None:
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"{what} {_kind(leaf)}: expected a pytree of arrays")


def _check_same(got: Any, expected: Any, what: str, axes: bool = True) -> None:
    """Raise TypeError unless both have one structure, and their arrays one shape and dtype."""
    one: Any = jax.tree.structure(got)
    other: Any = jax.tree.structure(expected)
    if one != other:
        raise TypeError(f"{what} has the structure {one}: expected {other}")

    def kind(leaf: Any) -> Any:
        of = jax.typeof(leaf)
        return of.shape, of.dtype, of.manual_axis_type.varying if axes else None

    paths = jax.tree_util.tree_flatten_with_path(got)[0]
    for (path, leaf), wanted in zip(paths, jax.tree.leaves(expected), strict=True):
        if kind(leaf) != kind(wanted):
            raise TypeError(
                f"{what} is {jax.typeof(leaf)}{_at_path(path)}: expected {jax.typeof(wanted)}"
            )


def _at_path(path: Any) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""


def _kind(value: Any) -> str:
    """What a wrong value is, in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {value.shape}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return f"of type {type(value).__name__}"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


@contextmanager
def _at(layer: Any, index: Any, lane: _Lane, function: Any, part: str = "") -> Iterator[None]:
    with _scope(index, lane, function, part), _noted(layer, index, lane, function):
        yield


def _scope(index: Any, lane: _Lane, function: Any, part: str = "") -> Any:
    """Names for profiles and the schedule report: layer_3/micro_batch_0/attend_and_route."""
    layer = "layers" if _in_loop(index) else f"layer_{index}"
    return jax.named_scope(f"{layer}/micro_batch_{lane.number}/{_name(function)}{part}")


@contextmanager
def _noted(layer: Any, index: Any, lane: _Lane, function: Any) -> Iterator[None]:
    """Add to an error of the layer's own where it was raised."""
    try:
        yield
    except Exception as error:
        if layer is None:
            place = f"the head ({_name(function)})"
        else:
            number = "scanned layers" if _in_loop(index) else f"layer {index}"
            place = f"{type(layer).__name__}.{_name(function)}, {number}"
        error.add_note(f"in {place}, micro-batch {lane.number}")
        raise
