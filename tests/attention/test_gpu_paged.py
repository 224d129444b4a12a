"""The GPU kernel, interpreted on CPU, against a full softmax per sequence in numpy."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tbo_jax import ForwardBatch
from tbo_jax.attention import gpu_paged
from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.paged import write_pages
from tbo_jax.attention.work import AttentionWork
from tests.attention import ragged
from tests.attention.ragged import (
    Case,
    Shape,
    case_of,
    mixes,
    reference,
    with_mask,
    without_unseen,
)
from tests.gpu_lowering import lower_for_gpu

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclasses.dataclass(frozen=True)
class Options(ragged.Options):
    """Of the kernel."""

    query_block: int = 1
    splits: int = 1


@cache
def compiled(shape: Shape, options: Options, entries: int = 0) -> Any:
    """One layer's write and read: batch, cache, queries, keys, values -> output."""

    def attend(batch, cache, queries, keys, values):
        # The work arrays are longer than needed and hold what an earlier step left there.
        old = AttentionWork(*(jnp.full(shape.tokens + 3, 4321, jnp.int32) for _ in range(5)))
        kernel = GpuAttention(shape.attention, interpret=True)
        return kernel(
            queries,
            write_pages(cache, keys, values, batch),
            batch,
            kernel.plan(batch, options.query_block, old),
            query_block=options.query_block,
            scale=shape.scale,
            **options.arguments(shape.heads),
        )

    case = case_of(shape, [], [], 0)
    case = with_mask(case, entries, 0) if entries else case
    least = shape.longest // options.splits
    many = dict(PROGRAMS=10**6, LATENT_PROGRAMS=10**6)
    with mock.patch.multiple(gpu_paged, **many, LEAST_KEYS=least):
        return (
            jax.jit(attend)
            .lower(case.batch, case.cache, case.queries, case.keys, case.values)
            .compile({"xla_backend_optimization_level": "0"})
        )


def check(case: Case, options: Options, entries: int = 0) -> None:
    run = compiled(case.shape, options, entries)
    out = run(case.batch, case.cache, case.queries, case.keys, case.values)
    assert out.dtype == case.shape.dtype
    found, count = np.asarray(out).astype(np.float32), len(case.slots)
    tolerance = TOLERANCE[out.dtype.name]
    expected = reference(case, options)
    np.testing.assert_allclose(found[:count], expected, atol=tolerance, rtol=tolerance)
    assert not found[count:].any()


SMALL = dict(tokens=12, rows=3)
# Rows of up to 160 keys: more than two blocks of 64.
SHAPES = {
    "group 1": Shape(2, 2, 64, page_size=16, pages_per_row=10, **SMALL),
    "group 2": Shape(4, 2, 64, page_size=64, pages_per_row=3, **SMALL),
    "group 3": Shape(6, 2, 80, page_size=16, pages_per_row=10, **SMALL),
    "group 4": Shape(8, 2, 128, page_size=4, pages_per_row=40, **SMALL),
    "bfloat16": Shape(8, 2, 128, jnp.bfloat16, page_size=16, pages_per_row=10, **SMALL),
    "float32, 256": Shape(4, 1, 256, page_size=16, pages_per_row=10, **SMALL),
    "bfloat16, 256": Shape(8, 1, 256, jnp.bfloat16, page_size=64, pages_per_row=3, **SMALL),
    # 70 heads are two programs of 35, 129 are three of 43.
    "group 70": Shape(140, 2, 16, page_size=16, pages_per_row=10, **SMALL),
    "latent": Shape(4, 1, 56, page_size=16, pages_per_row=10, value_dim=40, **SMALL),
    "latent, group 129": Shape(
        129, 1, 80, jnp.bfloat16, page_size=64, pages_per_row=3, value_dim=64, **SMALL
    ),
}
OPTIONS = {
    "blocks of queries": Options(query_block=8),
    "split": Options(splits=4),
    "split blocks": Options(query_block=5, splits=3),
    "window": Options(query_block=4, window=5),
    "split window": Options(window=70, splits=4),
    "sinks": Options(query_block=8, with_sinks=True),
    "split window, sinks": Options(window=70, splits=4, with_sinks=True),
}
PAIRS = [
    ("group 1", "blocks of queries"),
    ("group 2", "split"),
    ("group 3", "split blocks"),
    ("group 4", "split window"),
    ("group 4", "window"),
    ("bfloat16", "window"),
    ("bfloat16, 256", "split"),
    ("float32, 256", "blocks of queries"),
    ("group 70", "window"),
    ("group 70", "blocks of queries"),  # nine programs of 8 heads and 8 queries
    ("latent", "split blocks"),
    ("latent, group 129", "split"),
    ("group 3", "sinks"),
    ("group 1", "split window, sinks"),
]


