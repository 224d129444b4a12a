"""Expert exchange: tokens travel to the devices of their experts, and sums travel back.

One interface, several transports, equal in result. An exchange is used in three computes with two
communications between them, which is what a schedule can overlap:

    message, places = pack(...)        in the stage that routes
    received = dispatch(message)       communication
    rows = unpack(received)            in the stage of the experts
    returned = combine(pack_results(..., received))   communication
    unpack_results(returned, places)   at the head of the next stage

A token is sent to a device once, however many of its experts live there, and nothing is dropped
whatever the routing. Hidden state, weights and expert ids travel in one message: a second, small
collective for the ids took the place beside the large matrix product, and the payload then ran
exposed (measured on the schedule for 8x H100).

| transport | a device sends | |
|---|---|---|
| `all_to_all` | T rows to every device, the unused ones empty | every platform |
| `all_gather` | all rows to every device | every platform; for many experts a token |
| `ragged_all_to_all` | the rows that are routed | GPU and TPU; emulated, slowly, on CPU |
| `two_level` | T rows to every node, and what a node got to all its devices | several nodes |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tbo_jax.parallel.exchange.all_gather import AllGather
from tbo_jax.parallel.exchange.all_to_all import PaddedAllToAll
from tbo_jax.parallel.exchange.base import Exchange, ShardedExchange, check_divisible
from tbo_jax.parallel.exchange.local import LocalExchange
from tbo_jax.parallel.exchange.message import DISPATCH_DTYPES, DispatchDtype, MessageFormat
from tbo_jax.parallel.exchange.ragged import RaggedAllToAll
from tbo_jax.parallel.exchange.two_level import TwoLevel

Transport = Literal["all_to_all", "all_gather", "ragged_all_to_all", "two_level"]

TRANSPORTS: Mapping[Transport, type[ShardedExchange]] = {
    "all_to_all": PaddedAllToAll,
    "all_gather": AllGather,
    "ragged_all_to_all": RaggedAllToAll,
    "two_level": TwoLevel,
}


def make_exchange(
    transport: Transport,
    *,
    axis: str | tuple[str, ...],
    num_devices: int,
    num_nodes: int = 1,
    num_experts: int,
    top_k: int,
    dispatch_dtype: DispatchDtype | None = None,
    dtype: Any = None,
    platform: str = "cpu",
) -> Exchange:
    """The exchange of `num_experts` experts, `top_k` a token, sharded over mesh axes.

    Args:
        transport: see the table of this module.
        axis: of the mesh, or several, of `num_devices` devices together.
        num_devices, num_experts, top_k: R, E and K.
        num_nodes: size of the first axis, for the transport that tells nodes apart.
        dispatch_dtype: round the hidden state on its way to the experts to 8 bits, with a scale
            for each token (`MessageFormat` tells the error). Not differentiable.
        dtype: of the hidden state; needed with `dispatch_dtype`.
        platform: of the devices.

    Raises:
        ValueError: unknown transport or `dispatch_dtype`, the experts do not divide over the
            devices, `dtype` is missing, or there are no axes of nodes and of devices in one.
    """
    if transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise ValueError(f"unknown transport {transport!r}: expected one of {known}")
    if dispatch_dtype is not None and dispatch_dtype not in DISPATCH_DTYPES:
        known = ", ".join(DISPATCH_DTYPES)
        raise ValueError(f"unknown dispatch_dtype {dispatch_dtype!r}: expected None, {known}")
    if dispatch_dtype is not None and dtype is None:
        raise ValueError("dispatch_dtype needs the dtype of the hidden state: give dtype")
    check_divisible(num_experts, num_devices)
    if num_devices == 1:
        return LocalExchange()
    return TRANSPORTS[transport](
        axis,
        num_devices,
        num_nodes,
        num_experts // num_devices,
        MessageFormat(top_k, dispatch_dtype, dtype),
        platform,
    )
