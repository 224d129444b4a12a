from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from tbo_jax import (
    AttentionBuffers,
    ForwardBatch,
    Stage,
    allocate_attention_buffers,
    run_layers,
    split_batch_decoder_layers,
)
from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.attention.cache import KeyValueCache, LayerCache, page_shapes
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.paged import XlaAttention
from tbo_jax.layers.context import PagedAttention
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.schedule.model_step import read_shape

SIZES: dict[str, Any] = {
    "num_layers": 3, "num_pages": 5, "page_size": 4, "num_kv_heads": 2, "head_dim": 8,
    "dtype": jnp.float32, "max_tokens": 6,
}  # fmt: skip


@pytest.mark.parametrize(("stacked", "arrays", "rows"), [(False, 3, 5), (True, 1, 15)])
def test_one_array_a_layer_or_one_for_all(stacked: bool, arrays: int, rows: int) -> None:
    buffers = allocate_attention_buffers(**SIZES, num_micro_batches=2, stacked=stacked)
    cache = buffers.cache
    assert cache.stacked == stacked
    assert [a.shape for a in jax.tree.leaves(cache)] == [(rows, 4, 16)] * 2 * arrays
    assert len(buffers.work) == 2
    assert {a.shape for a in jax.tree.leaves(buffers.work)} == {(6,)}
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(buffers))
    assert {d for leaf in jax.tree.leaves(buffers) for d in leaf.devices()} == {jax.devices()[0]}


@pytest.mark.parametrize(("stacked", "arrays", "rows"), [(False, 3, 5), (True, 1, 15)])
def test_interleaved_pages_hold_keys_and_values(stacked: bool, arrays: int, rows: int) -> None:
    buffers = allocate_attention_buffers(**SIZES, stacked=stacked, layout="interleaved")
    assert buffers.cache.stacked == stacked
    assert [a.shape for a in jax.tree.leaves(buffers.cache)] == [(rows, 4, 4, 8)] * arrays
    view = buffers.cache.layer(2)
    assert (view.layout, view.page_size, view.num_kv_heads(8)) == ("interleaved", 4, 2)


def test_latent_pages_hold_one_array_of_keys() -> None:
    sizes = SIZES | {"num_kv_heads": 1}
    buffers = allocate_attention_buffers(**sizes, layout="latent")
    assert [a.shape for a in jax.tree.leaves(buffers.cache)] == [(5, 4, 8)] * 3
    view = buffers.cache.layer(2)
    assert (view.layout, view.page_size, view.num_kv_heads(8)) == ("latent", 4, 1)
    buffers = allocate_attention_buffers(**sizes, layout="latent", mesh=make_mesh(4, tensor=2))
    for pages in jax.tree.leaves(buffers.cache):
        assert {shard.data.shape for shard in pages.addressable_shards} == {(5, 4, 8)}


def test_a_page_of_the_cache_takes_what_is_allocated_for_it() -> None:
    for name, layout in {"deepseek-v3": "latent", "qwen3-30b-a3b": "separate"}.items():
        config = read_shape(name, 2)
        shapes = page_shapes(layout, 64, config.num_kv_heads, config.head_dim)
        assert kv_bytes_per_page(config, 64) == 2 * sum(map(math.prod, shapes)) * 2


def test_each_device_owns_its_pages() -> None:
    buffers = allocate_attention_buffers(**SIZES, mesh=make_mesh(4))
    for leaf in jax.tree.leaves(buffers):
        shards = leaf.addressable_shards
        assert len({shard.device for shard in shards}) == 4
        assert {shard.data.shape[0] for shard in shards} == {leaf.shape[0] // 4}
    assert buffers.cache.pages[0][0].shape[0] == 4 * 5
    assert buffers.work[0].row.shape == (4 * 6,)


def test_no_two_buffers_share_memory() -> None:
    buffers = allocate_attention_buffers(**SIZES, num_micro_batches=3)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(buffers)]
    assert len(set(places)) == len(places) == 6 + 3 * 5


@pytest.mark.parametrize("name", ["num_layers", "page_size", "num_kv_heads", "max_tokens"])
def test_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        allocate_attention_buffers(**SIZES | {name: 0})


