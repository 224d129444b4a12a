"""The Mosaic GPU kernel, interpreted on CPU, against a full softmax per sequence in numpy."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.attention import gpu_mosaic
from tbo_jax.attention.gpu_mosaic import NAME, MosaicAttention
from tbo_jax.attention.kernel import AttentionLoad, AttentionShape
from tbo_jax.attention.paged import write_pages
from tbo_jax.attention.work import AttentionWork
from tests.attention import ragged
from tests.attention.ragged import Case, Shape, case_of, reference, without_unseen
from tests.gpu_code import lower, needs_compiler
from tests.gpu_lowering import lower_for_gpu


@dataclasses.dataclass(frozen=True)
class Options(ragged.Options):
    """Of the kernel."""

    query_block: int = 1
    splits: int = 1


@cache
def compiled(shape: Shape, options: Options) -> Any:
    """One layer's write and read: batch, cache, queries, keys, values -> output."""

    def attend(batch, cache, queries, keys, values):
        # The work arrays are longer than needed and hold what an earlier step left there.
        old = AttentionWork(*(jnp.full(shape.tokens + 3, 4321, jnp.int32) for _ in range(5)))
        kernel = MosaicAttention(shape.attention, interpret=True)
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
    with mock.patch.object(gpu_mosaic, "num_splits", return_value=options.splits):
        return jax.jit(attend).lower(*arguments(case)).compile()


def arguments(case: Case) -> tuple[Any, ...]:
    return case.batch, case.cache, case.queries, case.keys, case.values


def check(case: Case, options: Options) -> None:
    out = compiled(case.shape, options)(*arguments(case))
    assert out.dtype == case.shape.dtype
    found, count = np.asarray(out).astype(np.float32), len(case.slots)
    np.testing.assert_allclose(found[:count], reference(case, options), atol=2e-2, rtol=2e-2)
    assert not found[count:].any()


SMALL: dict[str, Any] = dict(tokens=6, rows=3, dtype=jnp.bfloat16)
SHAPES = {
    "group 1": Shape(2, 2, 64, page_size=16, pages_per_row=10, **SMALL),
    "group 3": Shape(6, 2, 64, page_size=64, pages_per_row=3, **SMALL),
    "group 8": Shape(16, 2, 128, page_size=16, pages_per_row=10, **SMALL),
    "group 70": Shape(70, 1, 64, page_size=32, pages_per_row=5, **SMALL),
}
QUICK = [
    ("group 8", Options()),
    ("group 8", Options(query_block=4, window=70, splits=3, with_sinks=True)),
]
CASES = [
    ("group 8", Options(query_block=8)),
    ("group 1", Options(query_block=64, with_sinks=True)),
    ("group 3", Options(splits=2)),
    ("group 70", Options(query_block=2, window=5)),
    ("group 70", Options(with_sinks=True)),
]


@pytest.mark.parametrize(
    ("shape", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_ragged_batches_equal_the_full_softmax(shape: str, options: Options) -> None:
    """Empty rows, odd contexts; NaN wherever nothing was written."""
    room = SHAPES[shape].longest
    for seed, mix in enumerate([([1, 4, 1], [room - 1, 64, 0]), ([0, 6], [5, 130]), ([], [])]):
        check(case_of(SHAPES[shape], *mix, seed, layer=seed % 2), options)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4])
def test_what_is_before_the_window_may_be_anything(splits: int) -> None:
    """These pages are given up, and others may write NaN to them."""
    options = Options(query_block=4, window=70, splits=splits)
    case = without_unseen(case_of(SHAPES["group 8"], [1, 4, 1], [150, 64, 0], 0), 70)
    check(case, options)


def test_a_page_that_tiles_do_not_divide_is_refused() -> None:
    shape = dataclasses.replace(SHAPES["group 8"], page_size=12)
    with pytest.raises(ValueError, match=r"pages of 8, 16, 32 or a multiple of 64 .*, got 12"):
        compiled(shape, Options())


@pytest.mark.parametrize(
    ("shape", "capability", "reason"),
    [
        (AttentionShape(8, 1, 128, jnp.bfloat16), "9.0", None),
        (AttentionShape(8, 1, 128, jnp.bfloat16), "8.0", "8.0 has no wgmma"),
        (AttentionShape(8, 1, 128, jnp.bfloat16), "10.0", "10.0 has no wgmma"),
        (AttentionShape(8, 1, 80, jnp.bfloat16), None, "head size 80 is neither 64 nor 128"),
        (AttentionShape(8, 1, 256, jnp.bfloat16), None, "head size 256 is neither"),
        (AttentionShape(8, 1, 128, jnp.float32), None, "rounds float32 to 10 bits"),
        (AttentionShape(8, 1, 576, jnp.bfloat16, 512), None, "latent"),
        (AttentionShape(8, 1, 128, jnp.bfloat16, masked=True), None, "mask offsets"),
    ],
)
def test_unsupported(shape: AttentionShape, capability: str | None, reason: str | None) -> None:
    device = mock.Mock(compute_capability=capability)
    found = MosaicAttention.unsupported(shape, device)
    assert found is None if reason is None else reason in str(found)


def test_all_rows_of_a_product_are_counted() -> None:
    """Of 64 rows decode fills 8 and prefill all."""
    kernel = MosaicAttention(AttentionShape(32, 4, 128, jnp.bfloat16))
    for decode, padded in ((True, 8), (False, 1)):
        load = AttentionLoad(tokens=64, context=1000, seen=1000, decode=decode)
        ((operations, _),) = kernel.expected_work(load).values()
        pairs = 64 * 1000 / (1 if decode else 2)
        assert operations == 4 * pairs * 32 * 128 * padded


def abstract_call(shape: Shape, query_block: int, window: int | None) -> tuple[Any, Any]:
    """A call of the kernel, and the shapes of its arguments."""
    case = case_of(shape, [], [], 0)
    work = AttentionWork.zeros(1, shape.tokens)

    def call(queries, cache, batch, work):
        kernel = MosaicAttention(shape.attention)
        return kernel(
            queries, cache, batch, work, query_block=query_block, scale=0.1, sliding_window=window
        )

    return call, (case.queries, case.cache, case.batch, work)


MODELS = [(32, 4, 128), (64, 8, 64), (70, 1, 64)]


@pytest.mark.parametrize("query_block", [1, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [MODELS[0], *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in MODELS[1:])],
)
def test_lowers_for_a_gpu(heads: int, kv_heads: int, head_dim: int, query_block: int) -> None:
    """With the layouts of all values, and shared memory that a multiprocessor has."""
    shape = Shape(heads, kv_heads, head_dim, jnp.bfloat16, tokens=64, rows=4, pages_per_row=64)
    text = lower_for_gpu(*abstract_call(shape, query_block, 512))
    assert "mosaic_gpu" in text and "triton" not in text


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("query_block", [1, 8])
def test_compiles_for_hopper_and_copies_nothing(query_block: int) -> None:
    """The kernel is of Hopper's instructions; without splits nothing is held beside the result."""
    shape = Shape(32, 4, 128, jnp.bfloat16, tokens=128, rows=128, pages_per_row=4)
    program = lower(*abstract_call(shape, query_block, None), "9.0").compile()
    text = program.as_text() or ""
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in text
    assert f"{NAME}/" in text  # by which the schedule report knows it
    assert " copy(" not in text and " pad(" not in text
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= 1.1 * memory.output_size_in_bytes
