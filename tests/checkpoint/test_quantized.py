"""Block-scaled FP8: bit for bit what a plain product of the whole tensors gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tbo_jax.checkpoint.formats import find_format
from tbo_jax.checkpoint.load import load_model, read_config
from tbo_jax.checkpoint.names import parameter_sources, published_layout
from tbo_jax.checkpoint.quantized import FLOAT8, SCALE, BlockScaledWeights
from tbo_jax.checkpoint.save import save_model
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import DATA

CASE = DATA / "deepseek_v3_fp8"


def dequantized(weight: np.ndarray, factors: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The whole matrix in float32, element by element."""
    rows, columns = (np.arange(n) // size for n, size in zip(weight.shape, block, strict=True))
    return weight.astype(np.float32) * factors.astype(np.float32)[rows[:, None], columns]


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """What is in the file; the reader of safetensors for NumPy knows no float8."""
    tensors = TensorFolder.open(folder)
    return {name: tensors.read(name) for name in tensors.names}


def reference(folder: Path) -> dict[str, np.ndarray]:
    """All weights of a checkpoint in float32."""
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = read_all(folder)
    return {
        name: dequantized(value, tensors[name + SCALE], block["weight_block_size"])
        if name + SCALE in tensors
        else value.astype(np.float32)
        for name, value in tensors.items()
        if not name.endswith(SCALE)
    }


def every_float8() -> np.ndarray:
    values = np.arange(256, dtype=np.uint8).view(FLOAT8)
    return values[np.isfinite(values.astype(np.float32))]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_part_is_that_of_the_whole(tmp_path_factory: Any, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    block = data.draw(st.tuples(st.integers(1, 17), st.integers(1, 17)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    weight = rng.choice(every_float8(), shape)
    blocks = [-(-n // size) for n, size in zip(shape, block, strict=True)]
    kind = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16]))
    factors = np.exp2(rng.uniform(-12, 3, blocks)).astype(kind)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    dtype = data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16]))
    transpose = data.draw(st.booleans())

    folder = tmp_path_factory.mktemp("fp8")
    save_file({"w": weight, "w" + SCALE: factors}, folder / "model.safetensors")
    weights = BlockScaledWeights(TensorFolder.open(folder), block)
    index = tuple(slice(*b) for b in bounds)
    expected = dequantized(weight, factors, block)[index].astype(dtype)
    expected = expected.T if transpose else expected
    room = np.zeros((expected.shape[0] + 2, expected.shape[1] + 3), dtype)
    weights.read_into("w", room[1:-1, 2:-1], index, transpose=transpose)
    np.testing.assert_array_equal(
        room[1:-1, 2:-1].view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )
    room[1:-1, 2:-1] = 0
    assert not room.any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("devices", "tensor"), [(1, 1), (4, 1), (4, 2)])
def test_every_shard_of_a_model(devices: int, tensor: int, dtype: Any) -> None:
    """Experts over the devices, heads over two of them; blocks of 20 x 12 divide hardly a shape."""
    expected = reference(CASE)
    config, architecture = read_config(CASE, dtype)
    layout = published_layout(architecture)
    model = load_model(CASE, mesh=make_mesh(devices, tensor=tensor), dtype=dtype, quantize="none")
    seen = set()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        whole = np.zeros(value.shape, np.float32)
        for source in parameter_sources(path, variable, config, layout):
            seen.add(source.name)
            part = expected[source.name][source.part(tuple(slice(0, n) for n in source.shape))]
            part = part.T if source.transpose else part
            whole[source.at][..., source.column : source.column + source.shape[-1]] = part
        wanted = whole.astype(value.dtype)
        for shard in value.addressable_shards:
            found = np.asarray(shard.data)
            np.testing.assert_array_equal(found, wanted[shard.index])
    assert seen == expected.keys()


def test_the_matrix_of_keys_and_values_is_taken_apart() -> None:
    """A head's 16 key rows, then its 12 value rows."""
    matrix = reference(CASE)["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 28, 32)
    expansion = load_model(CASE, mesh=make_mesh(1), dtype=jnp.float32).layers[1].self_attn.kv_b_proj
    np.testing.assert_array_equal(expansion.key[...].decode(jnp.float32), matrix[:, :16])
    np.testing.assert_array_equal(expansion.value[...].decode(jnp.float32), matrix[:, 16:])


def test_a_saved_model_is_plain(tmp_path: Path) -> None:
    config = json.loads((CASE / "config.json").read_text())
    model = load_model(CASE, mesh=make_mesh(1), dtype=jnp.float32)
    save_model(model, config, tmp_path, jnp.float32)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    written, expected = read_all(tmp_path), reference(CASE)
    assert written.keys() == expected.keys()
    for name, value in written.items():
        np.testing.assert_array_equal(value, expected[name])


def test_progress_counts_the_bytes_of_all_files() -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        CASE, mesh=make_mesh(1), dtype=jnp.float32, progress=lambda *call: calls.append(call)
    )
    tensors = TensorFolder.open(CASE)
    total = sum(tensors.info(name).nbytes for name in tensors.names)
    assert calls[-1][0] == calls[-1][1] == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method='hqq' is not supported, expected 'fp8'"),
        ({"quant_method": ...}, "quant_method=None is not supported, expected 'fp8'"),
        ({"fmt": "e5m2"}, "fmt='e5m2' is not supported, expected 'e4m3'"),
        ({"activation_scheme": "static"}, "activation_scheme='static' is not supported"),
        ({"weight_block_size": None}, r"weight_block_size=None is not .* \[128, 128\]"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] is not supported"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\] is not supported"),
    ],
)
def test_other_quantizations_are_refused(options: dict[str, Any], message: str) -> None:
    config = json.loads((CASE / "config.json").read_text())["quantization_config"] | options
    config = {key: value for key, value in config.items() if value is not ...}
    with pytest.raises(CheckpointError, match=f"quantization_config: {message}"):
        find_format(CASE, config)


def test_a_quantization_that_is_no_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match="quantization_config must be an object, got 'fp8'"):
        find_format(CASE, "fp8")


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"  # [16, 48], so 1 x 4 blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME + SCALE), f"{NAME} is float8_e4m3fn without {NAME}{SCALE}"),
        (
            lambda t: t.update({NAME: t[NAME].astype(np.float32)}),
            f"{NAME}{SCALE} is there, but {NAME} is float32",
        ),
        (
            lambda t: t.update({NAME + SCALE: np.ones((1, 3), np.float32)}),
            rf"tensor {NAME}{SCALE} has shape \[1, 3\], expected \[1, 4\]",
        ),
        (lambda t: t.pop(NAME), f"tensor {NAME} is missing"),
        (
            lambda t: t.update({"model.surprise" + SCALE: np.ones((1, 1), np.float32)}),
            f"tensor model.surprise{SCALE} is not part of a deepseek_v3 model",
        ),
    ],
    ids=["no factors", "factors of a plain weight", "shape", "no weight", "factors alone"],
)
def test_tensors_that_contradict_one_another(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    tensors = read_all(CASE)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((CASE / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.float32)


def test_float8_without_a_word_in_the_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((CASE / "model.safetensors").read_bytes())
    config = json.loads((CASE / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{SCALE}.* not part of a deepseek_v3 model"):
        load_model(tmp_path, mesh=make_mesh(1), dtype=jnp.float32)
