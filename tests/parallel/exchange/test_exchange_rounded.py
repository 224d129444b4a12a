"""Messages rounded to 8 bits: what arrives, how far it is off, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tbo_jax.parallel.exchange import TRANSPORTS, make_exchange
from tbo_jax.parallel.exchange.message import DISPATCH_DTYPES, MessageFormat
from tbo_jax.parallel.sharding import RANKS, make_mesh

DEVICES, EXPERTS, TOP_K = 4, 8, 3
both = pytest.mark.parametrize("dispatch_dtype", DISPATCH_DTYPES)
ERROR = {"float8_e4m3fn": 0.0265, "int8": 0.0085}  # root mean square, as documented


def exchange_of(transport: Any, dispatch_dtype: Any, dtype: Any = jnp.bfloat16) -> Any:
    return make_exchange(
        transport,
        axis=RANKS,
        num_devices=DEVICES,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dispatch_dtype=dispatch_dtype,
        dtype=dtype,
    )


def there(form: MessageFormat, hidden, experts, weights):
    """A message written and read."""
    return form.part(form.join(hidden, experts, weights))


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    difference = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
    return np.sqrt(np.mean(difference**2) / np.mean(np.asarray(expected, np.float64) ** 2))


def inputs(tokens: int, width: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
    experts = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], np.int32)
    return hidden, jnp.asarray(experts), jnp.asarray(rng.random((tokens, TOP_K)), dtype)


@both
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_error_of_normally_distributed_values(dispatch_dtype: Any, dtype: Any) -> None:
    hidden, experts, weights = inputs(64, 2048, dtype)
    scaled = hidden * jnp.logspace(-3, 3, 64, dtype=dtype)[:, None]  # one scale would not do
    form = MessageFormat(TOP_K, dispatch_dtype, dtype)
    found, ids, scales = there(form, scaled, experts, weights)
    errors = [relative_error(found[token], scaled[token]) for token in range(64)]
    assert np.mean(errors) == pytest.approx(ERROR[dispatch_dtype], rel=0.05)
    assert max(errors) < 1.5 * ERROR[dispatch_dtype]
    np.testing.assert_array_equal(ids, experts)
    np.testing.assert_array_equal(np.asarray(scales), np.asarray(weights))


def test_outliers_cost_int8_more() -> None:
    hidden, experts, weights = inputs(16, 2048, jnp.float32)
    hidden = hidden.at[:, 7].set(100.0)
    errors = {}
    for kind in DISPATCH_DTYPES:
        found, _, _ = there(MessageFormat(TOP_K, kind, jnp.float32), hidden, experts, weights)
        np.testing.assert_allclose(found[:, 7], 100.0, rtol=1e-6)
        errors[kind] = relative_error(found[:, 8:], hidden[:, 8:])
    assert errors["float8_e4m3fn"] < 0.03 < 0.15 < errors["int8"]


@both
@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38])
def test_extreme_tokens_stay_finite(dispatch_dtype: Any, value: float) -> None:
    _, experts, weights = inputs(2, 8, jnp.float32)
    hidden = jnp.full((2, 8), value, jnp.float32)
    form = MessageFormat(TOP_K, dispatch_dtype, jnp.float32)
    found, _, _ = there(form, hidden, experts, weights)
    np.testing.assert_allclose(found, hidden, rtol=1e-6, atol=1e-32)


@pytest.mark.parametrize("dispatch_dtype", [None, *DISPATCH_DTYPES])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("top_k", range(1, 9))
def test_rows_are_multiples_of_16_bytes(dispatch_dtype: Any, dtype: Any, top_k: int) -> None:
    """And nothing is lost to what fills them up, of hidden states that are no multiple too."""
    form = MessageFormat(top_k, dispatch_dtype, dtype)
    rng = np.random.default_rng(top_k)
    experts = jnp.asarray(rng.integers(-1, 300, (3, top_k)), jnp.int32)
    weights = jnp.asarray(rng.random((3, top_k)), dtype)
    for width in (64, 61):
        hidden = jnp.asarray(rng.integers(-7, 8, (3, width)), dtype)
        message = form.join(hidden, experts, weights)
        row = message.shape[-1] * message.dtype.itemsize
        assert row == form.row_bytes(width, dtype)
        assert row % 16 == 0 or width == 61
        found, ids, scales = form.part(message)
        np.testing.assert_allclose(found, hidden, rtol=0.07, atol=0.05)
        np.testing.assert_array_equal(ids, experts)
        np.testing.assert_array_equal(np.asarray(scales), np.asarray(weights))


@both
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_row_is_one_row_of_bytes_and_zeros_name_no_expert(
    dispatch_dtype: Any, dtype: Any
) -> None:
    form = MessageFormat(TOP_K, dispatch_dtype, dtype)
    message = form.join(*inputs(2, 64, dtype))
    assert (message.dtype, message.shape) == (jnp.uint8, (2, form.row_bytes(64, dtype)))
    _, ids, _ = form.part(jnp.zeros_like(message))
    assert (ids == -1).all()


@both
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_transports_carry_it(transport: Any, dispatch_dtype: Any) -> None:
    """Experts that return their input, weighted: the token times the sum of its weights."""
    tokens = 6
    hidden, experts, weights = inputs(DEVICES * tokens, 256, jnp.bfloat16)
    experts = jnp.where(jnp.arange(DEVICES * tokens)[:, None] % 5 == 0, -1, experts)
    live = np.asarray(experts[:, 0] >= 0)
    hidden = jnp.where(live[:, None], hidden, jnp.nan)  # padding, which reaches nobody
    exchange = exchange_of(transport, dispatch_dtype)

    def step(hidden, experts, weights):
        message, places = exchange.pack(hidden, experts, weights)
        assert jax.tree.leaves(message)[0].dtype == jnp.uint8
        received = exchange.dispatch(message)
        rows, ids, scales = exchange.unpack(received)
        here = (ids >= 0) & (ids < EXPERTS // DEVICES)
        total = jnp.where(here, scales, 0).sum(1, keepdims=True)
        results = jnp.where(here.any(1, keepdims=True), rows * total, 0)
        return exchange.unpack_results(
            exchange.combine(exchange.pack_results(results, received)), places
        )

    spec = PartitionSpec(RANKS)
    mesh = make_mesh(DEVICES)
    run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = np.asarray(jax.jit(run)(hidden, experts, weights), np.float32)
    expected = np.asarray(hidden * weights.sum(1, keepdims=True), np.float32)
    assert not found[~live].any()
    assert relative_error(found[live], expected[live]) < 0.03


@pytest.mark.parametrize("dispatch_dtype", [None, *DISPATCH_DTYPES])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_link_bytes_are_those_of_the_messages(transport: Any, dispatch_dtype: Any) -> None:
    tokens, width, dtype = 6, 32, jnp.bfloat16
    exchange = exchange_of(transport, dispatch_dtype)

    def messages(hidden, experts, weights):
        message, _ = exchange.pack(hidden, experts, weights)
        received = exchange.dispatch(message)
        rows, _, _ = exchange.unpack(received)
        return message, exchange.pack_results(rows, received)

    spec = PartitionSpec(RANKS)
    mesh = make_mesh(DEVICES)
    run = jax.shard_map(messages, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    out, back = jax.eval_shape(run, *inputs(DEVICES * tokens, width, dtype))
    out, back = (jax.tree.leaves(m)[0] for m in (out, back))
    one_out = out.shape[-1] * out.dtype.itemsize  # bytes of a row
    rows = {"ragged_all_to_all": min(DEVICES - 1, TOP_K) * tokens}
    rows = rows.get(transport, (DEVICES - 1) * tokens)
    told = 8 * (DEVICES - 1) if transport == "ragged_all_to_all" else 0
    expected = rows * (one_out + back.shape[-1] * back.dtype.itemsize) + told
    assert exchange.link_bytes(tokens, width, dtype) == expected


# What is refused


@both
@pytest.mark.parametrize("argument", [0, 2])
def test_training(dispatch_dtype: Any, argument: int) -> None:
    form = MessageFormat(TOP_K, dispatch_dtype, jnp.float32)

    def loss(hidden, experts, weights):
        found, _, scales = there(form, hidden, experts, weights)
        return found.sum() + scales.sum()

    with pytest.raises(ValueError, match=f"dispatch_dtype '{dispatch_dtype}' .* no gradient"):
        jax.grad(loss, argnums=argument)(*inputs(2, 8, jnp.float32))


def test_an_unknown_type() -> None:
    with pytest.raises(ValueError, match="'int4': expected None, float8_e4m3fn, int8"):
        exchange_of("all_to_all", "int4")


def test_no_dtype_of_the_hidden_state() -> None:
    with pytest.raises(ValueError, match="give dtype"):
        exchange_of("all_to_all", "int8", None)


def test_another_dtype_of_the_hidden_state() -> None:
    exchange = exchange_of("all_gather", "int8", jnp.bfloat16)
    with pytest.raises(ValueError, match="made for hidden states of bfloat16, got float32"):
        exchange.pack(*inputs(2, 8, jnp.float32))
