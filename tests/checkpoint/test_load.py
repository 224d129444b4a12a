"""Loading a checkpoint: errors name what is wrong, and memory stays at the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tbo_jax.checkpoint.load import load_model, read_config
from tbo_jax.checkpoint.save import save_model
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import DATA


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a small dense checkpoint, to be damaged."""
    return copy_case("llama", tmp_path)


def copy_case(name: str, folder: Path) -> Path:
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((DATA / name / file).read_bytes())
    return folder


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change) -> None:
    file = TensorFolder.open(folder)  # the reader of safetensors for NumPy knows no float8
    tensors = {name: file.read(name) for name in file.names}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, devices: int = 1):
    return load_model(str(folder), mesh=make_mesh(devices), dtype=jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported: expected one of deepseek_v3,",
        ),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be int, got '64'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"num_key_value_heads": 3}, "do not divide into 3 key/value heads"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
    ],
)
def test_configuration_errors(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "not valid JSON: Expecting"),
        (b'{"a": "\xff"}', "not valid JSON: 'utf-8'"),
        (b'{"a": ' + b"[" * 200_000, "not valid JSON: nested too deeply"),
        (
            b'{"hidden_size": 64, "hidden_size": 32}',
            "not valid JSON: key 'hidden_size' occurs 2 times",
        ),
        (
            b'{"rope_scaling": {"factor": 2, "factor": 4}}',
            "not valid JSON: key 'factor' occurs 2 times",
        ),
        (b"[]", "expected a JSON object, got list"),
    ],
)
def test_missing_and_corrupt_configuration(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}") as error:
        read_config(tmp_path, jnp.float32)
    assert len(str(error.value)) < 1000


def test_missing_tensor(folder):
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"
    ):
        load(folder)


def test_extra_tensor(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.surprise": np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.surprise is not part of a llama"):
        load(folder)