@pytest.mark.parametrize(("shape", "options"), PAIRS)
@few
@given(st.data())
def test_ragged_batches_equal_the_full_softmax(
    shape: str, options: str, data: st.DataObject
) -> None:
    lengths, contexts = data.draw(mixes(SHAPES[shape]))
    seed, layer = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0, 1]))
    check(case_of(SHAPES[shape], lengths, contexts, seed, layer), OPTIONS[options])


@pytest.mark.parametrize("options", ["window", "split window"])
def test_what_is_before_the_window_may_be_anything(options: str) -> None:
    """These pages are given up, and others may write NaN to them."""
    window = OPTIONS[options].window
    assert window is not None
    for seed, mix in enumerate([([1, 7, 1], [150, 64, 0]), ([3, 8], [100, 140])]):
        case = case_of(SHAPES["group 4"], *mix, seed, layer=seed % 2)
        check(without_unseen(case, window), OPTIONS[options])


@pytest.mark.parametrize(
    ("shape", "options", "entries"),
    [
        ("group 2", "blocks of queries", 2),
        ("group 3", "split window, sinks", 2),
        ("latent", "split blocks", 2),
        ("group 1", "window", 1),
    ],
)
def test_mask_offsets_say_what_a_token_sees(shape: str, options: str, entries: int) -> None:
    for seed, mix in enumerate([([1, 7, 3], [100, 64, 0]), ([12], [50]), ([2, 0, 9], [0, 3, 70])]):
        case = case_of(SHAPES[shape], *mix, seed, layer=seed % 2)
        check(with_mask(case, entries, seed), OPTIONS[options], entries)


@pytest.mark.parametrize(("shape", "options"), PAIRS)
def test_decode_rows_beside_a_chunk(shape: str, options: str) -> None:
    room = SHAPES[shape].longest
    check(case_of(SHAPES[shape], [1, 7, 1], [room - 1, 64, 0], 1, layer=1), OPTIONS[options])


def test_large_scores_do_not_overflow() -> None:
    case = case_of(SHAPES["group 2"], [3, 1], [140, 170], 6)
    case = dataclasses.replace(case, queries=case.queries * np.float32(300))
    run = compiled(case.shape, OPTIONS["split"])
    out = run(case.batch, case.cache, case.queries, case.keys, case.values)
    np.testing.assert_allclose(out[:4], reference(case), atol=1e-3)


@pytest.mark.parametrize(
    ("programs", "context", "splits"),
    [(1, 100, 1), (1, 4096, 8), (128, 4096, 4), (512, 4096, 1), (2000, 4096, 1), (4, 131072, 128)],
)
def test_few_rows_with_long_contexts_are_split(programs: int, context: int, splits: int) -> None:
    assert gpu_paged.num_splits(programs, context, gpu_paged.PROGRAMS) == splits


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "reason"),
    [
        (64, None, None),
        (256, None, None),
        (8, None, "head size 8 is no multiple of 8 from 16 to 256"),
        (100, None, "head size 100 is no multiple"),
        (512, None, "head size 512 is no multiple"),
        (576, 512, None),
        (320, 256, None),
        (576, 528, "latent keys of 528 + 48 elements are not"),
        (640, 576, "latent keys of 576 + 64 elements are not a multiple of 8 of 16 to 512 + 16 to"),
        (576, 384, "latent keys of 384 + 192 elements are not"),
        (68, 48, "latent keys of 48 + 20 elements are not"),
    ],
)
def test_unsupported(head_dim: int, value_dim: int | None, reason: str | None) -> None:
    shape = AttentionShape(8, 1, head_dim, jnp.bfloat16, value_dim)
    found = GpuAttention.unsupported(shape)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        (16, 64, jnp.bfloat16),
        (64, 1, jnp.float32),
        (80, 8, jnp.bfloat16),
        (96, 3, jnp.float32),
        (128, 8, jnp.bfloat16),
        (256, 2, jnp.bfloat16),
        (256, 8, jnp.float32),
    ],
)
def test_lowers_for_a_gpu(head_dim: int, group: int, dtype: Any) -> None:
    """Triton takes the shapes of all blocks: of decode, of drafts to verify, and of prefill."""
    shape = Shape(2 * group, 2, head_dim, dtype, pages_per_row=4, **SMALL)
    for query_block in (1, 4, GpuAttention(shape.attention).query_block):
        lower_for_gpu(*abstract_call(shape, query_block))


