"""Attention buffers: allocated once, donated to every step, returned by it.

FastDeploy keeps two sets of them in a module-level dictionary (PR #7165). Here they are a pytree
that the caller threads through the jitted step, so that XLA updates them in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.attention.cache import KeyValueCache, PageLayout, page_shapes
from tbo_jax.attention.rounded import STORED_AS, CacheDtype, bytes_of_token
from tbo_jax.attention.work import AttentionWork
from tbo_jax.overlap.checks import whole_number
from tbo_jax.parallel.sharding import RANKS, TENSOR, make_mesh, num_ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionBuffers:
    """Everything that attention writes: key/value pages, and per micro-batch its work metadata.

    On R ranks every array has the ranks' parts one after another along its first axis, sharded over
    them: each rank owns pages 0..N-1 of its own. Where several devices are a rank, each has its
    heads of the pages.
    """

    cache: KeyValueCache
    work: tuple[AttentionWork, ...]  # one per micro-batch


# A prefix of the tree: how the arrays lie over a mesh.
BUFFER_SPECS = AttentionBuffers(
    PartitionSpec(RANKS, None, TENSOR),  # type: ignore[arg-type]
    PartitionSpec(RANKS),  # type: ignore[arg-type]
)


def allocate_attention_buffers(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    max_tokens: int,
    num_micro_batches: int = 1,
    stacked: bool = False,
    layout: PageLayout = "separate",
    cache_dtype: CacheDtype | None = None,
    mesh: Mesh | None = None,
) -> AttentionBuffers:
    """Allocate the buffers, zeroed, on every device of `mesh`.

    Args:
        num_layers, num_kv_heads, head_dim: shape of the model; heads of one device.
        num_pages: pages N of each device, of `page_size` tokens each; page 0 is kept for padding.
        dtype: of keys and values.
        max_tokens: most tokens of one step on one device; sizes the work metadata.
        num_micro_batches: sets of work metadata.
        stacked: one array for all layers, for scanned layers.
        layout: of the pages, as the attention kernel wants it.
        cache_dtype: hold keys and values in 8 bits, with factors; default in `dtype`.
        mesh: of `make_mesh`; default the first device.

    Raises:
        ValueError: a size that is no integer or below 1, or fewer than 2 pages, or 8 bits in a
            layout without room for factors.
    """
    sizes = dict(
        num_layers=num_layers, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim,
        max_tokens=max_tokens, num_micro_batches=num_micro_batches,
    )  # fmt: skip
    for name, size in sizes.items():
        whole_number(name, size, 1)
    whole_number("num_pages", num_pages, 2, " (page 0 is for padding)")
    mesh = make_mesh(1) if mesh is None else mesh
    arrays = 1 if stacked else num_layers
    rows = num_ranks(mesh) * num_pages * (num_layers if stacked else 1)
    if cache_dtype is not None and layout == "interleaved":
        raise ValueError(f"pages of layout {layout!r} are not held in {cache_dtype}")
    heads = num_kv_heads * mesh.shape[TENSOR]
    shapes = page_shapes(layout, page_size, heads, head_dim)

    def zeros() -> AttentionBuffers:
        # Zeros, never uninitialised: what a masked read meets must not be a NaN of another program.
        def of_layers(shapes, dtype):
            return tuple(
                tuple(jnp.zeros((rows, *shape), dtype) for shape in shapes) for _ in range(arrays)
            )

        if cache_dtype is None:
            cache = KeyValueCache(of_layers(shapes, dtype), num_layers)
        else:
            factors = of_layers([(page_size, heads)] * len(shapes), jnp.float32)
            pages = of_layers(shapes, STORED_AS[cache_dtype])
            cache = KeyValueCache(pages, num_layers, factors)
        work = AttentionWork.zeros(num_ranks(mesh), max_tokens)
        return AttentionBuffers(cache, tuple(work for _ in range(num_micro_batches)))

    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), BUFFER_SPECS)
    return jax.jit(zeros, out_shardings=shardings)()


def kv_bytes_per_page(config: Any, page_size: int, cache_dtype: CacheDtype | None = None) -> int:
    """Bytes of keys and values of one page over all layers, and of their factors."""
    of_token = bytes_of_token(
        config.cached_elements,
        config.num_kv_heads * (2 if config.latent is None else 1),
        jnp.dtype(config.dtype).itemsize,
        cache_dtype,
    )
    return config.num_layers * page_size * of_token
