"""Every transport in chunks against the dense mixture of experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import apply_experts
from tbo_jax.parallel.exchange import TRANSPORTS, Exchange, Transport, in_chunks, make_exchange
from tbo_jax.parallel.exchange.chunks import BlockChunks
from tbo_jax.parallel.sharding import RANKS, make_mesh

EXPERTS, TOP_K, DEPTH, WIDTH = 16, 3, 8, 4
SHARDED = PartitionSpec(RANKS)


def chunked(transport: Transport, devices: int, chunks: int, **options: Any) -> Exchange:
    exchange = make_exchange(
        transport,
        axis=RANKS,
        num_devices=devices,
        num_nodes=2 if transport == "two_level" else 1,
        num_experts=EXPERTS,
        top_k=TOP_K,
        **options,
    )
    return in_chunks(exchange, chunks, EXPERTS, TOP_K)


@cache
def compiled(transport: Transport, devices: int, chunks: int, tokens: int) -> Any:
    """The mixture of experts; and how many choices each chunk computes of each group."""
    exchange = chunked(transport, devices, chunks)

    def local(hidden, ids, weights, gate_up, down):
        messages, places = exchange.pack(hidden, ids, weights)
        assert len(messages) == chunks == exchange.chunks
        kept, returned, computed = None, [], []
        for message in messages:
            received = exchange.dispatch(message)
            rows, here, scales, kept = exchange.take_in(received, places, kept)
            results = apply_experts(rows, here, scales, ExpertWeights(gate_up, down))
            message, kept = exchange.give_back(results, received, places, kept)
            returned.append(exchange.combine(message))
            mine = (here >= 0) & (here < EXPERTS // devices)
            group = here * chunks // (EXPERTS // devices)
            computed.append([jnp.sum(mine & (group == g)) for g in range(chunks)])
        assert kept is None
        return exchange.unpack_results(tuple(returned), places), jnp.array(computed)[None]

    return jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(devices, nodes=2 if transport == "two_level" else 1),
            in_specs=SHARDED,
            out_specs=SHARDED,
            check_vma=False,
        )
    )


@jax.jit
def dense(hidden, ids, weights, gate_up, down):
    """Every expert for every token, weighted; ids below 0 have no expert."""
    gate, up = jnp.split(jnp.einsum("td,edf->tef", hidden, gate_up), 2, axis=-1)
    out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, down)
    chosen = jax.nn.one_hot(ids, EXPERTS, dtype=hidden.dtype)
    return jnp.einsum("tke,tk,ted->td", chosen, weights, out)


def operands(tokens: int) -> tuple[np.ndarray, ...]:
    """hidden, weights, gate_up, down."""
    rng = np.random.default_rng(3)
    shapes = (
        (tokens, DEPTH), (tokens, TOP_K), (EXPERTS, DEPTH, 2 * WIDTH), (EXPERTS, WIDTH, DEPTH)
    )  # fmt: skip
    hidden, weights, gate_up, down = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return hidden, weights, gate_up, down


WORLDS = [
    pytest.param(t, n, c, marks=[] if (n, c) == (2, 2) else [pytest.mark.slow])
    for t in TRANSPORTS
    for n in (2, 4)
    for c in (2, 4)
]
TOKENS = 12  # of a device


def check(ids: np.ndarray, transport: Transport, devices: int, chunks: int) -> np.ndarray:
    """Compare with the dense mixture; returns what each chunk computed of each group."""
    hidden, weights, gate_up, down = operands(len(ids))
    expected = dense(hidden, ids, weights, gate_up, down)
    padding = (ids < 0).all(axis=1)
    hidden, weights = (np.where(padding[:, None], np.nan, a) for a in (hidden, weights))
    run = compiled(transport, devices, chunks, len(ids) // devices)
    found, computed = map(np.asarray, run(hidden, ids, weights, gate_up, down))
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    assert not found[padding].any()
    assert computed.sum() == (ids >= 0).sum()  # nothing is computed twice
    return computed


def random_ids(tokens: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], np.int32)


@pytest.mark.parametrize(("transport", "devices", "chunks"), WORLDS)
def test_equal_to_the_dense_mixture(transport: Transport, devices: int, chunks: int) -> None:
    rng = np.random.default_rng(1)
    total = TOKENS * devices
    everything = random_ids(total)
    check(everything, transport, devices, chunks)
    for fixed in ([0, -1, -1], [EXPERTS - 1, -1, -1], [0, EXPERTS // devices - 1, -1], [0, 1, 2]):
        check(np.tile(np.int32(fixed), (total, 1)), transport, devices, chunks)
    empty_ranks = everything.copy().reshape(devices, TOKENS, TOP_K)
    empty_ranks[1::2] = -1
    check(empty_ranks.reshape(-1, TOP_K), transport, devices, chunks)
    check(np.full_like(everything, -1), transport, devices, chunks)
    check(np.where(rng.random(everything.shape) < 0.5, -1, everything), transport, devices, chunks)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_fewer_tokens_than_chunks(transport: Transport, tokens: int) -> None:
    check(random_ids(2 * tokens), transport, 2, 4)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["all_to_all", "two_level", "all_gather"]),
    st.sampled_from([2, 4]),
    # A token of each kind, of which some are many: so that messages overflow both ways.
    st.lists(
        st.tuples(
            st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K,
                     unique_by=lambda e: e if e >= 0 else object()),
            st.integers(1, TOKENS),
        ),
        min_size=1, max_size=6,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_routing(transport: Transport, chunks: int, kinds: Any, random: Any) -> None:
    rows = [row for row, count in kinds for _ in range(count)]
    rows = (rows * 2 * TOKENS)[: 2 * TOKENS]
    random.shuffle(rows)
    check(np.array(rows, np.int32), transport, 2, chunks)


@pytest.mark.parametrize("chunks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["all_to_all", "two_level", "ragged_all_to_all"])
def test_each_group_is_computed_in_its_chunk_alone(transport: Transport, chunks: int) -> None:
    """So that no weight is read twice: an even routing leaves room in all messages."""
    ids = random_ids(4 * 128)
    computed = check(ids, transport, 4, chunks).sum(0)
    assert (computed == np.diag(np.diag(computed))).all()


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("transport", ["all_to_all", "two_level", "all_gather"])
def test_blocks_send_what_one_message_does(transport: Transport, chunks: int) -> None:
    exchange = chunked(transport, 4, chunks)
    assert isinstance(exchange, BlockChunks)
    for tokens in (1, 3, 4, 31, 256):
        ends = exchange.ends(tokens)
        assert ends[-1] == max(tokens, chunks)
        assert all(a < b for a, b in zip((0, *ends), ends, strict=False))
        # What comes late finds places on the way back.
        for sent in range(chunks - 1):
            assert ends[sent] + ends[chunks - 2 - sent] >= ends[-1]
    one = make_exchange(
        transport, axis=RANKS, num_devices=4, num_nodes=2, num_experts=EXPERTS, top_k=TOP_K
    )
    whole, parts = (e.link_bytes(256, 2048, jnp.bfloat16) for e in (one, exchange))
    assert 0.99 * whole <= parts <= 1.01 * whole


def test_one_chunk_is_the_exchange_itself() -> None:
    one = make_exchange("all_to_all", axis=RANKS, num_devices=2, num_experts=4, top_k=2)
    assert in_chunks(one, 1, 4, 2) is one
    local = make_exchange("all_to_all", axis=RANKS, num_devices=1, num_experts=4, top_k=2)
    assert in_chunks(local, 4, 4, 2) is local


def test_more_chunks_than_experts_are_refused() -> None:
    one = make_exchange("all_to_all", axis=RANKS, num_devices=2, num_experts=4, top_k=2)
    with pytest.raises(
        ValueError, match="expert_chunks is 4: expected 2 at most, the experts of a"
    ):
        in_chunks(one, 4, 4, 2)