@pytest.mark.parametrize(("heads", "dtype"), [(128, jnp.bfloat16), (64, jnp.float32)])
def test_latent_attention_lowers_for_a_gpu(heads: int, dtype: Any) -> None:
    """The sizes of DeepSeek-V3 and Kimi-K2."""
    shape = Shape(heads, 1, 576, dtype, pages_per_row=4, value_dim=512, **SMALL)
    lower_for_gpu(*abstract_call(shape, GpuAttention(shape.attention).query_block))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "dtype", "most"),
    [
        (128, 1, 576, 512, jnp.bfloat16, 64),
        (128, 1, 576, 512, jnp.float32, 32),
        (16, 2, 256, None, jnp.float32, 32),
        (16, 2, 256, None, jnp.bfloat16, 64),
        (16, 2, 128, None, jnp.float32, 64),
    ],
)
@pytest.mark.parametrize("query_block", [1, 2, 4, 8, 16, None])
def test_rows_of_a_program_are_bounded(
    heads: int, kv_heads: int, head_dim: int, value_dim: int | None, dtype: Any, most: int,
    query_block: int | None,
) -> None:  # fmt: skip
    """Shared memory is: 4 queries of 64 heads of latent pages asked for 348,672 bytes."""
    shape = Shape(heads, kv_heads, head_dim, dtype, pages_per_row=4, value_dim=value_dim, **SMALL)
    block = query_block or GpuAttention(shape.attention).query_block
    with mock.patch.object(gpu_paged, "_kernel", wraps=gpu_paged._kernel) as kernel:
        call, arguments = abstract_call(shape, block)
        jax.eval_shape(call, *arguments)
    assert gpu_paged.SMALLEST_ROWS <= kernel.call_args.kwargs["rows"] <= most


@pytest.mark.parametrize("entries", [1, 2])
def test_mask_offsets_lower_for_a_gpu(entries: int) -> None:
    shape = Shape(16, 2, 128, jnp.bfloat16, pages_per_row=4, **SMALL)
    lower_for_gpu(*abstract_call(shape, 8, entries=entries))


def abstract_call(
    shape: Shape, query_block: int, pages: int | None = None, entries: int = 0
) -> tuple[Any, Any]:
    """A call of the kernel, with shapes for arguments."""
    one = jax.ShapeDtypeStruct(
        (pages or shape.pages, shape.page_size, shape.kv_heads * shape.head_dim), shape.dtype
    )
    batch = ForwardBatch.pack(
        [], [], [],
        token_capacity=shape.tokens, sequence_capacity=shape.rows,
        pages_per_sequence=shape.pages_per_row,
        mask_offsets=np.zeros(entries * shape.tokens, np.int32) if entries else None,
    )  # fmt: skip
    arguments = (
        jax.ShapeDtypeStruct((shape.tokens, shape.heads, shape.head_dim), shape.dtype),
        LayerCache((one,) if shape.value_dim else (one, one), np.int32(0)),
        batch,
        AttentionWork.zeros(1, shape.tokens),
    )

    def call(queries, cache, batch, work):
        return GpuAttention(shape.attention)(
            queries, cache, batch, work, query_block=query_block, scale=shape.scale
        )

    return call, arguments
