"""The expert exchange of a model on a mesh."""

from __future__ import annotations

import logging

from jax.sharding import Mesh

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.parallel.exchange import (
    Exchange,
    LocalExchange,
    Transport,
    check_divisible,
    make_exchange,
)
from tbo_jax.parallel.exchange.message import DispatchDtype
from tbo_jax.parallel.sharding import DEVICES, NODES

logger = logging.getLogger(__name__)

MOST_OUTPUTS = 8  # devices that XLA:GPU's own kernel for a ragged exchange writes to


def check_exchange(
    config: DecoderConfig,
    mesh: Mesh,
    transport: Transport,
    dispatch_dtype: DispatchDtype | None = None,
) -> None:
    """Refuse what a model has no use for, or what does not divide, before its weights are there.

    Raises:
        ValueError: a transport or a rounding was asked for, and the model has no experts; or the
            devices do not divide them.
    """
    if config.num_experts:
        check_divisible(config.num_experts, mesh.size)
    elif transport != "all_to_all" or dispatch_dtype is not None:
        raise ValueError(
            f"transport {transport!r} and dispatch_dtype {dispatch_dtype!r} are for experts, "
            f"and this {config.model_type} model has none: expected 'all_to_all' and None"
        )


def exchange_of(
    config: DecoderConfig,
    mesh: Mesh,
    transport: Transport,
    dispatch_dtype: DispatchDtype | None = None,
) -> Exchange:
    """Of experts sharded over all devices; of a model without any, one that nothing travels by.

    Raises:
        ValueError: as `make_exchange` and `check_exchange` do.
    """
    check_exchange(config, mesh, transport, dispatch_dtype)
    if not config.num_experts:
        return LocalExchange()
    if transport == "two_level" and mesh.shape[NODES] == 1:
        logger.warning("transport 'two_level' on one node: all tokens go to all of its devices")
    if dispatch_dtype is not None and mesh.size == 1:
        logger.warning("dispatch_dtype %r on one device: nothing is sent", dispatch_dtype)
    devices = list(mesh.devices.flat)
    exchange = make_exchange(
        transport,
        axis=DEVICES,
        num_devices=mesh.size,
        num_nodes=mesh.shape[NODES],
        num_experts=config.num_experts,
        top_k=config.num_experts_per_token,
        dispatch_dtype=dispatch_dtype,
        dtype=config.dtype,
        platform=devices[0].platform,
    )
    if exchange.sizes_are_data and devices[0].platform in ("gpu", "cuda"):
        _warn_of_host_sizes(len(devices), len({device.process_index for device in devices}))
    return exchange


def _warn_of_host_sizes(num_devices: int, num_processes: int) -> None:
    """Tell who gains nothing from overlap at run time, though the compiled program has it.

    XLA:GPU's kernel that reads the sizes on the device takes `MOST_OUTPUTS` devices of one process
    (`ragged_all_to_all_thunk.cc`, as read in jaxlib 0.11 by marin-community/marin 7891).
    """
    if num_devices > MOST_OUTPUTS or num_processes > 1:
        logger.warning(
            "transport 'ragged_all_to_all' over %d GPUs in %d process(es): XLA copies the sizes of "
            "each message to the host and waits for them there, in every layer, so that computes "
            "start late; it does not for up to %d GPUs of one process. 'all_to_all' and "
            "'two_level' do not wait",
            num_devices,
            num_processes,
            MOST_OUTPUTS,
        )
