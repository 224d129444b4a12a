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
    return make_exchange(
        transport,
        axis=DEVICES,
        num_devices=mesh.size,
        num_nodes=mesh.shape[NODES],
        num_experts=config.num_experts,
        top_k=config.num_experts_per_token,
        dispatch_dtype=dispatch_dtype,
        dtype=config.dtype,
        platform=mesh.devices.flat[0].platform,
    )
