"""The paged key/value cache as layers see it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

# How the N pages of S tokens lie in memory, G key/value heads of size H to a token. The attention
# kernel chooses.
# "separate": keys and values in an array of their own, each [N, S, G * H]. The heads share an axis:
#     with one of their own XLA:TPU wants another layout for reading pages than for writing them,
#     and copied the whole cache in every layer (libtpu 0.0.52, v5e).
# "interleaved": one array [N, S, 2G, H], the keys at even heads and the values at odd ones, so that
#     a page is one transfer.
# "latent": one array [N, S, H] of a single head, for latent attention: its values are the first
#     elements of its keys, so the keys are all there is.
PageLayout = Literal["separate", "interleaved", "latent"]


def page_shapes(layout: PageLayout, page_size: int, num_kv_heads: int, head_dim: int):
    """Shapes of one page in each array of a layer: two arrays for "separate", else one.

    Several heads of "latent" are those of the devices of a rank, all of the same content.
    """
    if layout == "interleaved":
        return ((page_size, 2 * num_kv_heads, head_dim),)
    if layout == "latent":
        return ((page_size, num_kv_heads * head_dim),)
    return ((page_size, num_kv_heads * head_dim),) * 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's view of the cache."""

    pages: tuple[jax.Array, ...]  # as `PageLayout` says
    first_page: Any = 0  # int or traced []: where this layer's pages begin in a stacked array
    factors: tuple[jax.Array, ...] = ()  # of pages in 8 bits, for each of them [N, S, G] float32

    @property
    def layout(self) -> PageLayout:
        """How the pages lie in memory."""
        if len(self.pages) == 2:
            return "separate"
        return "interleaved" if self.pages[0].ndim == 4 else "latent"

    @property
    def page_size(self) -> int:
        """S, tokens of a page."""
        return self.pages[0].shape[1]

    def num_kv_heads(self, head_dim: int) -> int:
        """G, if heads have `head_dim` elements."""
        *_, heads, width = self.pages[0].shape
        return heads // 2 if self.layout == "interleaved" else width // head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """Pages of all layers: an array per layer, or one array that holds the pages of all of them.

    The stacked form is for scanned layers. Layer l's page p is then row `l * pages_per_layer + p`,
    so that a loop carries one array and updates it in place; as scanned inputs and outputs it would
    be copied whole in every step although the alias is declared.
    """

    pages: tuple[tuple[jax.Array, ...], ...]  # for each of L layers, or one with L * N pages
    num_layers: int = dataclasses.field(metadata={"static": True})
    factors: tuple[tuple[jax.Array, ...], ...] = ()  # the same, of pages in 8 bits

    @property
    def stacked(self) -> bool:
        """Whether one array holds the pages of all layers."""
        return len(self.pages) == 1 and self.num_layers > 1

    def layer(self, index: Any, after: Any = None) -> LayerCache:
        """The view of layer `index`, to be used when the arrays in `after` have been computed.

        `index` may be traced in the stacked form. A micro-batch writes pages that an earlier one
        has read. XLA must know that the read comes first, or it copies the cache: XLA:CPU (0.10)
        removes optimization barriers before it decides on copies, so the order is in the data.
        """
        wait = 0 if after is None else _zero_after(after)
        if self.stacked:
            per_layer = self.pages[0][0].shape[0] // self.num_layers
            return LayerCache(self.pages[0], index * per_layer + wait, *self.factors[:1])
        return LayerCache(self.pages[index], wait, *self.factors[index : index + 1])

    def with_layer(self, index: Any, view: LayerCache) -> KeyValueCache:
        """The cache in which layer `index` has the arrays of `view`."""
        at = 0 if self.stacked else index
        pages = (*self.pages[:at], view.pages, *self.pages[at + 1 :])
        factors = self.factors and (*self.factors[:at], view.factors, *self.factors[at + 1 :])
        return dataclasses.replace(self, pages=pages, factors=factors)


def _zero_after(tree: Any) -> jax.Array:
    """A zero, int32 [], that depends on every array of `tree` without XLA knowing its value.

    An array without elements is never computed: nothing waits for it.
    """
    bits = jnp.zeros((), jnp.int32)
    for leaf in jax.tree.leaves(tree):
        if leaf.size == 0:
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        element = jax.lax.stop_gradient(leaf).reshape(-1)[0]
        if jnp.issubdtype(element.dtype, jnp.complexfloating):
            element = element.real
        if jnp.issubdtype(element.dtype, jnp.floating):
            width = jnp.finfo(element.dtype).bits
            element = jax.lax.bitcast_convert_type(element, f"int{width}")
        bits |= element.astype(jnp.int32)
    return (bits & 1) >> 1