@pytest.mark.parametrize("size", [True, 2.0, "2"])
@pytest.mark.parametrize("name", ["num_pages", "num_micro_batches", "head_dim"])
def test_size_that_is_no_integer_is_refused(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer from [12], got {size!r}"):
        allocate_attention_buffers(**SIZES | {name: size})


def test_padding_page_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_pages must be at least 2, got 1 \(page 0 is"):
        allocate_attention_buffers(**SIZES | {"num_pages": 1})


def numbered(stacked: bool) -> KeyValueCache:
    """A cache of 3 layers x 5 pages, every page filled with its number."""
    pages = jnp.arange(15, dtype=jnp.float32).reshape(15, 1, 1)
    arrays = (pages,) if stacked else tuple(jnp.split(pages, 3))
    return KeyValueCache(tuple((a, a) for a in arrays), 3)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_layer_finds_its_own_pages(stacked: bool) -> None:
    cache = numbered(stacked)
    for index in range(3):
        view = cache.layer(index)
        keys, values = view.pages
        view = LayerCache((keys.at[view.first_page + 2].set(-1), values), view.first_page)
        cache = cache.with_layer(index, view)
    keys, values = (np.concatenate(arrays).ravel() for arrays in zip(*cache.pages))
    assert np.flatnonzero(keys == -1).tolist() == [2, 7, 12]
    assert values.tolist() == list(range(15))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "values", [[-1.0, jnp.nan], [jnp.inf], [-0.0]], ids=["nan second", "inf", "minus zero"]
)
def test_waiting_moves_no_page(values: list[float], stacked: bool) -> None:
    after = {
        dtype: jnp.array(values).astype(dtype) for dtype in ("float32", "bfloat16", "int32", "bool")
    }
    after["nan"] = jnp.array([[jnp.nan]])
    after["complex"] = jnp.array(values).astype("complex64")
    after["fp4"] = jnp.array([-1.5]).astype(jnp.float4_e2m1fn)
    after["none"] = jnp.zeros((0, 3))
    after["keys"] = jax.random.key(1)
    view = numbered(stacked).layer(2, after)
    assert int(view.first_page) == (10 if stacked else 0)


def test_waiting_depends_on_every_array() -> None:
    def first_page(after: Any) -> Any:
        return numbered(True).layer(2, after).first_page

    after = (jnp.ones(2), (jnp.arange(3), jnp.ones((1, 2), bool)), jax.random.key(0))
    jaxpr = jax.make_jaxpr(first_page)(after)
    reached = set(jaxpr.jaxpr.outvars)
    for eqn in reversed(jaxpr.eqns):
        if reached & set(eqn.outvars):
            reached |= {v for v in eqn.invars if not isinstance(v, Literal)}
    assert set(jaxpr.jaxpr.invars) <= reached


# Donation


class AttentionOnly:
    """A layer without weights: attention of the hidden state to itself."""

    def attend(self, hidden: Any, received: Any, cache: Any, context: Any) -> Any:
        heads = hidden.reshape(-1, 2, 8)
        out, cache = context(heads, heads, heads, cache, scale=1.0, sliding_window=None)
        return hidden + out.reshape(hidden.shape), None, cache

    def merge(self, carry: Any, received: Any, context: Any) -> Any:
        return carry

    stages = (Stage(attend),)


@pytest.mark.parametrize("layout", ["separate", "interleaved"])
@pytest.mark.parametrize("count", [1, 2])
def test_donated_buffers_are_updated_in_place(count: int, layout: Any) -> None:
    sizes = SIZES | {
        "num_pages": 50,
        "layout": layout,
    }  # no other array of the step has the shape of the cache
    buffers = allocate_attention_buffers(**sizes, num_micro_batches=count)
    batch = ForwardBatch.pack(
        [[1, 2, 3], [4]], [0, 5], [[1], [2, 3]],
        token_capacity=6, sequence_capacity=3, pages_per_sequence=4,
    )  # fmt: skip

    kernel = XlaAttention(AttentionShape(2, 2, 8, jnp.float32))

    def step(buffers: AttentionBuffers, batch: ForwardBatch, hidden: jax.Array) -> Any:
        parts = split_batch_decoder_layers(batch, count)
        work = [kernel.plan(p, 2, w) for p, w in zip(parts, buffers.work, strict=True)]
        contexts = [PagedAttention(p, w, 2, kernel) for p, w in zip(parts, work, strict=True)]
        carries = jnp.split(hidden, count)
        out, cache = run_layers([AttentionOnly()] * 3, carries, contexts, buffers.cache)
        return out, AttentionBuffers(cache, tuple(work))

    hidden = jnp.ones((6, 16))
    compiled = jax.jit(step, donate_argnums=0).lower(buffers, batch, hidden).compile()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(buffers))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    assert not re.findall(r"f32\[50,4,\S* copy", compiled.as_text())
    _, updated = compiled(buffers, batch, hidden)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(buffers))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(updated))
