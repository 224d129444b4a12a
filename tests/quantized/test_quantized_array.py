"""Quantised arrays against numpy: what they stand for, and products with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import XlaExperts
from tbo_jax.moe.gpu_experts import GpuExperts
from tbo_jax.moe.kernel import ExpertShape
from tbo_jax.quantized import gpu_product
from tbo_jax.quantized.array import (
    Format,
    QuantizedArray,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    times,
    times_each,
)
from tests.moe.stacks import one_by_one
from tests.quantized.arrays import FORMS, decoded_in_numpy, random_array

SHAPE = 3, 256, 512


def error(found: object, expected: np.ndarray) -> float:
    """The largest difference, as a part of the largest element."""
    difference = np.abs(np.asarray(found, np.float64) - expected.astype(np.float64))
    return float(difference.max() / np.abs(expected).max())


def test_every_number_of_each_format() -> None:
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        decode_e4m3(jnp.asarray(bits)), bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    np.testing.assert_array_equal(
        decode_e8m0(jnp.asarray(bits)), bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    np.testing.assert_array_equal(
        decode_e2m1(jnp.asarray(bits[:16])),
        bits[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_decoded(name: str, zeros: bool) -> None:
    for form in (FORMS[name], FORMS[name].turned()):
        array = random_array(form, SHAPE, zeros=zeros and form.kind == "int4", scale=np.float16)
        expected = decoded_in_numpy(array)
        assert array.shape == expected.shape == SHAPE
        np.testing.assert_array_equal(jax.jit(lambda a: a.decode(jnp.float32))(array), expected)
        np.testing.assert_array_equal(array[1].decode(jnp.float32), expected[1])
        rounded = array.decode(jnp.bfloat16)
        np.testing.assert_array_equal(rounded, expected.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_products(name: str, dtype: object) -> None:
    """By XLA both ways round, and by the kernel for GPUs, interpreted."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(37, 512)), dtype)
    zeros = "128" in name
    array = random_array(FORMS[name], SHAPE[1:], zeros=zeros)
    expected = np.asarray(x, np.float64) @ decoded_in_numpy(array).astype(np.float64).T
    within = 2e-6 if dtype == jnp.float32 else 5e-3  # bfloat16 rounds the decoded weights
    assert error(times(x, array, summed=-1), expected) < within
    assert gpu_product.takes(len(x), dtype, array) == (name != "int8, a factor for each output")
    if gpu_product.takes(len(x), dtype, array):
        assert error(gpu_product.product(x, array, interpret=True), expected) < within

    other = random_array(FORMS[name].turned(), SHAPE[:0:-1], zeros=zeros)
    expected = np.asarray(x, np.float64) @ decoded_in_numpy(other).astype(np.float64)
    assert error(times(x, other), expected) < within


@pytest.mark.parametrize("name", [*FORMS, None])
def test_products_of_heads(name: str | None) -> None:
    """With factors that change along what is summed, along the other dimension, along both."""
    x = np.random.default_rng(1).normal(size=(9, 3, 512)).astype(np.float32)
    for summed, shape in ((-1, (3, 128, 512)), (-2, (3, 512, 128))):
        form = FORMS[name or "fp8, blocks"]
        array = random_array(form if summed == -1 else form.turned(), shape)
        matrix = decoded_in_numpy(array)
        axes = "tnk,nrk->tnr" if summed == -1 else "tnk,nkr->tnr"
        expected = np.einsum(axes, x, matrix.astype(np.float64))
        found = times_each(jnp.asarray(x), jnp.asarray(matrix) if name is None else array, summed)
        assert error(found, expected) < 2e-6
        if name is None:
            continue
        for dtype, within in ((jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)):
            rows = jnp.asarray(x, dtype)
            if gpu_product.takes_each(len(x), dtype, array, summed):
                kernel = gpu_product.product_each(rows, array, summed, interpret=True)
                assert kernel.dtype == dtype
                assert error(kernel, expected) < within
            else:
                assert name == "fp8, odd blocks"


@pytest.mark.parametrize("name", ["fp8, blocks", "fp8, odd blocks", "int8, a factor for each output",
                                  "int4, groups of 128", "int4, groups of 32", "mxfp4"])  # fmt: skip
def test_experts(name: str) -> None:
    """Those of XLA and the kernels for GPUs, interpreted, against one expert after another.

    What an expert without rows has is never multiplied: its factors are NaN.
    """
    experts, hidden, width, rows, top_k = 5, 256, 128, 37, 2
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(experts + 1), (rows, 1)), axis=1)[:, :top_k]
    ids = np.where(ids == 3, 5, ids).astype(np.int32)  # nobody chooses 3; 5 is elsewhere
    ids[ids[:, 0] == ids[:, 1], 1] = -1

    def idle(array: QuantizedArray) -> QuantizedArray:
        nothing = 255 if name == "mxfp4" else jnp.nan
        scales = array.scales.at[3].set(nothing)
        return QuantizedArray(array.values, scales, array.zeros, array.format)

    form = FORMS[name].turned()
    gate_up = random_array(form, (experts, hidden, 2 * width), 1, zeros="128" in name)
    down = random_array(form, (experts, width, hidden), 2, zeros="128" in name)
    x = rng.normal(size=(rows, hidden)).astype(np.float32) / 64
    weights = rng.uniform(size=(rows, top_k)).astype(np.float32)
    expected = one_by_one(x, ids, weights, decoded_in_numpy(gate_up), decoded_in_numpy(down))
    shape = ExpertShape(hidden, width, jnp.float32)
    for kernel in (XlaExperts(shape), GpuExperts(shape, interpret=True)):
        found = jax.jit(kernel)(x, ids, weights, ExpertWeights(idle(gate_up), idle(down)))
        assert error(found, expected) < 1e-5


def test_layers_of_a_stack() -> None:
    """Experts of one layer out of those of all, as scanned layers have them."""
    form = FORMS["int4, groups of 32"].turned()
    gate_up, down = random_array(form, (2, 3, 64, 128)), random_array(form, (2, 3, 64, 64), 1)
    whole = ExpertWeights(gate_up, down).of_layer(jnp.int32(1))
    assert whole.num_experts == 3
    own = whole.sliced()
    assert isinstance(own.gate_up, QuantizedArray)
    np.testing.assert_array_equal(own.gate_up.decode(jnp.float32), decoded_in_numpy(gate_up)[1])


def test_shards_have_their_own_factors() -> None:
    array = random_array(FORMS["fp8, a factor for each output"], SHAPE)
    parts = array.with_specs(PartitionSpec(None, "a", "b"))
    assert parts.values == PartitionSpec(None, "a", "b")
    assert parts.scales == PartitionSpec(None, "a", None)  # one along the inputs, on each device


def test_mistakes() -> None:
    array = random_array(FORMS["mxfp4"], SHAPE)
    with pytest.raises(TypeError, match=r"shape \(3, 256, 512\) has no entry \(0, 1\)"):
        array[0, 1]
    with pytest.raises(
        ValueError, match="31 numbers of 4 bits do not fill bytes: expected an even count"
    ):
        Format("mxfp4", (1, 32)).values_shape((4, 31))
