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
    """

    compute: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Any]]
    communicate: Callable[[Any, Any], Any] | None = None


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


@dataclass
class _Lane:
    """One micro-batch on its way through the layers (trace time only)."""

    number: int
    context: Any
    carry: Any
    message: Any = None  # what the latest compute sent; once asked for, what came of it
    communicate: Callable[[Any, Any], Any] | None = None  # still to be done with it
    layer: Any = None  # that has sent

    def receive(self) -> Any:
        """What the latest compute sent, communicated where this is first called."""
        communicate, self.communicate = self.communicate, None
        if communicate is not None:
            with _scope(self.layer, self, communicate):
                self.message = communicate(self.message, self.context)
        return self.message


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
    lanes = [_Lane(n, *c) for n, c in enumerate(zip(contexts, carries, strict=True))]
    order = Order.start(carries) if len(lanes) > 1 else None
    if isinstance(layers, StackedLayers):
        cache, order = _run_scanned(layers, lanes, cache, order, remat)
    else:
        for index in range(len(layers)):
            cache, order = _run_layer(layers, index, lanes, cache, order, remat)
    last = layers[len(layers) - 1]
    if head is None:
        return [last.merge(lane.carry, lane.receive(), lane.context) for lane in lanes], cache
    return _run_head(head, last, lanes, order, remat), cache


def _stages(layer: Layer, context: Any) -> tuple[Stage, ...]:
    return layer.stages(context) if callable(layer.stages) else layer.stages


def _run_layer(layers, index, lanes: list[_Lane], cache, order: Order | None, remat: bool):
    """Layer `index` for all lanes; the last lane's last message is left to whoever needs it.

    Returns the cache and the order (None: nothing is fixed).
    """
    layer, scanned = layers[index], not isinstance(index, int)
    previous = layers[index - 1] if scanned or index else None
    for number, stage in enumerate(_stages(layer, lanes[0].context)):
        before = previous if number == 0 else None  # its merge is a part of this compute
        for lane in lanes:

            def compute(weights, carry, received, view, stage=stage, before=before, lane=lane):
                this = layer if weights is None else weights
                if remat and scanned:  # taken in here, so that a turn keeps no slice of the stack
                    this = layers[index]
                    before = None if before is None else layers[index - 1]
                if before is not None:
                    carry, received = before.merge(carry, received, lane.context), None
                *sent, view = stage.compute(this, carry, received, view, lane.context)
                return tuple(sent), view

            received = lane.receive()
            with _scope(index, lane, stage.compute):
                after = None if order is None else order.after
                view = None if cache is None else cache.layer(index, after)
                # A turn of a scan ends with the gradients of its weights as it is.
                weights = None if scanned or not _is_of_arrays(layer) else layer
                inputs = (lane.carry, received, view)
                (sent, view), order = _run(compute, weights, inputs, order, remat)
            cache = None if cache is None else cache.with_layer(index, view)
            lane.carry, lane.message = sent
            lane.communicate, lane.layer = stage.communicate, index
            if lane is not lanes[-1]:
                lane.receive()
    return cache, order


def _run_head(head, last: Layer, lanes: list[_Lane], order: Order | None, remat: bool):
    """What follows the last layer, for all lanes."""
    results = []
    for lane in lanes:

        def compute(_, carry, received, context=lane.context):
            return head(last.merge(carry, received, context), context), None

        inputs = (lane.carry, lane.receive())
        with jax.named_scope(f"head/micro_batch_{lane.number}"):
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


def _scope(index, lane: _Lane, function: Callable[..., Any]):
    """Names for profiles and the schedule report: layer_3/micro_batch_0/attend_and_route."""
    layer = f"layer_{index}" if isinstance(index, int) else "layers"
    return jax.named_scope(f"{layer}/micro_batch_{lane.number}/{function.__name__}")


def _run_scanned(layers: StackedLayers, lanes: list[_Lane], cache, order, remat: bool):
    """Layer 0 peeled, then one loop body for the others.

    The last lane runs a communication behind: what it sends at the end of a layer travels over the
    loop boundary as the loop's carry and is communicated beside the first lane's compute.
    """
    cache, order = _run_layer(layers, 0, lanes, cache, order, remat)

    pending = lanes[-1].communicate

    def body(state, index):
        cache, order = _restore(lanes, state)
        lanes[-1].communicate, lanes[-1].layer = pending, index
        cache, order = _run_layer(layers, index, lanes, cache, order, remat)
        return _loop_state(lanes, cache, order), None

    if len(layers) == 1:
        return cache, order
    indices = jnp.arange(1, len(layers), dtype=jnp.int32)
    state, _ = jax.lax.scan(body, _loop_state(lanes, cache, order), indices)
    lanes[-1].communicate = pending
    return _restore(lanes, state)


def _loop_state(lanes: list[_Lane], cache, order: Order | None):
    token = None if order is None else order.token
    return [(lane.carry, lane.message) for lane in lanes], cache, token


def _restore(lanes: list[_Lane], state):
    """Cache and order; the latest compute was the last lane's."""
    sent, cache, token = state
    for lane, (carry, message) in zip(lanes, sent, strict=True):
        lane.carry, lane.message = carry, message
    return cache, None if token is None else Order(sent[-1], token)
