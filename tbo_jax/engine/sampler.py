"""The compiled sampler of a step, over all ranks."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.sampling import SamplingInputs, sample
from tbo_jax.sharding import RANKS


def compile_sampler(mesh: Mesh, rows: int, vocab_size: int) -> jax.stages.Compiled:
    """Compile the sampler of `rows` rows a rank: logits [R, B, V], inputs -> tokens [R, B]."""
    spec = PartitionSpec(RANKS)
    placed = NamedSharding(mesh, spec)

    def per_rank(logits, inputs):
        return sample(logits[0], jax.tree.map(lambda leaf: leaf[0], inputs))[None]

    run = jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    idle = SamplingInputs.from_rows([], [], [], rows)
    example = jax.tree.map(lambda leaf: np.stack([leaf] * mesh.size), idle)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed),
        (jax.ShapeDtypeStruct((mesh.size, rows, vocab_size), np.float32), example),
    )
    return jax.jit(run).lower(*abstract).compile()
