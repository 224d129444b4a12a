"""Checkpoints that llm-compressor, GPTQModel and AutoAWQ wrote, against what these tools decode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tbo_jax import ModelRunner
from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.quantized.array import QuantizedArray, decoded
from tests.models.parity import CACHE, PREFILL, feed, shuffled_pages

FOLDER = Path(__file__).parents[1] / "golden" / "quantized"
CASES = sorted(path.name for path in FOLDER.iterdir())
KINDS = {"fp8": "fp8", "w8": "int8", "w4": "int4", "gptq": "int4", "awq": "int4"}


def load(name: str, devices: int = 1, tensor: int = 1, **options: Any) -> Any:
    mesh = make_mesh(devices, tensor=tensor)
    return load_model(FOLDER / name, mesh=mesh, dtype=jnp.float32, **options)


def logits_of(model: Any, tokens: list[int], mesh: Any) -> np.ndarray:
    runner = ModelRunner(model, CACHE, mesh=mesh, logits="all")
    pages = shuffled_pages(0, [tokens])
    found, _ = feed(runner, runner.allocate(), PREFILL, [(0, tokens)], pages)
    return np.asarray(found[0][0])


def arrays_of(model: Any) -> dict[tuple[Any, ...], Any]:
    return {p: v.get_raw_value() for p, v in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str) -> None:
    golden = dict(np.load(FOLDER / name / "golden.npz"))
    model = load(name)
    found = logits_of(model, golden["tokens"].tolist(), make_mesh(1))
    expected = golden["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_weights_stay_as_small_as_the_file(name: str) -> None:
    """All matrices of the layers are quantised, and what is held is what the file holds."""
    arrays = arrays_of(load(name))
    matrices = [a for p, a in arrays.items() if p[0] == "layers" and len(a.shape) == 2]
    kind = next(k for prefix, k in KINDS.items() if name.startswith(prefix))
    assert len(matrices) == 7
    assert all(isinstance(a, QuantizedArray) and a.format.kind == kind for a in matrices)
    tensors = TensorFolder.open(FOLDER / name)
    stored = sum(
        tensors.info(t).nbytes for t in tensors.names if ".layers." in t and "norm" not in t
    )
    # Zero points take a byte here and half a byte there; groups of 128 make that 0.8 %.
    assert sum(a.nbytes for a in matrices) <= 1.02 * stored


@pytest.mark.parametrize("name", CASES)
def test_shards_are_those_of_the_whole(name: str) -> None:
    """With tensor parallelism, and decoded while loading."""
    whole = arrays_of(load(name))
    shared = arrays_of(load(name, 2, 2))
    plain = arrays_of(load(name, quantize="none"))
    for path, array in whole.items():
        expected = np.asarray(decoded(array, jnp.float32))
        np.testing.assert_array_equal(decoded(shared[path], jnp.float32), expected, str(path))
        assert not isinstance(plain[path], QuantizedArray)
        np.testing.assert_array_equal(plain[path], expected, str(path))


def test_quantizing_what_is_quantised_is_refused() -> None:
    with pytest.raises(CheckpointError, match="quantize='int8', but config.json has a quantiz"):
        load("w4a16", quantize="int8")


def changed(folder: Path, name: str, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of a case with other options, or other tensors."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(values))
    if tensors:
        path = folder / "model.safetensors"
        save_file(load_file(path) | tensors, path)
    return folder


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "config", "tensors", "message"),
    [
        ("w4a16", {"format": "nvfp4-pack-quantized"}, {}, "format='nvfp4-pack-quantized' is not"),
        ("w4a16", {"kv_cache_scheme": {"num_bits": 8}}, {}, "kv_cache_scheme={'num_bits': 8} is"),
        ("w4a16", {"sparsity_config": {"format": "dense"}}, {}, "sparsity_config={'format': 'd"),
        (
            "w4a16", {}, {Q + "weight_g_idx": np.arange(128, dtype=np.int32)[::-1].copy() // 64},
            "weight_g_idx: groups that follow the activations",
        ),
        (
            "w8a8", {}, {Q + "weight_zero_point": np.ones((128, 1), np.int8)},
            "weight_zero_point of 8 bits is not supported",
        ),
        (
            "w8a8", {}, {Q + "weight_scale": np.ones((128, 3), np.float32)},
            r"weight_scale has shape \[128, 3\], expected one factor of .* one for each output",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, name: str, config: Any, tensors: Any, message: str
) -> None:
    folder = changed(tmp_path, name, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, mesh=make_mesh(1), dtype=jnp.float32)
