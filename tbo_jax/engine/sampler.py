"""The small programs beside a step, over all ranks.

Options of requests are programs of their own, after which the tokens are sampled again. So the step
is the same one with and without them, and one without options runs none of these programs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbo_jax.engine.row_state import (
    RowChanges,
    RowState,
    SampledSteps,
    StepInputs,
    change_rows,
    needed_again,
    sample_again,
    sampled_rows,
)
from tbo_jax.parallel.sharding import RANKS, num_ranks
from tbo_jax.sampling.masks import mask_logits
from tbo_jax.sampling.options import (
    OptionInputs,
    RowTables,
    RowUpdate,
    change_logits,
    describe,
    update_rows,
)
from tbo_jax.step.compiler_options import process_options
from tbo_jax.step.shapes import Bucket


def compile_change_rows(
    mesh: Mesh, program: SampledSteps, count: int
) -> tuple[jax.stages.Compiled, RowState]:
    """Compile `change_rows` for `count` rows a rank: (state, changes) -> state.

    Returns:
        The program, and a state of zeros on the devices.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))
    state = program.state_shapes
    changes = RowChanges.shapes(count, state)

    def per_rank(state, changes):
        return _of_all(change_rows(_own(state), _own(changes)))

    shapes = _stacked(mesh, state)
    run = _over_ranks(mesh, per_rank, placed).lower(shapes, _stacked(mesh, changes))
    return run.compile(process_options(mesh)), _compile_zeros(mesh, shapes)()


def compile_sample_again(
    mesh: Mesh, program: SampledSteps, bucket: Bucket, vocab_size: int
) -> jax.stages.Compiled:
    """Compile `sample_again`: (state, inputs, logits [R, L, V], drafts [R, B, D] where there are
    any) -> `SampledStep`.

    It does not depend on the token slots of the bucket.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))
    whole = _read_by_host(mesh)

    def per_rank(*given):
        return _of_all(sample_again(bucket, *_own(given)))

    state = program.state_shapes
    inputs = needed_again(StepInputs.shapes(bucket, program.cache))
    logits = jax.ShapeDtypeStruct((sampled_rows(bucket), vocab_size), np.float32)
    run = _over_ranks(mesh, per_rank, program.placed(bucket, placed, whole))
    given = [state, inputs, logits]
    if bucket.drafts:
        given.append(jax.ShapeDtypeStruct((bucket.sequences, bucket.drafts), np.int32))
    return run.lower(*_stacked(mesh, given)).compile(process_options(mesh))


def compile_tables(mesh: Mesh, table_rows: int, vocab_size: int) -> jax.stages.Compiled:
    """Compile what allocates the `RowTables` of all ranks [R, S, V], zeroed."""
    return _compile_zeros(mesh, _stacked(mesh, RowTables.shapes(table_rows, vocab_size)))


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

    Logits [R, B, V], packed `OptionInputs` [R, B, C], tokens of the step before [R, W], bias
    and marks of the `RowTables` [R, S, V] -> logits [R, B, V], marks. The marks are donated.
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def per_rank(logits, packed, *rest):
        inputs = OptionInputs.unpack(packed[0])
        return _of_all(change_logits(logits[0], inputs, *_own(rest)))

    logits = jax.ShapeDtypeStruct((rows, vocab_size), np.float32)
    before = jax.ShapeDtypeStruct((width,), np.int32)
    tables = RowTables.shapes(table_rows, vocab_size)
    packed = OptionInputs.pack({}, rows)
    abstract = _stacked(mesh, (logits, packed, before, tables.bias, tables.marks))
    run = _over_ranks(mesh, per_rank, placed, donate=(4,))
    return run.lower(*abstract).compile(process_options(mesh))


def compile_describe(mesh: Mesh, rows: int, vocab_size: int, most: int) -> jax.stages.Compiled:
    """Compile `describe` of `rows` rows a rank: logits [R, B, V], tokens [R, B] -> [R, B, ...].

    The result is there whole in each of several processes.
    """
    whole = _read_by_host(mesh)

    def per_rank(logits, tokens):
        return describe(logits[0], tokens[0], most)[None]

    logits = jax.ShapeDtypeStruct((rows, vocab_size), np.float32)
    chosen = jax.ShapeDtypeStruct((num_ranks(mesh), rows), np.int32, sharding=whole)
    abstract = _stacked(mesh, logits), chosen
    return _over_ranks(mesh, per_rank, whole).lower(*abstract).compile(process_options(mesh))


def compile_mask(mesh: Mesh, rows: int, vocab_size: int) -> jax.stages.Compiled:
    """Compile `mask_logits` of `rows` rows a rank.

    Logits [R, B, V], allowed [R, B, ceil(V / 32)] int32 -> logits [R, B, V].
    """
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def per_rank(logits, allowed):
        return mask_logits(logits[0], allowed[0])[None]

    logits = jax.ShapeDtypeStruct((rows, vocab_size), np.float32)
    allowed = jax.ShapeDtypeStruct((rows, -(-vocab_size // 32)), np.int32)
    abstract = _stacked(mesh, (logits, allowed))
    return _over_ranks(mesh, per_rank, placed).lower(*abstract).compile(process_options(mesh))


def _compile_zeros(mesh: Mesh, shapes) -> jax.stages.Compiled:
    """Compile what allocates leaves [R, ...] of zeros on their ranks."""
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=placed).lower().compile(process_options(mesh))


def _read_by_host(mesh: Mesh) -> NamedSharding:
    """Where outputs [R, ...] are that the host reads: whole in each of several processes."""
    return NamedSharding(mesh, PartitionSpec() if jax.process_count() > 1 else PartitionSpec(RANKS))


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
