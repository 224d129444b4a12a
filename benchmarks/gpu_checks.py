"""Whether kernels that benchmarks/gpu.py does not time are right: its part "others"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.dense import dense_causal_attention
from tbo_jax.attention.gpu_flash import GpuFlashAttention
from tbo_jax.attention.gpu_paged import GpuAttention
from tbo_jax.attention.kernel import AttentionShape
from tbo_jax.attention.paged import XlaAttention, write_pages
from tbo_jax.attention.rounded import CACHE_DTYPES, STORED_AS
from tbo_jax.attention.work import AttentionWork, plan_attention
from tbo_jax.layers.stacked_product import StackedMatrix
from tbo_jax.layers.stacked_product import product as stacked
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import apply_experts
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.gpu_experts_grad import DifferentiableGpuExperts
from tbo_jax.moe.kernel import ExpertShape
from tbo_jax.overlap.batch import ForwardBatch
from tbo_jax.quantized import gpu_product
from tbo_jax.quantized.array import Format, QuantizedArray

DTYPE = jnp.bfloat16
FORMATS = {
    "fp8, blocks": Format("fp8", (128, 128)),
    "int8, a factor for each output": Format("int8", (1, 512)),
    "int4, groups of 128": Format("int4", (1, 128)),
    "mxfp4": Format("mxfp4", (1, 32)),
}
Check = Callable[[], tuple[Any, Any]]  # what was found, and what was expected


def others(
    interpret: bool, compare: Callable[[Any, Any], float], update: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Each kernel with its largest difference from XLA.

    Raises:
        AssertionError: kernels are wrong, or do not run. All were tried, and these are named.
    """
    checks = list(_checks(interpret))
    rows: list[dict[str, Any]] = []
    for number, (name, run) in enumerate(checks):
        try:
            found, expected = run()
            rows.append({"what": name, "error": compare(found, expected)})
        except Exception as error:  # whatever it is, the other kernels are tried
            first = (str(error).strip() or "no message").splitlines()[0]
            rows.append({"what": name, "failed": f"{type(error).__name__}: {first}"})
        update(number + 1, len(checks))
    failed = [f"{row['what']}: {row['failed']}" for row in rows if "failed" in row]
    if failed:
        raise AssertionError(f"{len(failed)} of {len(rows)} kernels: {'; '.join(failed)}")
    return rows


def _checks(interpret: bool) -> Iterator[tuple[str, Check]]:
    for name, form in FORMATS.items():
        yield f"product, {name}", _bound(_product, form, interpret)
        yield f"experts, {name}", _bound(_experts, form, interpret)
    yield "product with one of a stack", _bound(_stacked, interpret)
    for dtype in CACHE_DTYPES:
        yield f"attention, cache in {dtype}", _bound(_rounded_attention, dtype, interpret)
    yield "gradients of attention", _bound(_flash, interpret)
    yield "gradients of experts", _bound(_expert_gradients, interpret)


def _bound(run: Callable[..., tuple[Any, Any]], *arguments: Any) -> Check:
    return lambda: run(*arguments)


