"""Training over several devices and micro-batches: the loss and the gradient of the plain step."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tbo_jax import OverlapConfig
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.layers.rotary import RotaryConfig
from tbo_jax.moe.routing import Routing
from tbo_jax.parallel.exchange import Transport
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.training.loss import NextTokenLoss
from tbo_jax.training.train_step import init_train_state, make_train_step

LENGTH, BALANCE = 3, 0.3
DENSE = DecoderConfig(
    model_type="qwen3", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2,
    num_heads=2, num_kv_heads=1, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=64,
    rotary=RotaryConfig(dim=8, theta=100.0), query_key_norm=True,
    tie_word_embeddings=True, initializer_range=0.3,
)  # fmt: skip
SPARSE = dataclasses.replace(
    DENSE, num_experts=8, router=Routing(2), expert_intermediate_size=8,
    shared_expert_intermediate_size=8,
)  # fmt: skip
MIXED = dataclasses.replace(SPARSE, dense_layers=frozenset([0]))
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def tokens(sequences: int = 8) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (sequences, LENGTH + 1), 0, DENSE.vocab_size)


def sequences_for(count: int) -> int:
    """As few as four devices can cut into so many parts."""
    return 12 if count == 3 else 8


def overlap(count: int) -> OverlapConfig:
    return OverlapConfig("on", count) if count > 1 else OverlapConfig()


def by_layer(gradient: nnx.State, num_layers: int) -> dict[Any, np.ndarray]:
    """Arrays by their path, those of stacked layers one by one."""
    arrays: dict[Any, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(gradient):
        value = np.asarray(variable.get_value())
        if path[1:2] == ("stacked",):
            for layer in range(num_layers):
                arrays["layers", layer, *path[2:]] = value[layer]
        else:
            arrays[path] = value
    return arrays


@cache
def result(
    config: DecoderConfig,
    devices: int,
    count: int,
    scanned: bool,
    remat: bool,
    transport: Transport = "all_to_all",
) -> Any:
    """Metrics and gradient."""
    model = CausalLM(config, rngs=nnx.Rngs(0), scanned=scanned)
    loss = NextTokenLoss(
        model,
        mesh=make_mesh(devices),
        overlap=overlap(count),
        transport=transport,
        balance_weight=BALANCE,
        remat=remat,
    )
    batch = tokens(sequences_for(count))
    run = jax.jit(loss.value_and_grad).lower(nnx.state(model), batch).compile(FAST)
    metrics, gradient = run(nnx.state(model), batch)
    return jax.device_get(metrics), by_layer(gradient, config.num_layers)


@cache
def plain(config: DecoderConfig, sequences: int) -> Any:
    """The same of a model without stages, devices or exchange, where all experts see all tokens."""
    graph, weights = nnx.split(CausalLM(config, rngs=nnx.Rngs(0)))

    def norm(x, module):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * module.scale[...]

    def rotate(x):
        angle = jnp.arange(3.0)[:, None] * 100.0 ** (-jnp.arange(4.0) / 4)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(x, module, inner):
        x = (x @ module.weight[...].T).reshape(*x.shape[:2], -1, 8)
        return x if inner is None else rotate(norm(x, inner))

    def attend(x, module):
        q, k = heads(x, module.q_proj, module.q_norm), heads(x, module.k_proj, module.k_norm)
        v = heads(x, module.v_proj, None)
        scores = jnp.einsum("bqnh,bsh->bnqs", q, k[:, :, 0]) / np.sqrt(8)
        scores = jnp.where(np.tri(LENGTH, dtype=bool), scores, -jnp.inf)
        out = jnp.einsum("bnqs,bsh->bqnh", jax.nn.softmax(scores), v[:, :, 0])
        return out.reshape(*x.shape[:2], -1) @ module.o_proj.weight[...].T

    def feed(x, module):
        gate, up = (x @ m.weight[...].T for m in (module.gate_proj, module.up_proj))
        return (jax.nn.silu(gate) * up) @ module.down_proj.weight[...].T

    def mixture(x, module):
        probabilities = jax.nn.softmax(x @ module.gate.weight[...].T)
        best, chosen = jax.lax.top_k(probabilities, 2)
        taken = jax.nn.one_hot(chosen, config.num_experts)
        weights = jnp.einsum("bsk,bske->bse", best / best.sum(-1, keepdims=True), taken)
        gate, up = jnp.split(jnp.einsum("bsd,edf->bsef", x, module.gate_up_proj[...]), 2, -1)
        out = jnp.einsum("bsef,efd->bsed", jax.nn.silu(gate) * up, module.down_proj[...])
        balance = config.num_experts * (probabilities.mean((0, 1)) * taken.mean((0, 1, 2))).sum()
        return jnp.einsum("bse,bsed->bsd", weights, out) + feed(x, module.shared_experts), balance

    def loss(weights):
        model, balance = nnx.merge(graph, weights), []
        embedding = model.embed_tokens.embedding[...]
        x = embedding[tokens(sequences)[:, :-1]]
        for index, layer in enumerate(model.layers):
            x = x + attend(norm(x, layer.input_layernorm), layer.self_attn)
            normed = norm(x, layer.post_attention_layernorm)
            if config.is_sparse(index):
                out, lost = mixture(normed, layer.mlp)
                balance.append(lost)
            else:
                out = feed(normed, layer.mlp)
            x = x + out
        logits = jax.nn.log_softmax(norm(x, model.norm) @ embedding.T)
        entropy = -jnp.take_along_axis(logits, tokens(sequences)[:, 1:, None], -1).mean()
        metrics = {"cross_entropy": entropy, "loss": entropy + BALANCE * sum(balance)}
        if balance:
            metrics["balance"] = sum(balance) / len(balance)
        return metrics["loss"], metrics

    (_, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    return jax.device_get(metrics), by_layer(gradient, config.num_layers)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "devices", "count", "scanned", "remat"),
    [
        pytest.param(DENSE, 1, 1, False, False, id="dense"),
        pytest.param(DENSE, 4, 3, True, False, marks=slow, id="dense-4-devices-3-parts-scanned"),
        pytest.param(MIXED, 4, 2, False, True, marks=slow, id="mixed-4-devices-2-parts-remat"),
        pytest.param(SPARSE, 2, 2, True, False, id="sparse-2-devices-2-parts"),
        pytest.param(SPARSE, 2, 2, True, True, marks=slow, id="sparse-2-devices-2-parts-remat"),
        *[
            pytest.param(config, devices, count, scanned, remat, marks=slow)
            for config, scanned in ((DENSE, False), (MIXED, False), (SPARSE, True))
            for devices, count, remat in ((1, 2, True), (4, 1, True), (4, 2, False), (4, 3, True))
        ],
    ],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_a_plain_model(
    config: DecoderConfig, devices: int, count: int, scanned: bool, remat: bool
) -> None:
    check(config, count, *result(config, devices, count, scanned, remat))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "devices", "count", "scanned", "remat"),
    [
        pytest.param(MIXED, 4, 2, False, True, id="mixed-4-devices-2-parts-remat"),
        pytest.param(SPARSE, 2, 3, False, False, id="sparse-2-devices-3-parts"),
        pytest.param(SPARSE, 2, 2, True, True, id="sparse-2-devices-2-parts-scanned-remat"),
    ],
)
def test_sizes_that_wait_for_a_message_change_no_gradient(
    config: DecoderConfig, devices: int, count: int, scanned: bool, remat: bool
) -> None:
    check(config, count, *result(config, devices, count, scanned, remat, "ragged_all_to_all"))


def check(config: DecoderConfig, count: int, metrics: Any, gradient: Any) -> None:
    expected_metrics, expected = plain(config, sequences_for(count))
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected_metrics[name], rtol=1e-5)
    assert gradient.keys() == expected.keys()
    for path, value in expected.items():
        most = np.abs(value).max()
        assert most > 1e-4
        np.testing.assert_allclose(gradient[path], value, rtol=0, atol=1e-5 * most, err_msg=path)


def test_a_few_steps_lower_the_loss_and_compile_once(compilations: Any) -> None:
    model = CausalLM(dataclasses.replace(SPARSE, num_layers=1), rngs=nnx.Rngs(0))
    loss = NextTokenLoss(model, mesh=make_mesh(2), overlap=overlap(2), balance_weight=0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        state = init_train_state(model, optimizer, loss)
        step = make_train_step(loss, optimizer)
        batch, losses = tokens(), []
        before = compilations()
        state, metrics = step(state, batch)
        donated = state
        once = compilations() - before
        for _ in range(4):
            losses.append(float(metrics["loss"]))
            state, metrics = step(state, batch)
    assert compilations() - before == once  # all of it in the first step
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    assert int(state.step) == 5
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    experts = state.weights["layers"][0]["mlp"]["down_proj"].get_value()
    assert {shard.data.shape[0] for shard in experts.addressable_shards} == {4}
    for moments in (state.optimizer_state[1][0].mu, state.optimizer_state[1][0].nu):
        held = moments["layers"][0]["mlp"]["down_proj"].get_value()
        assert held.sharding.is_equivalent_to(experts.sharding, 3)


def test_validation_gives_the_metrics_of_the_step() -> None:
    model = CausalLM(DENSE, rngs=nnx.Rngs(0))
    loss = NextTokenLoss(model, mesh=make_mesh(2), overlap=overlap(2))
    metrics = jax.jit(loss)(nnx.state(model), tokens())
    expected, _ = plain(DENSE, 8)
    assert metrics.keys() == {"loss", "cross_entropy"}
    np.testing.assert_allclose(metrics["cross_entropy"], expected["cross_entropy"], rtol=1e-5)


def of(devices: int = 1, **options: Any) -> NextTokenLoss:
    with_model = nnx.eval_shape(lambda: CausalLM(SPARSE, rngs=nnx.Rngs(0)))
    return NextTokenLoss(with_model, mesh=make_mesh(devices, **options.pop("mesh", {})), **options)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match="USE_TBO=auto: .* expected 0 or 1"):
        of(overlap=OverlapConfig("auto"))
    with pytest.raises(ValueError, match="strategy 'expert_chunks' .* training expects 'micro_b"):
        of(overlap=OverlapConfig("on", strategy="expert_chunks"))
    with pytest.raises(ValueError, match="2-way tensor parallelism: training expects 1"):
        of(2, mesh={"tensor": 2})
    with pytest.raises(ValueError, match="8 experts cannot be shared equally by 3 devices"):
        of(3)
    with pytest.raises(ValueError, match="unknown transport 'pigeon'"):
        of(2, transport="pigeon")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 4), r"6 sequences .* over 2 device\(s\) with 2 micro-.*: expected a multiple of 4"),
        ((5, 4), r"5 sequences .* over 2 device\(s\) with 2 micro-.*: expected a multiple of 4"),
        ((0, 4), r"0 sequences a step do not divide"),
        ((4, 1), r"tokens of shape \(4, 1\): expected"),
        ((4,), r"tokens of shape \(4,\): expected"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_cut_are_refused(shape: tuple[int, ...], message: str) -> None:
    loss = of(2, overlap=overlap(2))
    weights = nnx.state(nnx.eval_shape(lambda: CausalLM(SPARSE, rngs=nnx.Rngs(0))))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(loss, weights, jax.ShapeDtypeStruct(shape, jnp.int32))
