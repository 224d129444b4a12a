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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tbo_jax.overlap.order import Order, in_order
from tbo_jax.overlap.stacked import StackedLayers


@dataclass(frozen=True)
class Stage:
    """One compute, and the communication that follows it.

    `compute(layer, carry, received, cache, context)` gives `(carry, outgoing, cache)`. `carry` is
    what stays on this device, `received` what the previous stage of the same layer communicated
    (None in the first stage), `cache` this layer's view of the key/value cache (None in training),
    `context` whatever the caller passed for the micro-batch. Without `communicate`, `outgoing` is
    handed on as it is. All but `context` are pytrees of arrays.

    A stage may be told by `idle(context)`, of the first micro-batch's context, that its
    communication has nothing to do. It is then one stage with the next, or a part of `merge`: where
    nothing travels, nothing else need be computed. A stage that can become a part of `merge` has no
    cache then.
    """

    compute: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Any]]
    communicate: Callable[[Any, Any], Any] | None = None
    idle: Callable[[Any], bool] | None = None


class Layer(Protocol):
    """What `run_layers` needs of a layer, usually an `nnx.Module` with `stages` in its class."""

    stages: tuple[Stage, ...]

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


@dataclass
class _Lane:
    """One micro-batch on its way through the layers (trace time only)."""

    carry: Any
    received: Any
    outgoing: Any
    context: Any


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
        ValueError: no layers, or carries and contexts of different number.
    """
    if not len(layers) or len(carries) != len(contexts) or not carries:
        raise ValueError(
            f"run_layers needs layers and one context per carry, got {len(layers)} layers, "
            f"{len(carries)} carries, {len(contexts)} contexts"
        )
    lanes = [_Lane(carry, None, None, c) for carry, c in zip(carries, contexts, strict=True)]
    order = Order.start(carries) if len(lanes) > 1 else None
    if isinstance(layers, StackedLayers):
        cache, order = _run_scanned(layers, lanes, cache, order, remat)
    else:
        for index in range(len(layers)):
            cache, order = _run_layer(layers, index, lanes, cache, order, remat)
    last = _Joined.of(layers[len(layers) - 1], contexts[0])
    _finish_layer(last, len(layers) - 1, lanes)
    if head is None:
        return [last.merge(lane.carry, lane.received, lane.context) for lane in lanes], cache
    return _run_head(head, last, lanes, order, remat), cache


@dataclass(frozen=True)
class _Joined:
    """A layer in which every stage but the last one communicates."""

    layer: Any
    stages: tuple[Stage, ...]
    rest: tuple[Stage, ...]  # idle ones after the last that communicates: computed before `merge`

    @classmethod
    def of(cls, layer: Layer, context: Any) -> _Joined:
        stages: list[Stage] = []
        waiting: list[Stage] = []
        for stage in layer.stages:
            waiting.append(stage)
            if stage.idle is None or not stage.idle(context):
                stages.append(_join(waiting))
                waiting = []
        if not stages:
            return cls(layer, (_join([*waiting[:-1], Stage(waiting[-1].compute)]),), ())
        return cls(layer, tuple(stages), tuple(waiting))

    def merge(self, carry: Any, received: Any, context: Any) -> Any:
        for stage in self.rest:
            carry, received, _ = stage.compute(self.layer, carry, received, None, context)
        return self.layer.merge(carry, received, context)


def _join(stages: Sequence[Stage]) -> Stage:
    """The stages as one, which communicates what the last does."""
    if len(stages) == 1:
        return stages[0]

    def compute(layer, carry, received, cache, context):
        for stage in stages:
            carry, received, cache = stage.compute(layer, carry, received, cache, context)
        return carry, received, cache

    compute.__name__ = "_and_".join(stage.compute.__name__ for stage in stages)
    return Stage(compute, stages[-1].communicate)


def _run_layer(layers, index, lanes: list[_Lane], cache, order: Order | None, remat: bool):
    """Layer `index` for all lanes; the last lane's last communication is left to the next step.

    Returns the cache and the order (None: nothing is fixed).
    """
    context = lanes[0].context
    layer = _Joined.of(layers[index], context)
    scanned = not isinstance(index, int)
    previous = _Joined.of(layers[index - 1], context) if scanned or index else None
    for number, stage in enumerate(layer.stages):
        merges = number == 0 and previous is not None
        for lane in lanes:
            if merges and lane is lanes[-1]:
                _finish_layer(
                    previous, index - 1, lanes
                )  # in flight beside the first lane's compute

            def compute(weights, carry, received, view, stage=stage, merges=merges, lane=lane):
                this, before = layer.layer if weights is None else weights, previous
                if remat and scanned:  # taken in here, so that a turn keeps no slice of the stack
                    this, before = layers[index], _Joined.of(layers[index - 1], context)
                if merges and before is not None:
                    carry, received = before.merge(carry, received, lane.context), None
                *sent, view = stage.compute(this, carry, received, view, lane.context)
                return tuple(sent), view

            with _scope(index, lane, lanes, stage.compute):
                after = None if order is None else order.after
                view = None if cache is None else cache.layer(index, after)
                inputs = (lane.carry, lane.received, view)
                # A turn of a scan ends with the gradients of its weights as it is.
                weights = None if scanned or not _is_of_arrays(layer.layer) else layer.layer
                (sent, view), order = _run(compute, weights, inputs, order, remat)
            cache = None if cache is None else cache.with_layer(index, view)
            lane.carry, lane.outgoing = sent
            final = number == len(layer.stages) - 1 and lane is lanes[-1]
            if not final:
                lane.received = _communicate(stage, lane, index, lanes)
    return cache, order


def _run_head(head, last: _Joined, lanes: list[_Lane], order: Order | None, remat: bool):
    """What follows the last layer, for all lanes."""
    results = []
    for number, lane in enumerate(lanes):

        def compute(_, carry, received, context=lane.context):
            return head(last.merge(carry, received, context), context), None

        with jax.named_scope(f"head/micro_batch_{number}"):
            inputs = (lane.carry, lane.received)
            (result, _), order = _run(compute, None, inputs, order, remat)
        results.append(result)
    return results


def _run(compute, weights, inputs, order: Order | None, remat: bool):
    compute = jax.checkpoint(compute) if remat else compute
    if order is None:
        return compute(weights, *inputs), None
    return in_order(compute, weights, inputs, order)


def _is_of_arrays(layer: Any) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer))


def _scope(index, lane: _Lane, lanes: list[_Lane], function: Callable[..., Any]):
    """Names for profiles and the schedule report: layer_3/micro_batch_0/attend_and_route."""
    layer = f"layer_{index}" if isinstance(index, int) else "layers"
    number = next(i for i, other in enumerate(lanes) if other is lane)
    return jax.named_scope(f"{layer}/micro_batch_{number}/{function.__name__}")


def _finish_layer(layer, index, lanes: list[_Lane]) -> None:
    """The communication that `_run_layer` left open: the last lane's last one, of layer `index`."""
    lanes[-1].received = _communicate(layer.stages[-1], lanes[-1], index, lanes)