def _normal(*shape: int, scale: float = 1.0, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(values.astype(np.float32), DTYPE)


def _quantised(form: Format, shape: tuple[int, ...]) -> QuantizedArray:
    """Numbers of a form with factors about 1 / 32."""
    rng = np.random.default_rng(1)
    values: Any = rng.integers(0, 256, form.values_shape(shape), np.uint8)
    factors: Any = rng.uniform(0.5, 1.5, form.scales_shape(shape)).astype(np.float32) / 32
    if form.kind == "fp8":
        values = rng.normal(size=values.shape).astype(ml_dtypes.float8_e4m3fn)
    elif form.kind == "int8":
        values, factors = values.view(np.int8), factors / 64
    elif form.kind == "mxfp4":
        factors = rng.integers(120, 124, factors.shape, np.uint8)
    return QuantizedArray(jnp.asarray(values), jnp.asarray(factors), None, form)


def _product(form: Format, interpret: bool) -> tuple[Any, Any]:
    x, weight = _normal(48, 512), _quantised(form, (256, 512))
    found = jax.jit(lambda x, w: gpu_product.product(x, w, interpret))(x, weight)
    return found, jax.jit(lambda x, w: x.astype(jnp.float32) @ w.decode(jnp.float32).T)(x, weight)


def _experts(form: Format, interpret: bool) -> tuple[Any, Any]:
    hidden, inner, count, rows = 256, 128, 4, 40
    along = form.turned()  # of matrices [in, out]
    matrices = ExpertWeights(
        _quantised(along, (count, hidden, 2 * inner)), _quantised(along, (count, inner, hidden))
    )
    ids, weights = _choices(rows, count)
    shape = ExpertShape(hidden, inner, DTYPE)
    operands = _normal(rows, hidden, scale=0.3), ids, weights, matrices
    return (
        jax.jit(GpuExperts(shape, interpret=interpret))(*operands),
        jax.jit(apply_experts)(*operands),
    )


def _choices(rows: int, count: int) -> tuple[jax.Array, jax.Array]:
    order = np.argsort(np.random.default_rng(2).random((rows, count)), axis=1)
    return jnp.asarray(order[:, :2].astype(np.int32)), jnp.full((rows, 2), 0.5, DTYPE)


def _stacked(interpret: bool) -> tuple[Any, Any]:
    x, stack = _normal(48, 512), _normal(3, 256, 512, scale=512**-0.5, seed=1)
    layer = jnp.int32(1)
    found = jax.jit(lambda x, w: stacked(x, StackedMatrix(w, layer), interpret))(x, stack)
    return found, jax.jit(lambda x, w: x @ w[1].T)(x, stack)


def _rounded_attention(dtype: Any, interpret: bool) -> tuple[Any, Any]:
    """Decode of rows with contexts of several lengths."""
    heads, kv_heads, size, page_size = 8, 2, 64, 16
    contexts = [200, 3, 64, 0]
    shape = AttentionShape(heads, kv_heads, size, DTYPE, cache_dtype=dtype)
    columns = -(-(max(contexts) + 1) // page_size)
    pages = [list(range(1 + row * columns, 1 + (row + 1) * columns)) for row in range(4)]
    batch = ForwardBatch.pack(
        [[1]] * 4, contexts, pages,
        token_capacity=4, sequence_capacity=4, pages_per_sequence=columns,
    )  # fmt: skip
    before = ForwardBatch.pack(
        [[1] * context for context in contexts], [0] * 4, pages,
        token_capacity=sum(contexts), sequence_capacity=4, pages_per_sequence=columns,
    )  # fmt: skip

    def empty(*axes: int, of: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(axes, of), jnp.zeros(axes, of)

    batch, before = (jax.tree.map(jnp.asarray, step) for step in (batch, before))
    count = 1 + 4 * columns
    cache = LayerCache(
        empty(count, page_size, kv_heads * size, of=STORED_AS[dtype]),
        0,
        empty(count, page_size, kv_heads, of=jnp.float32),
    )

    def run(kernel: Any, cache: LayerCache) -> jax.Array:
        for step in (before, batch):
            tokens = step.token_capacity
            keys, values = (_normal(tokens, kv_heads, size, seed=seed) for seed in (3, 4))
            cache = write_pages(cache, keys, values, step)
        work = plan_attention(batch, 1, AttentionWork.zeros(1, 4))
        queries = _normal(4, heads, size)
        return kernel(queries, cache, batch, work, query_block=1, scale=size**-0.5)

    kernels = GpuAttention(shape, interpret=interpret), XlaAttention(shape)
    found, expected = (jax.jit(lambda cache, k=kernel: run(k, cache))(cache) for kernel in kernels)
    return found, expected


def _flash(interpret: bool) -> tuple[Any, Any]:
    """Result and all gradients, one after another in one array."""
    heads, kv_heads, size, length = 4, 2, 64, 160
    operands = [_normal(2 * length, n, size, seed=n) for n in (heads, kv_heads, kv_heads)]
    kernel = GpuFlashAttention(AttentionShape(heads, kv_heads, size, DTYPE), interpret=interpret)

    def run(attend: Any) -> jax.Array:
        def out(*operands: jax.Array) -> jax.Array:
            return attend(*operands, length=length, scale=size**-0.5)

        found, transpose = jax.vjp(out, *operands)
        return _joined(found, *transpose(_normal(*found.shape, seed=9)))

    return jax.jit(lambda: run(kernel))(), jax.jit(lambda: run(dense_causal_attention))()


def _expert_gradients(interpret: bool) -> tuple[Any, Any]:
    hidden, inner, count, rows = 128, 64, 4, 40
    ids, weights = _choices(rows, count)
    kernel = DifferentiableGpuExperts(ExpertShape(hidden, inner, DTYPE), interpret=interpret)
    arrays = (
        _normal(rows, hidden),
        weights,
        _normal(count, hidden, 2 * inner, scale=hidden**-0.5),
        _normal(count, inner, hidden, scale=inner**-0.5),
    )

    def run(experts: Any) -> jax.Array:
        def out(x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return experts(x, ids, weights, ExpertWeights(up, down))

        found, transpose = jax.vjp(out, *arrays)
        return _joined(found, *transpose(_normal(*found.shape, seed=9)))

    return jax.jit(lambda: run(kernel))(), jax.jit(lambda: run(apply_experts))()


def _joined(*arrays: jax.Array) -> jax.Array:
    """All numbers in one array, of each array as parts of its largest."""
    flat = (a.astype(jnp.float32).reshape(-1) for a in arrays)
    return jnp.concatenate([a / jnp.abs(a).max() for a in flat])
