"""The expert exchange of a model on a mesh."""

from __future__ import annotations

from jax.sharding import Mesh

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.moe.exchange import Exchange, LocalExchange, Transport, make_exchange
from tbo_jax.moe.message import DispatchDtype
from tbo_jax.sharding import DEVICES, NODES


def exchange_of(
    config: DecoderConfig,
    mesh: Mesh,
    transport: Transport,
    dispatch_dtype: DispatchDtype | None = None,
) -> Exchange:
    """Of experts sharded over all devices; of a model without any, one that nothing travels by.

    Raises ValueError as `make_exchange` does.
    """
    if not config.num_experts:
        return LocalExchange()
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
