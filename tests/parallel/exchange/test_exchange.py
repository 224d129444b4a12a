"""Every transport against the dense mixture of experts, on 1, 2, 4 and 8 devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import apply_experts
from tbo_jax.parallel.exchange import TRANSPORTS, PaddedAllToAll, Transport, make_exchange
from tbo_jax.parallel.exchange.ragged import expected_destinations
from tbo_jax.parallel.sharding import RANKS, make_mesh

TOKENS, EXPERTS, TOP_K, DEPTH, WIDTH = 4, 8, 3, 8, 4  # tokens of one device
SHARDED, WHOLE = PartitionSpec(RANKS), PartitionSpec()

worlds = pytest.mark.parametrize(
    ("transport", "devices"),
    [("all_to_all", 1), *[(t, n) for t in TRANSPORTS for n in (2, 4, 8)]],
)


def mixture(transport: Transport, devices: int) -> Callable[..., jax.Array]:
    """The mixture of experts over `devices` devices, of global arrays."""
    nodes = max(1, devices // 2) if transport == "two_level" else 1
    exchange = make_exchange(
        transport,
        axis=RANKS,
        num_devices=devices,
        num_nodes=nodes,
        num_experts=EXPERTS,
        top_k=TOP_K,
    )

    def local(hidden, ids, weights, gate_up, down):
        message, places = exchange.pack(hidden, ids, weights)
        received = exchange.dispatch(message)
        rows, here, scales = exchange.unpack(received)
        results = apply_experts(rows, here, scales, ExpertWeights(gate_up, down))
        message = exchange.pack_results(results, received)
        return exchange.unpack_results(exchange.combine(message), places)

    return jax.shard_map(
        local,
        mesh=make_mesh(devices, nodes=nodes),
        in_specs=SHARDED,
        out_specs=SHARDED,
        check_vma=False,
    )


@cache
def compiled(transport: Transport, devices: int) -> Any:
    return jax.jit(mixture(transport, devices))


def dense(hidden, ids, weights, gate_up, down) -> jax.Array:
    """Every expert for every token, weighted; ids below 0 have no expert."""
    gate, up = jnp.split(jnp.einsum("td,edf->tef", hidden, gate_up), 2, axis=-1)
    out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, down)
    chosen = jax.nn.one_hot(ids, EXPERTS, dtype=hidden.dtype)  # zero where the id is negative
    return jnp.einsum("tke,tk,ted->td", chosen, weights, out)


dense_jit = jax.jit(dense)


def routing(name: str, devices: int) -> np.ndarray:
    """[devices * T, K] expert ids."""
    rng = np.random.default_rng(len(name))
    shape = devices, TOKENS
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(devices * TOKENS)], np.int32)
    ids = ids.reshape(*shape, TOP_K)
    if name == "all to one expert":
        ids[:] = [EXPERTS - 1, -1, -1]
    elif name == "all to one device":
        ids[:] = np.arange(TOP_K)
    elif name == "uneven ranks":
        ids[np.arange(TOKENS) >= rng.integers(0, TOKENS + 1, devices)[:, None]] = -1
    elif name == "empty ranks":
        ids[1::2] = -1
        ids[0, 0] = -1
    elif name == "nothing":
        ids[:] = -1
    elif name == "padding between":
        ids[rng.random(shape) < 0.5] = -1
    return ids.reshape(-1, TOP_K)


CASES = [
    "random", "all to one expert", "all to one device", "uneven ranks", "empty ranks", "nothing",
    "padding between",
]  # fmt: skip


def operands(devices: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """hidden, weights, gate_up, down."""
    rng = np.random.default_rng(3)
    tokens = devices * TOKENS
    shapes = (
        (tokens, DEPTH), (tokens, TOP_K), (EXPERTS, DEPTH, 2 * WIDTH), (EXPERTS, WIDTH, DEPTH)
    )  # fmt: skip
    hidden, weights, gate_up, down = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return hidden, weights, gate_up, down


@worlds
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_dense_mixture(case: str, transport: Transport, devices: int) -> None:
    hidden, weights, gate_up, down = operands(devices)
    ids = routing(case, devices)
    padding = (ids < 0).all(axis=1)
    expected = dense_jit(hidden, ids, weights, gate_up, down)
    # What padding holds must reach no expert. (New arrays: jax may still read the ones above.)
    nan = np.float32(np.nan)
    hidden, weights = (np.where(padding[:, None], nan, a) for a in (hidden, weights))
    found = np.asarray(compiled(transport, devices)(hidden, ids, weights, gate_up, down))
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    assert not found[padding].any()


def gradients_of(function: Callable[..., jax.Array]) -> Any:
    """In the hidden states, weights and matrices of two devices."""
    hidden, weights, gate_up, down = operands(2)
    ids = routing("padding between", 2)
    direction = np.random.default_rng(4).normal(size=hidden.shape).astype(np.float32)

    def loss(hidden, weights, gate_up, down):
        return jnp.sum(function(hidden, ids, weights, gate_up, down) * direction)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(hidden, weights, gate_up, down)


@pytest.fixture(scope="module")
def dense_gradients() -> Any:
    return gradients_of(dense)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_equal_the_dense_ones(transport: Transport, dense_gradients: Any) -> None:
    found = gradients_of(mixture(transport, 2))
    for one, other in zip(found, dense_gradients, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-5)


# The order of what is sent


def test_sizes_wait_for_what_arrived_and_the_payload_does_not() -> None:
    exchange = make_exchange(
        "ragged_all_to_all", axis=RANKS, num_devices=2, num_experts=EXPERTS, top_k=TOP_K
    )

    def local(hidden, ids, weights, arrived):
        (payload, _, told), _ = exchange.pack(hidden, ids, weights, arrived)
        return payload, told

    run = jax.shard_map(
        local, mesh=make_mesh(2), in_specs=SHARDED, out_specs=SHARDED, check_vma=False
    )
    hidden, ids = jnp.ones((2 * TOKENS, DEPTH)), jnp.zeros((2 * TOKENS, TOP_K), jnp.int32)
    arguments = hidden, ids, jnp.ones((2 * TOKENS, TOP_K)), {"received": jnp.ones((4, 3))}
    (mapped,) = jax.make_jaxpr(run)(*arguments).eqns
    inner = mapped.params["jaxpr"]
    waiting = set(inner.invars[3:])
    for equation in inner.eqns:
        if not waiting.isdisjoint(v for v in equation.invars if isinstance(v, Var)):
            waiting.update(equation.outvars)
    payload, told = inner.outvars
    assert told in waiting
    assert payload not in waiting
    expected = jax.jit(run)(*arguments[:3], None)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(*arguments), expected)


# The packed message


@cache
def packed(devices: int) -> Any:
    exchange = make_exchange(
        "all_to_all", axis=RANKS, num_devices=devices, num_experts=EXPERTS, top_k=TOP_K
    )
    assert isinstance(exchange, PaddedAllToAll)
    return jax.jit(lambda *args: exchange.form.part(exchange.pack(*args)[0]))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 4, 8]),
    st.lists(
        st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K),
        min_size=TOKENS, max_size=TOKENS,
    ),
)  # fmt: skip
def test_a_token_is_sent_to_a_device_at_most_once(devices: int, choices: list[list[int]]) -> None:
    ids = np.array(choices, np.int32)
    hidden = np.repeat(np.arange(TOKENS, dtype=np.float32)[:, None], DEPTH, axis=1)
    weights = np.arange(TOKENS * TOP_K, dtype=np.float32).reshape(TOKENS, TOP_K)
    rows, sent, scales = map(np.asarray, packed(devices)(hidden, ids, weights))
    owners = np.where(ids >= 0, ids // (EXPERTS // devices), -1)
    for device in range(devices):
        wanted = [token for token in range(TOKENS) if device in owners[token]]
        filled = np.flatnonzero((sent[device] >= 0).any(axis=1))
        assert filled.tolist() == list(range(len(wanted)))
        assert rows[device, filled, 0].tolist() == wanted
        np.testing.assert_array_equal(sent[device, filled], ids[wanted])
        np.testing.assert_array_equal(scales[device, filled], weights[wanted])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ids_above_256_travel_exactly_in_bfloat16(transport: Transport) -> None:
    devices, experts = 2, 1026  # 513 on each device
    exchange = make_exchange(
        transport, axis=RANKS, num_devices=devices, num_experts=experts, top_k=2
    )

    def arrive(hidden, ids, weights):
        message, _ = exchange.pack(hidden, ids, weights)
        assert jax.tree.leaves(message)[0].dtype == jnp.bfloat16
        rows, here, _ = exchange.unpack(exchange.dispatch(message))
        return rows, here

    run = jax.shard_map(
        arrive, mesh=make_mesh(devices), in_specs=SHARDED, out_specs=SHARDED, check_vma=False
    )
    # Token t of both devices together chooses expert t, and every device gets some of them.
    ids = np.stack([np.arange(experts), np.full(experts, -1)], axis=1).astype(np.int32)
    ids = np.random.default_rng(0).permutation(ids)
    digits = np.stack([ids[:, 0] // 256, ids[:, 0] % 256], axis=1)
    weights = np.ones((experts, 2), np.float32)
    rows, here = map(np.asarray, jax.jit(run)(jnp.asarray(digits, jnp.bfloat16), ids, weights))
    mine = (here[:, 0] >= 0) & (here[:, 0] < experts // 2)
    digits = np.where(mine[:, None], rows, 0).astype(np.int32)
    expected = digits[:, 0] * 256 + digits[:, 1] - experts // 2 * np.repeat([0, 1], len(rows) // 2)
    np.testing.assert_array_equal(here[mine, 0], expected[mine])
    assert mine.sum() == experts
    assert not ((here[:, 1] >= 0) & (here[:, 1] < experts // 2)).any()


def test_a_token_crosses_to_a_node_once() -> None:
    """And reaches all devices of it, however many of its experts are there; two nodes of two."""
    exchange = make_exchange(
        "two_level", axis=RANKS, num_devices=4, num_nodes=2, num_experts=EXPERTS, top_k=TOP_K
    )

    def arrive(hidden, ids, weights):
        message, _ = exchange.pack(hidden, ids, weights)
        return exchange.unpack(exchange.dispatch(message))[0]

    mesh = make_mesh(4, nodes=2)
    run = jax.shard_map(arrive, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=False)
    hidden, weights, _, _ = operands(4)
    ids = routing("random", 4)
    rows = np.asarray(jax.jit(run)(hidden, ids, weights)).reshape(4, 4 * TOKENS, DEPTH)
    for device, node in enumerate((0, 0, 1, 1)):
        wanted = hidden[(ids // (EXPERTS // 2) == node).any(axis=1)]
        found = rows[device][rows[device].any(axis=1)]
        assert sorted(map(tuple, found)) == sorted(map(tuple, wanted))


@pytest.mark.parametrize("case", CASES)
def test_a_ragged_exchange_sends_what_is_routed_and_no_more(case: str) -> None:
    devices = 4
    exchange = make_exchange(
        "ragged_all_to_all", axis=RANKS, num_devices=devices, num_experts=EXPERTS, top_k=TOP_K
    )

    def arrive(hidden, ids, weights):
        message, _ = exchange.pack(hidden, ids, weights)
        return exchange.dispatch(message)[0]

    run = jax.shard_map(
        arrive, mesh=make_mesh(devices), in_specs=SHARDED, out_specs=SHARDED, check_vma=False
    )
    hidden, weights, _, _ = operands(devices)
    ids = routing(case, devices)
    rows = np.asarray(jax.jit(run)(hidden, ids, weights))[:, :DEPTH]
    rows = rows.reshape(devices, devices, TOKENS, DEPTH)  # to, from
    owners = np.where(ids >= 0, ids // (EXPERTS // devices), -1).reshape(devices, TOKENS, TOP_K)
    hidden = hidden.reshape(devices, TOKENS, DEPTH)
    for to in range(devices):
        for sender in range(devices):
            sent = hidden[sender][(owners[sender] == to).any(axis=1)]
            np.testing.assert_array_equal(rows[to, sender, : len(sent)], sent)
            assert np.isnan(rows[to, sender, len(sent) :]).all()  # nothing was written there


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_expected_destinations(devices: int) -> None:
    rng = np.random.default_rng(0)
    experts = 2 * devices
    ids = np.argsort(rng.random((4000, experts)), axis=1)[:, :3]
    others = [len(set(row // 2) - {0}) for row in ids]
    assert expected_destinations(devices, experts, 3) == pytest.approx(np.mean(others), rel=0.03)


# Errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_that_do_not_divide_name_what_works(transport: Transport) -> None:
    with pytest.raises(ValueError, match=r"12 experts .* by 5 devices; .* work: 1, 2, 3, 4, 6, 12"):
        make_exchange(transport, axis=RANKS, num_devices=5, num_experts=12, top_k=2)


def test_unknown_transport_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match="'carrier_pigeon': expected one of all_to_all, all_gat"):
        make_exchange("carrier_pigeon", axis=RANKS, num_devices=2, num_experts=8, top_k=2)  # type: ignore[arg-type]
