"""The small programs around a step, over all ranks: its sampler, and what hands its tokens on.

Options of requests are programs of their own beside the sampler, which thereby is the same one in
every step. A step without options runs none of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.parallel.sharding import RANKS, num_ranks
from tbo_jax.sampling.draw import SamplingInputs, sample
from tbo_jax.sampling.options import (
    OptionInputs,
    RowTables,
    RowUpdate,
    change_logits,
    describe,
    update_rows,
)
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


def compile_tables(mesh: Mesh, table_rows: int, vocab_size: int) -> jax.stages.Compiled:
    """Compile what allocates the `RowTables` of all ranks [R, S, V], zeroed."""
    placed = NamedSharding(mesh, PartitionSpec(RANKS))
    shapes = _stacked(mesh, RowTables.shapes(table_rows, vocab_size))

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=placed).lower().compile(process_options(mesh))


def compile_row_update(
    mesh: Mesh, table_rows: int, vocab_size: int, entries: int
) -> jax.stages.Compiled:
    """Compile `update_rows` for `entries` of each kind: tables, which are donated, and updates."""
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def per_rank(tables, update):
        return _of_all(update_rows(_own(tables), _own(update)))

    tables = _stacked(mesh, RowTables.shapes(table_rows, vocab_size))
    update = _stacked(mesh, RowUpdate.empty(table_rows, entries))
    run = _over_ranks(mesh, per_rank, placed, donate=(0,))
    return run.lower(tables, update).compile(process_options(mesh))


def compile_change(
    mesh: Mesh, rows: int, vocab_size: int, table_rows: int, width: int
) -> jax.stages.Compiled:
    """Compile `change_logits` of `rows` rows a rank.

    Logits [R, B, V], packed `OptionInputs` [R, B, C], padded tokens of the step before [R, W], bias
    and marks of the `RowTables` [R, S, V] -> logits [R, B, V], marks. The marks are donated.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def per_rank(logits, packed, *rest):
        inputs = OptionInputs.unpack(packed[0])
        return _of_all(change_logits(logits[0], inputs, *_own(rest)))

    logits = jax.ShapeDtypeStruct((rows, vocab_size), np.float32)
    before = jax.ShapeDtypeStruct((width,), np.int32)
    tables = RowTables.shapes(table_rows, vocab_size)
    packed = OptionInputs.pack([], rows)
    abstract = _stacked(mesh, (logits, packed, before, tables.bias, tables.marks))
    run = _over_ranks(mesh, per_rank, placed, donate=(4,))
    return run.lower(*abstract).compile(process_options(mesh))


def compile_describe(mesh: Mesh, rows: int, vocab_size: int, most: int) -> jax.stages.Compiled:
    """Compile `describe` of `rows` rows a rank: logits [R, B, V], tokens [R, B] -> [R, B, ...].

    The result is there whole in each of several processes.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))
    whole = NamedSharding(mesh, PartitionSpec()) if jax.process_count() > 1 else placed

    def per_rank(logits, tokens):
        return describe(logits[0], tokens[0], most)[None]

    logits = jax.ShapeDtypeStruct((rows, vocab_size), np.float32)
    abstract = _stacked(mesh, (logits, jax.ShapeDtypeStruct((rows,), np.int32)))
    return _over_ranks(mesh, per_rank, whole).lower(*abstract).compile(process_options(mesh))


def _own(tree):
    """Leaves [1, ...] -> [...]."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _of_all(tree):
    """Leaves [...] -> [1, ...]."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _stacked(mesh: Mesh, tree):
    """Shapes of one rank's leaves [...] -> those of all ranks' [R, ...]."""
    placed, ranks = NamedSharding(mesh, PartitionSpec(RANKS)), num_ranks(mesh)

    def stack(leaf):
        return jax.ShapeDtypeStruct((ranks, *leaf.shape), leaf.dtype, sharding=placed)

    return jax.tree.map(stack, tree)


def _over_ranks(mesh: Mesh, per_rank, outputs, donate: tuple[int, ...] = ()):
    """Jit a function of one rank's leaves [1, ...] over the ranks; `outputs` are its shardings."""
    spec = PartitionSpec(RANKS)
    run = jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    # Explicit: inferred shardings of axes of size one get lost, and the next program would refuse.
    return jax.jit(run, out_shardings=outputs, donate_argnums=donate)
