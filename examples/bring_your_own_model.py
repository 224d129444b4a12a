"""Bring a Flax decoder of your own under two-batch overlap.

    python examples/bring_your_own_model.py            # 4 CPU devices
    USE_TBO=1 python examples/bring_your_own_model.py

Below is an ordinary mixture-of-experts block. Written in one `__call__` it would read

    x = x + attention(norm(x))
    message = pack(route(norm(x)))      # who goes where
    received = all_to_all(message)      # everybody waits
    results = experts(received)
    returned = all_to_all(results)      # everybody waits
    x = x + unpack(returned)

To overlap it, cut the method where it communicates. What stands before a communication becomes
the compute of a stage, the communication its second half, and what follows the last one `merge`.
`run_layers` does the rest: with one micro-batch it runs the block as written, with two it runs
A.attend, B.attend, A.experts, B.experts, ... so that each all-to-all of A travels while B computes.

Split what one device holds, inside `jax.shard_map`, as `Decoder.__call__` does. A split outside of
it, along an axis that is sharded, would give each micro-batch to half of the devices, and move it.

A stage may write into its layer: a dropout's count, batch statistics, `sow`, any `nnx.Variable`.
`run_layers` keeps it, and micro-batch B sees what A wrote. Inside `jax.jit` or `jax.shard_map` the
layers are copies, so return `nnx.state(model)` from there if you want to have it. Layers in a
`StackedLayers` keep what a stage writes into variables that they have from the start.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from tbo_jax import (
    RANKS,
    ExpertWeights,
    OverlapConfig,
    Stage,
    apply_experts,
    make_exchange,
    make_mesh,
    run_layers,
    top_k_softmax,
)

DEVICES, VOCABULARY, WIDTH, EXPERTS, LAYERS = 4, 256, 64, 8, 3


class Block(nnx.Module):
    """Attention and experts. `x` is [B, S, D]; the context is the exchange between devices."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, 2 * WIDTH)), experts=True)
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, WIDTH)), experts=True)

    def attend_and_route(self, x, received, cache, exchange, arrived):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        tokens = self.norm2(x).reshape(-1, WIDTH)
        weights, experts = top_k_softmax(self.router(tokens), 2, renormalize=True)
        message, places = exchange.pack(tokens, experts, weights, arrived)
        return (x, places), message, cache

    def run_experts(self, carry, received, cache, exchange):
        rows, experts, weights = exchange.unpack(received)
        matrices = ExpertWeights(self.gate_up[...], self.down[...])
        results = apply_experts(rows, experts, weights, matrices)
        return carry, exchange.pack_results(results, received), cache

    def merge(self, carry, received, exchange):
        x, places = carry
        return x + exchange.unpack_results(received, places).reshape(x.shape)

    stages = (
        Stage(
            attend_and_route,
            lambda message, exchange: exchange.dispatch(message),
            announces=True,  # with a ragged exchange, how much it will send
        ),
        Stage(run_experts, lambda message, exchange: exchange.combine(message)),
    )


class Decoder(nnx.Module):
    """Embedding, blocks, projection to the vocabulary."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array, exchange, num_micro_batches: int) -> jax.Array:
        """[B, S] -> logits [B, S, V]; the batch is cut into micro-batches of whole sequences."""
        parts = jnp.split(self.embed(tokens), num_micro_batches)
        hidden, _ = run_layers(self.blocks, parts, [exchange] * num_micro_batches)
        return self.embed.attend(jnp.concatenate(hidden))


def make_forward(model: Decoder, mesh: jax.sharding.Mesh, num_micro_batches: int):
    """`(weights, tokens) -> logits` over the mesh: sequences and experts sharded, the rest not."""
    graph, state = nnx.split(model)
    specs = jax.tree.map(
        lambda p: P(RANKS) if p.get_metadata().get("experts") else P(),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, P(RANKS)),
        out_specs=P(RANKS),
    )
    def forward(state, tokens):
        exchange = make_exchange(
            "all_to_all", axis=RANKS, num_devices=mesh.size, num_experts=EXPERTS, top_k=2
        )
        return nnx.merge(graph, state)(tokens, exchange, num_micro_batches)

    return forward, state


def main() -> None:
    overlap = OverlapConfig.from_env()
    if overlap.mode == "auto":
        raise SystemExit("USE_TBO=auto: the engine decides that when it warms up; expected 0 or 1")
    if overlap.strategy == "expert_chunks":
        raise SystemExit(
            "USE_TBO=expert_chunks: these blocks have no chunked stage; expected 0 or 1"
        )
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = make_mesh()
    model = Decoder(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (mesh.size * 4, 32), 0, VOCABULARY)
    plain, weights = make_forward(model, mesh, 1)
    expected = plain(weights, tokens)
    count = overlap.micro_batches(tokens.size // mesh.size)
    forward, weights = make_forward(model, mesh, count)
    logits = forward(weights, tokens)
    error = float(jnp.abs(logits - expected).max())
    barriers = forward.lower(weights, tokens).as_text().count("optimization_barrier")
    print(f"{mesh.size} devices, {count} micro-batch(es), {barriers} barriers in the program")
    print(f"largest difference of the logits to one micro-batch: {error:.1e}")


if __name__ == "__main__":
    main()