def _communicate(stage: Stage, lane: _Lane, index, lanes: list[_Lane]) -> Any:
    if stage.communicate is None:
        return lane.outgoing
    with _scope(index, lane, lanes, stage.communicate):
        return stage.communicate(lane.outgoing, lane.context)


def _run_scanned(layers: StackedLayers, lanes: list[_Lane], cache, order, remat: bool):
    """Layer 0 peeled, then one loop body for the others.

    The last lane runs a communication behind: what it sends at the end of a layer travels over the
    loop boundary as the loop's carry and is communicated beside the first lane's compute.
    """
    cache, order = _run_layer(layers, 0, lanes, cache, order, remat)

    def body(state, index):
        cache, order = _restore(lanes, state)
        cache, order = _run_layer(layers, index, lanes, cache, order, remat)
        return _loop_state(lanes, cache, order), None

    if len(layers) == 1:
        return cache, order
    indices = jnp.arange(1, len(layers), dtype=jnp.int32)
    state, _ = jax.lax.scan(body, _loop_state(lanes, cache, order), indices)
    return _restore(lanes, state)


def _loop_state(lanes: list[_Lane], cache, order: Order | None):
    carries, received = [lane.carry for lane in lanes], [lane.received for lane in lanes[:-1]]
    return carries, received, lanes[-1].outgoing, cache, None if order is None else order.token


def _restore(lanes: list[_Lane], state):
    """Cache and order; the latest compute was the last lane's."""
    carries, received, lanes[-1].outgoing, cache, token = state
    for lane, carry, got in zip(lanes, carries, [*received, None], strict=True):
        lane.carry, lane.received = carry, got
    after = lanes[-1].carry, lanes[-1].outgoing
    return cache, None if token is None else Order(after, token)
