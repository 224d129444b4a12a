"""The small programs around a step, over all ranks: its sampler, and what hands its tokens on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.parallel.sharding import RANKS, num_ranks
from tbo_jax.sampling.draw import SamplingInputs, sample
from tbo_jax.step.compiler_options import process_options


def compile_sampler(mesh: Mesh, rows: int, vocab_size: int, width: int) -> jax.stages.Compiled:
    """Compile the sampler of `rows` rows a rank.

    Logits [R, B, V], packed `SamplingInputs` [R, B, 7] -> tokens, padded tokens, the tokens for the
    host. The tokens are int32 [R, B]. Padded with zeros to `width` they are [R, W], so that
    `compile_feed` needs not be told the number of rows. Those for the host are there whole in each
    of several processes. Only they say `NOT_FINITE`: a step that is dispatched ahead gets token 0
    in its place, and what it computes from that is thrown away.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def per_rank(logits, inputs):
        sampled = sample(logits[0], SamplingInputs.unpack(inputs[0]))
        tokens = jnp.maximum(sampled, 0)
        return tokens[None], jnp.pad(tokens, (0, width - rows))[None], sampled[None]

    idle, ranks = SamplingInputs.from_rows([], [], [], rows).packed(), num_ranks(mesh)
    abstract = (
        jax.ShapeDtypeStruct((ranks, rows, vocab_size), np.float32, sharding=placed),
        jax.ShapeDtypeStruct((ranks, *idle.shape), idle.dtype, sharding=placed),
    )
    whole = NamedSharding(mesh, PartitionSpec()) if jax.process_count() > 1 else placed
    outputs = placed, placed, whole
    return _over_ranks(mesh, per_rank, outputs).lower(*abstract).compile(process_options(mesh))


def compile_feed(mesh: Mesh, tokens: int, width: int) -> jax.stages.Compiled:
    """Compile what puts tokens into the next step: ids [R, T], padded tokens [R, W] -> ids [R, T].

    An id below 0, an `unread_token`, is replaced by the token of the row that it names, which the
    host thus needs not know.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def per_rank(ids, sampled):
        return jnp.where(ids < 0, jnp.take(sampled[0], -1 - ids, mode="clip"), ids)

    shapes = (num_ranks(mesh), tokens), (num_ranks(mesh), width)
    abstract = [jax.ShapeDtypeStruct(shape, np.int32, sharding=placed) for shape in shapes]
    return _over_ranks(mesh, per_rank, placed).lower(*abstract).compile(process_options(mesh))


def _over_ranks(mesh: Mesh, per_rank, outputs):
    """Jit a function of one rank's leaves [1, ...] over the ranks; `outputs` are its shardings."""
    spec = PartitionSpec(RANKS)
    run = jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    # Explicit: inferred shardings of axes of size one get lost, and the next program would refuse.
    return jax.jit(run, out_shardings=outputs)
