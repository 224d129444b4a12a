"""Checkpoints that tools wrote (tests/golden/make_quantized.py), against what they decode."""

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
from tests.golden_cases import Golden
from tests.models.parity import CACHE, PREFILL, feed, shuffled_pages

FOLDER = Path(__file__).parents[1] / "golden" / "quantized"
ACT_ORDER = "gptq_act_order"
CASES = sorted({path.name for path in FOLDER.iterdir()} - {ACT_ORDER})
KINDS = {
    "fp8": "fp8", "w8": "int8", "w4": "int4", "gptq": "int4", "awq": "int4", "mxfp4": "mxfp4",
}  # fmt: skip


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


SAME_LAYOUT = "awq_autoround", "fp8_modelopt", "fp8_modelopt_channel", "gptq", "mxfp4_modelopt"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SAME_LAYOUT else []) for n in CASES],
)
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
            ACT_ORDER, {"desc_act": False}, {},
            r"g_idx: groups that follow the activations \(desc_act, act-order\) are not supported",
        ),
        (ACT_ORDER, {}, {}, "desc_act=True is not supported, expected False"),
        ("gptq", {"bits": 8}, {}, "bits=8 is not supported, expected 4"),
        ("gptq", {"dynamic": {"-:.*": {}}}, {}, "dynamic={'-:.*': {}} is not supported"),
        ("awq", {"version": "gemv"}, {}, "version='gemv' is not supported, expected 'gemm'"),
        ("fp8_modelopt", {"quant_algo": "W4A16_AWQ"}, {}, "quant_algo='W4A16_AWQ' is not support"),
        ("fp8_modelopt", {"quant_algo": "NVFP4"}, {}, "quant_algo='NVFP4' is not supported"),
        (
            "w8a8", {}, {Q + "pre_quant_scale": np.ones(128, np.float32)},
            "q_proj.pre_quant_scale: inputs that are multiplied before the product",
        ),
        (
            "mxfp4a16", {}, {Q + "weight_scale": np.ones((128, 4), np.float16)},
            "q_proj.weight_scale is float16, expected uint8",
        ),
        (
            "mxfp4a16", {}, {Q + "weight_scale": np.ones((128, 2), np.uint8)},
            r"q_proj.weight_scale has shape \[128, 2\], expected \[128, 4\]",
        ),
        (
            "w8a8", {}, {Q + "weight_zero_point": np.ones((128, 1), np.int8)},
            "weight_zero_point of 8 bits is not supported",
        ),
        (
            "w8a8", {}, {"model.norm.weight_scale": np.ones((), np.float32)},
            r"model.norm.weight_scale: factors of model.norm.weight \[128\], expected a matrix",
        ),
        (
            "w8a8", {}, {Q + "weight_scale": np.ones((128, 3), np.float32)},
            r"weight_scale has shape \[128, 3\], expected one factor of .* one for each output",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    tmp_path: Path, name: str, config: Any, tensors: Any, message: str
) -> None:
    folder = changed(tmp_path, name, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, mesh=make_mesh(1), dtype=jnp.float32)


@pytest.mark.parametrize("form", ["int-quantized", "mxfp4-pack-quantized"])
@pytest.mark.parametrize("suffix", ["_scale", "_packed", ".weight_scale"])
def test_quantised_experts_in_one_tensor_are_refused(
    tmp_path: Path, suffix: str, form: str
) -> None:
    """No tool writes them: llm-compressor takes such experts apart."""
    shutil.copytree(Golden("qwen3_moe").folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    config = json.loads((FOLDER / "w8a8" / "config.json").read_text())["quantization_config"]
    if form != config["format"]:
        config = json.loads((FOLDER / "mxfp4a16" / "config.json").read_text())
        config = config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    tensors: dict[str, np.ndarray] = {}
    for path in tmp_path.glob("model*.safetensors*"):
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        path.unlink()
    experts = {}
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts."
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{base}{i}.{projection}.weight" for i in range(8)]
            experts[projection] = np.stack([tensors.pop(name).T for name in names])
        both = np.concatenate([experts["gate_proj"], experts["up_proj"]], -1)
        tensors[base + "gate_up_proj"] = np.ascontiguousarray(both)
        tensors[base + "down_proj"] = experts["down_proj"]
        tensors[base + "down_proj" + suffix] = np.ones((8, 1, 1), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"down_proj{suffix}: factors of .*down_proj .*, exp"):
        load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.float32)
