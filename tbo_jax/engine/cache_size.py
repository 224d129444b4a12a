"""How large the key/value cache is made when nobody says."""

from __future__ import annotations

from jax.sharding import Mesh

from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.layers.config import DecoderConfig

CPU_CACHE_BYTES = 1 << 30  # default size of the key/value caches of all CPU devices together
ACCELERATOR_CACHE_SHARE = 0.9  # of the memory that the weights leave free


def default_num_pages(
    config: DecoderConfig, mesh: Mesh, page_size: int, max_sequences: int, max_context: int
) -> int:
    """Pages of a device for `max_sequences` full contexts, or as many as there is memory for.

    Raises ValueError where there is memory for less than two.
    """
    device = mesh.local_devices[0]
    memory = device.memory_stats() if device.platform != "cpu" else None
    if memory and "bytes_limit" in memory:
        budget = (memory["bytes_limit"] - memory["bytes_in_use"]) * ACCELERATOR_CACHE_SHARE
    else:
        budget = CPU_CACHE_BYTES / mesh.size
    wanted = max_sequences * -(-max_context // page_size) + 1
    affordable = int(budget // kv_bytes_per_page(config, page_size))
    if affordable < 2:
        raise ValueError(
            f"no memory for the key/value cache: {budget / 2**20:.0f} MiB hold no 2 pages of "
            f"{page_size} tokens; take fewer tokens a page, or more devices"
        )
    return min(wanted, affordable)
