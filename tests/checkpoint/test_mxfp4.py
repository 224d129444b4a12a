"""MXFP4 experts: bit for bit the numbers that the format's definition gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.mxfp4 import Mxfp4Weights, decode
from tbo_jax.checkpoint.save import save_model
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.quantized.array import decoded
from tests.golden_cases import DATA

CASE = DATA / "gpt_oss_mxfp4"
NAME = "model.layers.1.mlp.experts.gate_up_proj"


def number(bits: int) -> float:
    """An e2m1 number: sign, two bits of exponent with bias 1, one of fraction."""
    exponent, fraction = bits >> 1 & 3, (bits & 1) / 2
    size = fraction if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 1)
    return -size if bits & 8 else size


def plain(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., G, 16], [..., G] -> [..., 32 * G] float32, one after another."""
    out = []
    for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.reshape(-1).tolist()):
        factor = np.nan if scale == 255 else 2.0 ** (scale - 127)
        for byte in block:
            out += [number(byte & 15) * factor, number(byte >> 4) * factor]
    with np.errstate(over="ignore"):  # 4 and 6 times 2 ** 127
        return np.array(out).astype(np.float32).reshape(*scales.shape[:-1], -1)


def assert_same_bits(found: Any, expected: np.ndarray) -> None:
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    found, expected = (np.where(nan, 0, a).astype(np.float32) for a in (found, expected))
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def test_every_byte_with_every_scale() -> None:
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(16, axis=1)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 16, 16))
    expected = plain(blocks, scales)
    assert_same_bits(decode(blocks, scales), expected)
    finite = expected[np.isfinite(expected)]
    assert_same_bits(finite.astype(jnp.bfloat16).astype(np.float32), finite)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    return load_file(CASE / "model.safetensors")


def weight_of(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    """[E, in, out]."""
    return plain(stored[f"{name}_blocks"], stored[f"{name}_scales"]).swapaxes(1, 2)


SHAPE = 8, 64, 64
PARTS = st.tuples(*(st.tuples(*[st.integers(0, n)] * 2).map(sorted) for n in SHAPE))


@pytest.fixture(scope="module")
def whole(stored: dict[str, np.ndarray]) -> np.ndarray:
    return weight_of(stored, NAME)


@settings(max_examples=30, deadline=None)
@given(PARTS, st.sampled_from([np.float32, jnp.bfloat16]))
def test_any_part(whole: np.ndarray, bounds: list[list[int]], dtype: Any) -> None:
    assert whole.shape == SHAPE
    index = tuple(slice(*pair) for pair in bounds)
    out = np.zeros([stop - start for start, stop in bounds], dtype)
    Mxfp4Weights(TensorFolder.open(CASE)).read_into(NAME, out, index)
    assert_same_bits(out.astype(np.float32), whole[index])


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loaded_experts(stored: dict[str, np.ndarray], devices: int, dtype: Any) -> None:
    """Each device has its share; the gate's columns come first, in the file they take turns."""
    model = load_model(CASE, mesh=make_mesh(devices), dtype=dtype, quantize="none")
    for number, layer in enumerate(model.layers):
        name = f"model.layers.{number}.mlp.experts."
        gate_up = weight_of(stored, f"{name}gate_up_proj")
        halves = np.concatenate([gate_up[..., 0::2], gate_up[..., 1::2]], axis=-1)
        bias = stored[f"{name}gate_up_proj_bias"].astype(np.float32)
        for found, expected in (
            (layer.mlp.gate_up_proj, halves),
            (layer.mlp.down_proj, weight_of(stored, f"{name}down_proj")),
            (layer.mlp.gate_up_bias, np.concatenate([bias[:, 0::2], bias[:, 1::2]], axis=-1)),
            (layer.mlp.down_bias, stored[f"{name}down_proj_bias"]),
        ):
            value = found.get_value()
            assert value.dtype == dtype
            assert value.addressable_shards[0].data.shape[0] * devices == len(expected)
            assert_same_bits(np.asarray(value).astype(np.float32), expected.astype(np.float32))


def test_bytes_of_the_files_are_reported() -> None:
    seen = []
    load_model(
        CASE, mesh=make_mesh(1), dtype=jnp.bfloat16, progress=lambda *done: seen.append(done)
    )
    total = sum(a.nbytes for a in load_file(CASE / "model.safetensors").values())
    assert seen[-1] == (total, total)


def test_a_saved_model_is_not_quantised(tmp_path: Path) -> None:
    model = load_model(CASE, mesh=make_mesh(1), dtype=jnp.bfloat16)
    save_model(model, json.loads((CASE / "config.json").read_text()), tmp_path, jnp.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.bfloat16)
    for one, other in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, again)), strict=True):
        stored = decoded(one[1].get_value(), jnp.bfloat16)
        np.testing.assert_array_equal(stored, other[1].get_value())


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("_scales", None, f"tensor {NAME}_scales is missing"),
        ("_blocks", None, f"tensor {NAME}_blocks is missing"),
        ("_scales", np.float32, f"tensor {NAME}_scales is float32, expected uint8"),
        ("_blocks", np.int8, f"tensor {NAME}_blocks is int8, expected uint8"),
        ("_scales", (8, 64, 1), r"_scales has shape \[8, 64, 1\], expected \[8, 64, 2\]"),
        ("_blocks", (8, 64, 4, 8), r"has shape \[8, 64, 4, 8\], expected \[8, 64, 2, 16\]"),
        ("_blocks", (7, 64, 2, 16), r"has shape \[7, 64, 2, 16\], expected \[8, 64, 2, 16\]"),
    ],
)
def test_broken_pairs(
    tmp_path: Path, stored: dict[str, np.ndarray], suffix: str, change: Any, message: str
) -> None:
    tensors = dict(stored)
    value = tensors.pop(NAME + suffix)
    if isinstance(change, tuple):
        tensors[NAME + suffix] = np.resize(value, change)
    elif change is not None:
        tensors[NAME + suffix] = value.astype(change)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((CASE / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.float32)


def test_experts_that_do_not_divide_into_blocks(tmp_path: Path) -> None:
    config = json.loads((CASE / "config.json").read_text()) | {"intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((CASE / "model.safetensors").read_bytes())
    message = r"down_proj of shape \[8, 24, 64\] does not divide into blocks of 32"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.float32)


def test_blocks_that_the_configuration_does_not_tell_of(tmp_path: Path) -> None:
    config = json.loads((CASE / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((CASE / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj .*are missing"):
        load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.float32)