def test_misshaped_tensor(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(folder, lambda t: t.update({name: t[name].T.copy()}))
    with pytest.raises(
        CheckpointError, match=r"down_proj\.weight has shape \[80, 64\], expected \[64, 80\]"
    ):
        load(folder)


def test_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load(folder)


def test_rotary_buffers_of_old_exports_are_passed_over(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda t: t.update({name: np.zeros(8, np.float32)}))
    load(folder)


def add_tensors(folder: Path, *names: str) -> None:
    change_tensors(folder, lambda t: t.update({name: np.zeros(3, np.float32) for name in names}))


@pytest.mark.parametrize(
    ("case", "passed_over", "refused"),
    [
        (  # three layers, and one for multi-token prediction
            "glm4_moe",
            ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"],
            "model.layers.4.eh_proj.weight",
        ),
        (
            "ernie4_5_moe",
            ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
            "model.mtp_surprise.0.weight",
        ),
        (
            "deepseek_v3",
            ["model.layers.3.eh_proj.weight", "model.layers.3.shared_head.head.weight"],
            "model.layers.4.eh_proj.weight",
        ),
        (
            "deepseek_v3_fp8",
            ["model.layers.3.eh_proj.weight", "model.layers.3.eh_proj.weight_scale_inv"],
            "model.layers.4.eh_proj.weight_scale_inv",
        ),
        ("qwen2_moe", [], "model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_only_the_prediction_layers_are_passed_over(tmp_path, case, passed_over, refused):
    folder = copy_case(case, tmp_path)
    add_tensors(folder, *passed_over)
    load(folder)
    add_tensors(folder, refused)
    model_type = case.removesuffix("_fp8")
    with pytest.raises(CheckpointError, match=f"tensor {refused} is not part of a {model_type}"):
        load(folder)


@pytest.mark.parametrize(
    ("case", "name", "shape"),
    [
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias", [12]),
        ("ernie4_5_moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias", [1, 8]),
        ("glm4_moe", "model.layers.2.mlp.shared_experts.down_proj.weight", [48, 32]),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert.up_proj.weight", [40, 48]),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight", [1, 48]),
        ("deepseek_v3", "model.layers.2.self_attn.kv_b_proj.weight", [112, 32]),
        ("gpt_oss", "model.layers.1.self_attn.sinks", [6]),
        ("gpt_oss", "model.layers.1.mlp.router.bias", [8]),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", [8, 64]),
    ],
)
def test_tensors_beside_the_experts_are_checked(tmp_path, case, name, shape):
    folder = copy_case(case, tmp_path)
    change_tensors(folder, lambda t: t.update({name: np.zeros(5, np.float32)}))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert f"tensor {name} has shape [5], expected {shape}" in str(error.value)
    change_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load(folder)


def test_router_of_bfloat16_models_is_float32_where_transformers_keeps_it_so():
    for case, dtype in {"glm4_moe": jnp.float32, "qwen2_moe": jnp.bfloat16}.items():
        model = load_model(DATA / case, mesh=make_mesh(1), dtype=jnp.bfloat16)
        assert model.layers[1].mlp.gate.weight.get_value().dtype == dtype
        assert model.layers[1].self_attn.q_proj.weight.get_value().dtype == jnp.bfloat16


def test_experts_that_do_not_divide_say_what_works():
    with pytest.raises(CheckpointError, match=r"8 experts .* 3 devices; .* 1, 2, 4, 8"):
        load(DATA / "mixtral", devices=3)


@pytest.mark.parametrize("scanned", [False, True])
def test_each_device_holds_its_share_of_the_experts(scanned):
    model = load_model(DATA / "qwen3_moe", mesh=make_mesh(4), dtype=jnp.float32, scanned=scanned)
    layer = model.layers.stacked if scanned else model.layers[0]
    weight = layer.mlp.gate_up_proj.get_value()
    shard = weight.addressable_shards[0].data
    assert shard.size * 4 == weight.size
    assert layer.self_attn.q_proj.weight.get_value().sharding.is_fully_replicated
    first = load(DATA / "qwen3_moe").layers[0].mlp.gate_up_proj.get_value()
    np.testing.assert_array_equal(weight[0] if scanned else weight, first)


def test_scanned_experts_keep_their_biases(tmp_path):
    folder = copy_case("gpt_oss", tmp_path)
    change_config(folder, layer_types=["full_attention"] * 2)
    scanned = load_model(folder, mesh=make_mesh(1), dtype=jnp.float32, scanned=True)
    for index, layer in enumerate(load(folder).layers):
        one, other = scanned.layers[index].mlp._matrices(), layer.mlp._matrices()
        assert one.gate_up_bias.shape == (16, 64)  # read in place
        jax.tree.map(np.testing.assert_array_equal, one.sliced(), replace(other, count=8))


@pytest.mark.parametrize(
    "name",
    [
        "llama_tied_bf16",
        "qwen3_moe_mixed",
        "mixtral",
        "qwen2_moe",
        "glm4_moe",
        "ernie4_5_moe",
        "deepseek_v3",
        "gpt_oss",
    ],
)
def test_saved_model_has_the_same_tensors(tmp_path, name):
    config = json.loads((DATA / name / "config.json").read_text())
    save_model(load(DATA / name), config, tmp_path, jnp.bfloat16)
    written = load_file(tmp_path / "model.safetensors")
    for file in (DATA / name).glob("*.safetensors"):
        for tensor, value in load_file(file).items():
            np.testing.assert_array_equal(written.pop(tensor), value)
    assert not written


def test_peak_memory_is_the_weights_and_one_tensor(tmp_path):
    """In a process of its own, on a checkpoint of 160 MiB whose largest tensor has 16 MiB."""
    config = json.loads((DATA / "llama" / "config.json").read_text())
    config |= {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    }  # fmt: skip
    script = f"""
import json
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.names import parameter_sources, published_layout
from tbo_jax.checkpoint.load import read_config
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.parallel.sharding import make_mesh
from safetensors.numpy import save_file
folder = Path({str(tmp_path)!r})
(folder / "config.json").write_text(json.dumps({config!r}))
config, architecture = read_config(folder, jnp.float32)
state = nnx.state(nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0))))
sources = [s for p, v in nnx.to_flat_state(state)
           for s in parameter_sources(p, v, config, published_layout(architecture))]
import multiprocessing
def write():
    save_file({{s.name: np.zeros(s.tensor_shape, np.float32) for s in sources}}, folder / "model.safetensors")
child = multiprocessing.get_context("fork").Process(target=write)
child.start(); child.join()
def peak():  # not getrusage: its figure starts from what the parent process had
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
mesh = make_mesh(1)
jnp.zeros(8).block_until_ready()
nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
before = peak()
model = load_model(folder, mesh=mesh, dtype=jnp.float32)
after = peak()
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
largest = max(4 * int(np.prod(s.tensor_shape)) for s in sources)
print(json.dumps([(after - before) * 1024, weights, largest]))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    grown, weights, largest = json.loads(result.stdout.splitlines()[-1])
    assert weights > 140 << 20
    # 8 MiB of read buffer, and what the allocator keeps.
    assert grown < weights + largest + (24 << 20)
