"""How large the key/value cache is made."""

from __future__ import annotations

from jax.sharding import Mesh

from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.devices import free_memory
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.parallel.processes import least
from tbo_jax.step.shapes import CacheConfig

CPU_CACHE_BYTES = 1 << 30  # default size of the key/value caches of all CPU devices together
ACCELERATOR_CACHE_SHARE = 0.9  # of the memory that the weights leave free


def longest_context(config: EngineConfig, decoder: DecoderConfig) -> int:
    """Most tokens of a request that the model, and who asks, want room for.

    Raises:
        ValueError: `max_context` is more than the model was made for.
    """
    most = decoder.max_position_embeddings
    if config.max_context is not None and config.max_context > most:
        raise ValueError(
            f"max_context {config.max_context} is out of range: expected 2 to {most}, what the "
            "model was made for"
        )
    return most if config.max_context is None else config.max_context


def cache_config(
    config: EngineConfig, decoder: DecoderConfig, mesh: Mesh, longest: int
) -> tuple[CacheConfig, int]:
    """The cache of each device of `mesh`, and the longest context that it holds.

    Raises:
        ValueError: no memory for it, no room in it for two tokens, or for `max_context`.
    """
    pages, size = config.num_pages, config.page_size
    if pages is None:
        of_device = decoder.of_device(config.tensor_parallel)
        pages = least(default_num_pages(of_device, mesh, size, config.max_sequences, longest))
    held = (pages - 1) * size
    if held < 2:
        raise ValueError(
            f"num_pages {pages} with page_size {size}: the cache of a device holds {held} token(s) "
            "besides the page for padding, expected 2 or more"
        )
    if config.max_context is not None and longest > held:
        raise ValueError(
            f"max_context {longest} does not fit: the cache of a device holds {held} tokens"
        )
    longest = min(longest, held)
    if config.max_sequences > max(held, EngineConfig.max_sequences):
        raise ValueError(
            f"max_sequences is {config.max_sequences}: expected at most {held}, the tokens that "
            "the cache of a device holds"
        )
    # No step has more tokens than the pages hold; what is sized by it need not be larger.
    most = min(config.max_tokens, max(held, config.max_sequences))
    return CacheConfig(pages, size, -(-longest // size), most), longest


def default_num_pages(
    config: DecoderConfig, mesh: Mesh, page_size: int, max_sequences: int, max_context: int
) -> int:
    """Pages of a device for `max_sequences` full contexts, or as many as there is memory for.

    Raises ValueError where there is memory for less than two.
    """
    free = free_memory(mesh)
    budget = CPU_CACHE_BYTES / mesh.size if free is None else free * ACCELERATOR_CACHE_SHARE
    wanted = max_sequences * -(-max_context // page_size) + 1
    affordable = int(budget // kv_bytes_per_page(config, page_size))
    if affordable < 2:
        raise ValueError(
            f"no memory for the key/value cache: {budget / 2**20:.0f} MiB hold no 2 pages of "
            f"{page_size} tokens; take fewer tokens a page, or more devices"
        )
    return min(wanted, affordable)
