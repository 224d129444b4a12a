"""Stages: the one definition of a decoder layer, and the schedules that run it.

A layer is a short tuple of stages. A stage computes, then communicates:

    compute(layer, carry, received, cache, context) -> carry, outgoing, cache
    communicate(outgoing, context) -> received

`run_layers` runs the stages plainly for one micro-batch, and interleaved for several
(A.0, B.0, A.1, B.1, ...), so that the communication of one is in flight while another computes. The
order of compute is fixed by data dependence: each compute takes its input through
`jax.lax.optimization_barrier` together with what the compute before it gave, which leaves XLA's
scheduler only the collectives to move. The transpose of the barrier is a barrier, so the backward
pass interleaves too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier


@dataclass(frozen=True)
class Stage:
    """One compute, and the communication that follows it.

    `compute(layer, carry, received, cache, context)` gives `(carry, outgoing, cache)`. `carry` is
    what stays on this device, `received` what the previous stage of the same layer communicated
    (None in the first stage), `cache` this layer's view of the key/value cache (None in training),
    `context` whatever the caller passed for the micro-batch. Without `communicate`, `outgoing` is
    handed on as it is. All but `context` are pytrees of arrays.

    A stage may be told by `idle(context)` that its communication has nothing to do. It is then one
    stage with the next, or a part of `merge`: where nothing travels, nothing else need be computed.
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


class StackedLayers(nnx.Module):
    """Equal layers as one module whose leaves have a leading axis [L, ...]; `run_layers` scans it.

    Indexing, also with a traced index, gives one layer. Weights are indexed inside the loop body:
    handed in as scanned inputs, the slices for a peeled first layer cost a copy of all weights. A
    layer with a method `share_stack(stacked, index)` may there replace slices by the stack itself,
    for kernels that read it in place.
    """

    def __init__(self, stacked: nnx.Module, length: int):
        self.stacked = stacked
        self.length = length

    @classmethod
    def stack(cls, layers: Sequence[nnx.Module]) -> StackedLayers:
        """Stack equal layers.

        Raises:
            ValueError: the layers differ in structure or shape, so one loop body cannot run them.
        """
        structures = {str(jax.tree.structure(layer)) for layer in layers}
        if len(structures) != 1:
            raise ValueError(
                f"{len(layers)} layers of {len(structures)} kinds cannot be scanned: "
                "run them unrolled"
            )
        kinds = {tuple(leaf.dtype for leaf in jax.tree.leaves(layer)) for layer in layers}
        if len(kinds) != 1:
            raise ValueError("layers of different dtype cannot be scanned: run them unrolled")
        return cls(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), len(layers))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        layer = jax.tree.map(lambda leaf: leaf[index], self.stacked)
        if hasattr(layer, "share_stack"):
            layer.share_stack(self.stacked, index)
        return layer


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
) -> tuple[list[Any], Any]:
    """Run all layers over one or more micro-batches.

    Args:
        layers: a sequence of `Layer`s (run unrolled), or `StackedLayers` (run as one `lax.scan`).
        carries: the input of the first layer, one per micro-batch, in the order in which their
            tokens stand in the batch: a later micro-batch sees the keys that earlier ones wrote.
        contexts: one per micro-batch, handed to every stage.
        cache: see `Cache`; None when layers keep nothing, as in training.

    Returns:
        The carries after the last layer, and the cache.

    Raises:
        ValueError: no layers, or carries and contexts of different number.
    """
    if not len(layers) or len(carries) != len(contexts) or not carries:
        raise ValueError(
            f"run_layers needs layers and one context per carry, got {len(layers)} layers, "
            f"{len(carries)} carries, {len(contexts)} contexts"
        )
    lanes = [_Lane(carry, None, None, c) for carry, c in zip(carries, contexts, strict=True)]
    if isinstance(layers, StackedLayers):
        cache = _run_scanned(layers, lanes, cache)
    else:
        previous, after = None, None
        for index, layer in enumerate(layers):
            layer = _Joined.of(layer, contexts[0])
            cache, after = _run_layer(layer, previous, index, lanes, cache, after)
            previous = layer
    last = _Joined.of(layers[len(layers) - 1], contexts[0])
    _finish_layer(last, len(layers) - 1, lanes)
    return [last.merge(lane.carry, lane.received, lane.context) for lane in lanes], cache


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


def _run_layer(layer, previous, index, lanes: list[_Lane], cache, after):
    """One layer for all lanes; the last lane's last communication is left to the next step.

    `after` is what the latest compute gave (None: nothing to wait for). Returns the cache and the
    new `after`.
    """
    pinned = len(lanes) > 1
    for number, stage in enumerate(layer.stages):
        for lane in lanes:
            if number == 0 and previous is not None and lane is lanes[-1]:
                _finish_layer(
                    previous, index - 1, lanes
                )  # in flight beside the first lane's compute
            after = after if pinned else None
            with _scope(index, lane, lanes, stage.compute):
                view = None if cache is None else cache.layer(index, after)
                inputs = (lane.carry, lane.received, view)
                if after is not None:
                    inputs, _ = optimization_barrier((inputs, after))
                carry, received, view = inputs
                if number == 0 and previous is not None:
                    carry, received = previous.merge(carry, received, lane.context), None
                carry, outgoing, view = stage.compute(
                    layer.layer, carry, received, view, lane.context
                )
            cache = None if cache is None else cache.with_layer(index, view)
            lane.carry, lane.outgoing, after = carry, outgoing, (carry, outgoing)
            final = number == len(layer.stages) - 1 and lane is lanes[-1]
            if not final:
                lane.received = _communicate(stage, lane, index, lanes)
    return cache, after


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


def _run_scanned(layers: StackedLayers, lanes: list[_Lane], cache):
    """Layer 0 peeled, then one loop body for the others.

    The last lane runs a communication behind: what it sends at the end of a layer travels over the
    loop boundary as the loop's carry and is communicated beside the first lane's compute.
    """
    context = lanes[0].context
    cache, _ = _run_layer(_Joined.of(layers[0], context), None, 0, lanes, cache, None)

    def body(state, index):
        carries, received, outgoing, cache = state
        for lane, carry, got in zip(lanes, carries, [*received, None], strict=True):
            lane.carry, lane.received = carry, got
        lanes[-1].outgoing = outgoing
        after = (lanes[-1].carry, outgoing)
        layer, before = (_Joined.of(layers[i], context) for i in (index, index - 1))
        cache, _ = _run_layer(layer, before, index, lanes, cache, after)
        return _loop_state(lanes, cache), None

    if len(layers) == 1:
        return cache
    indices = jnp.arange(1, len(layers), dtype=jnp.int32)
    state, _ = jax.lax.scan(body, _loop_state(lanes, cache), indices)
    carries, received, lanes[-1].outgoing, cache = state
    for lane, carry, got in zip(lanes, carries, [*received, None], strict=True):
        lane.carry, lane.received = carry, got
    return cache


def _loop_state(lanes: list[_Lane], cache):
    received = [lane.received for lane in lanes[:-1]]
    return [lane.carry for lane in lanes], received, lanes[-1].outgoing, cache
