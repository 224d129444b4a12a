"""Plain checkpoints that are quantised while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tbo_jax.checkpoint.encoding import Encoding
from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.quantizing import LARGEST, QuantizingWeights
from tbo_jax.checkpoint.tensors import TensorFolder
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.quantized.array import QuantizedArray, decoded
from tests.golden_cases import Golden

STEP = {"int8": 1 / 127 / 2, "fp8": 2.0**-4}  # the largest error: of the largest number, of each


def arrays_of(name: str, devices: int = 1, tensor: int = 1, **options: Any) -> dict[Any, Any]:
    mesh = make_mesh(devices, tensor=tensor)
    model = load_model(Golden(name).folder, mesh=mesh, dtype=jnp.float32, **options)
    return {p: v.get_raw_value() for p, v in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_each_number_is_near(name: str, kind: str) -> None:
    """As near as the format allows, for each output; on shards the same numbers as on one device."""
    plain, held = arrays_of(name), arrays_of(name, quantize=kind)
    shared = arrays_of(name, 4, 2, quantize=kind)
    quantised = 0
    for path, array in plain.items():
        found = held[path]
        if not isinstance(found, QuantizedArray):
            np.testing.assert_array_equal(found, array)
            continue
        quantised += 1
        inputs = -1 if found.format.block[1] > 1 else -2
        numbers = np.asarray(found.decode(jnp.float32))
        largest = np.abs(array).max(inputs, keepdims=True)
        error = np.abs(numbers - array)
        allowed = largest if kind == "int8" else np.maximum(np.abs(array), largest * 2.0**-12)
        assert (error <= STEP[kind] * allowed * 1.001).all(), path
        np.testing.assert_array_equal(decoded(shared[path], jnp.float32), numbers)
    assert quantised >= 8 and not any(
        isinstance(held[p], QuantizedArray) for p in held if p[0] in ("embed_tokens", "norm")
    )


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_odd_numbers(tmp_path: Path, kind: Any) -> None:
    """Outputs of zeros, of numbers that are not finite, of the smallest and the largest."""
    rows = np.zeros((5, 6), ml_dtypes.bfloat16)
    rows[1, 2] = np.nan
    rows[2] = ml_dtypes.finfo(ml_dtypes.bfloat16).tiny * np.arange(6)
    rows[3] = ml_dtypes.finfo(ml_dtypes.bfloat16).max / np.array([1, -1, 2, -2, 4, 8])
    rows[4, 5] = -1
    save_file({"w": rows}, tmp_path / "model.safetensors")
    encoding = QuantizingWeights(TensorFolder.open(tmp_path), kind).encoding("w", rows.shape, -1)
    assert isinstance(encoding, Encoding) and encoding.form.block == (1, 6)
    values = np.empty(rows.shape, np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn)
    scales = np.empty((5, 1), np.float32)
    encoding.values.read_into("w", values)
    encoding.scales.read_into("w", scales)
    found = values.astype(np.float32) * scales
    assert not found[0].any() and scales[0] == 1
    assert np.isnan(found[1, 2])  # and it is told to whoever asks for text
    np.testing.assert_allclose(found[2:4], rows[2:4].astype(np.float32), rtol=0.08, atol=2e-38)
    assert scales[4] == pytest.approx(1 / LARGEST[kind]) and found[4, 5] == -1


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="quantize is 'int3': expected one of stored, none, fp8"):
        arrays_of("qwen3", quantize="int3")
