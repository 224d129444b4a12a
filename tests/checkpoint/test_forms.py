"""One model in the forms that checkpoints have it in: the same parameters from each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tbo_jax.checkpoint import load as loading
from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.save import save_model
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import DATA

Tensors = dict[str, np.ndarray]


def load(folder: Path, devices: int = 1):
    return load_model(folder, mesh=make_mesh(devices), dtype=jnp.float32)


def rewrite(case: str, folder: Path, change: Callable[[Tensors], Tensors | None], **config) -> Path:
    """A golden case with other tensors, and keys of config.json changed; `...` takes one away."""
    source = TensorFolder.open(DATA / case)
    tensors = {name: source.read(name) for name in source.names}
    changed = change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors if changed is None else changed, folder / "model.safetensors")
    values = json.loads((DATA / case / "config.json").read_text()) | config
    values = {key: value for key, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def assert_same(folder: Path, case: str, devices: int = 1):
    found, expected = load(folder, devices), load(DATA / case, devices)
    one, other = nnx.to_flat_state(nnx.state(found)), nnx.to_flat_state(nnx.state(expected))
    assert [path for path, _ in one] == [path for path, _ in other]
    for (path, a), (_, b) in zip(one, other, strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))
    assert found.config == expected.config
    return found


def unchanged(tensors: Tensors) -> None:
    pass


def fused(tensors: Tensors) -> Tensors:
    """As transformers 5 has a mixture in memory: gate's rows, then up's, of all experts."""
    out: Tensors = {}
    experts: dict[str, dict[int, Tensors]] = {}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, value in tensors.items():
        name = name.replace("block_sparse_moe", "mlp").replace("mlp.moe_st", "mlp.gate.moe_st")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            folder, number, projection = match.groups()
            of_expert = experts.setdefault(folder, {}).setdefault(int(number), {})
            of_expert[names.get(projection, projection)] = value
        else:
            out[name] = value
    for folder, by_number in experts.items():
        each = [by_number[number] for number in range(len(by_number))]
        both = [np.concatenate([e["gate_proj"], e["up_proj"]]) for e in each]
        out[f"{folder}.gate_up_proj"] = np.stack(both)
        out[f"{folder}.down_proj"] = np.stack([e["down_proj"] for e in each])
    assert experts
    return out


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("qwen3_moe_mixed", 4),
        ("mixtral", 1),
        ("qwen2_moe", 2),
        ("glm4_moe", 1),
        ("ernie4_5_moe", 4),
        ("deepseek_v3", 1),
    ],
)
def test_all_experts_in_one_tensor(tmp_path, case, devices):
    assert_same(rewrite(case, tmp_path, fused), case, devices)


def test_fused_experts_of_another_shape_are_refused(tmp_path):
    def transposed(tensors: Tensors) -> Tensors:
        tensors = fused(tensors)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        return tensors | {name: tensors[name].swapaxes(1, 2).copy()}

    rewrite("qwen3_moe", tmp_path, transposed)
    with pytest.raises(CheckpointError, match=r"has shape \[8, 48, 64\], expected \[8, 64, 48\]"):
        load(tmp_path)


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


@pytest.mark.parametrize("case", ["qwen3", "llama_bias", "deepseek_v3"])
def test_names_without_model_in_front(tmp_path, case):
    """As the model without its head is saved; deepseek_v3 has a prediction layer to pass over."""

    def change(tensors: Tensors) -> Tensors:
        more = {"model.layers.3.eh_proj.weight": np.zeros(3, np.float32)}
        return without_prefix(tensors | (more if case == "deepseek_v3" else {}))

    assert_same(rewrite(case, tmp_path, change), case)


def test_an_error_names_tensors_as_the_file_does(tmp_path):
    def change(tensors: Tensors) -> Tensors:
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        return without_prefix(tensors)

    rewrite("qwen3", tmp_path, change)
    with pytest.raises(CheckpointError, match=r": tensor layers\.1\.mlp\.up_proj\.weight is miss"):
        load(tmp_path)


OF_LANGUAGE_MODEL = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "use_sliding_window", "sliding_window", "max_window_layers", "initializer_range",
)  # fmt: skip


def nested_config() -> dict:
    """config.json of the case qwen2_vl as transformers 5 writes it."""
    flat = json.loads((DATA / "qwen2_vl" / "config.json").read_text())
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {key: flat[key] for key in OF_LANGUAGE_MODEL} | {
        "model_type": "qwen2_vl_text",
        "rope_parameters": rope | {"rope_theta": flat["rope_theta"]},
        "layer_types": ["full_attention"] * 2,
    }
    absent = dict.fromkeys([*OF_LANGUAGE_MODEL, "rope_theta", "rope_scaling"], ...)
    return absent | {"text_config": text}


@pytest.mark.parametrize("root", ["model.", ""])
def test_qwen2_vl_as_transformers_5_saves_it(tmp_path, root):
    """The language model beside the vision tower, its configuration in an object of its own."""

    def change(tensors: Tensors) -> Tensors:
        renamed = {
            re.sub(r"^model\.", f"{root}language_model.", name): value
            for name, value in tensors.items()
            if not name.startswith("visual.")
        }
        return renamed | {f"{root}visual.merger.ln_q.weight": np.zeros(3, np.float32)}

    found = assert_same(rewrite("qwen2_vl", tmp_path, change, **nested_config()), "qwen2_vl")
    assert found.config.rotary.sections == (2, 3, 3)
    assert found.config.image_token_id == 3


@pytest.mark.parametrize("place", ["text_config", "top"])
def test_the_tie_of_qwen2_vl_counts_in_both_places(tmp_path, place):
    changes = nested_config()
    (changes if place == "top" else changes["text_config"])["tie_word_embeddings"] = True
    changes.setdefault("tie_word_embeddings", ...)

    def change(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight")

    assert load(rewrite("qwen2_vl", tmp_path, change, **changes)).config.tie_word_embeddings


def head(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].copy())

    return add


def test_a_head_that_differs_from_what_it_is_tied_to_counts(tmp_path, caplog):
    def last_element(weight: np.ndarray) -> np.ndarray:
        weight[-1, -1] = 1
        return weight

    folder = rewrite("llama_tied_bf16", tmp_path, head(last_element))
    # So that the comparison takes several parts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_COMPARED", 1000)
        model = load(folder)
    assert not model.config.tie_word_embeddings
    tied = load(DATA / "llama_tied_bf16").embed_tokens.embedding[...]
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], tied)
    assert model.lm_head.weight[-1, -1] == 1 != tied[-1, -1]
    np.testing.assert_array_equal(model.lm_head.weight[:-1], tied[:-1])
    hidden = jnp.ones((2, model.config.hidden_size))
    expected = model.norm(hidden) @ model.lm_head.weight[...].T
    np.testing.assert_allclose(model.logits(hidden), expected, rtol=1e-5)
    assert [record.message for record in caplog.records] == [
        f"{folder}: config.json ties lm_head.weight to model.embed_tokens.weight, but both are "
        "there and differ: both count"
    ]


def test_a_head_that_equals_what_it_is_tied_to_is_not_held_twice(tmp_path, caplog):
    folder = rewrite("llama_tied_bf16", tmp_path, head(lambda weight: weight))
    assert_same(folder, "llama_tied_bf16")
    assert not caplog.records


def test_a_tied_head_of_another_shape_is_refused(tmp_path):
    folder = rewrite("llama_tied_bf16", tmp_path, head(lambda weight: weight[:7]))
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight has shape \[7, 64\], expected \[160"
    ):
        load(folder)


def test_only_the_head_of_a_tied_pair_is_there(tmp_path):
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    assert_same(rewrite("llama_tied_bf16", tmp_path, change), "llama_tied_bf16")
    rewrite("llama_tied_bf16", tmp_path, change, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="tensor model.embed_tokens.weight is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("case", "layers", "message"),
    [
        ("qwen3", 3, "config.json has 3 layers, the tensors are of 2"),
        ("qwen3_moe_mixed", 9_999, "config.json has 9,999 layers, the tensors are of 4"),
        ("qwen2_moe", 10**9, "num_hidden_layers must be at most 10,000, got 1000000000"),
    ],
)
def test_layers_are_counted_before_anything_is_built(tmp_path, monkeypatch, case, layers, message):
    def build(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(loading, "CausalLM", build)
    folder = rewrite(case, tmp_path, unchanged, num_hidden_layers=layers, layer_types=...)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "quant_algo='NVFP4' is not supp"),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo='FP8' is not"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo='FP8' is not"),
        ("FP8", "quant_algo=None is not supported, expected 'FP8'"),
        ({"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": ["x"]}, None),
        (None, None),
    ],
)
def test_quantization_told_by_a_file_of_its_own(tmp_path, quantization, message):
    folder = rewrite("qwen3", tmp_path, unchanged)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    )
    if message is None:
        load(folder)
        return
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression_config": {"format": "pack-quantized"}}, "compression_config is not support"),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "quant_method='hqq'"),
        (
            {
                "quantization_config": {"quant_method": "fp8"},
                "text_config": {"quantization_config": {"quant_method": "awq"}},
            },
            "has a quantization_config and another in its text_config",
        ),
    ],
)
def test_quantization_told_elsewhere_in_the_configuration(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(rewrite("qwen3", tmp_path, unchanged, **changes))


def test_a_model_with_a_nested_configuration_is_saved_and_loaded(tmp_path):
    changes = nested_config() | {"torch_dtype": ..., "dtype": "float16"}
    changes["text_config"] |= {"dtype": "float16", "quantization_config": {"quant_method": "fp8"}}
    config = json.loads((DATA / "qwen2_vl" / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    save_model(load(DATA / "qwen2_vl"), config, tmp_path, jnp.float32)
    assert_same(tmp_path, "qwen2_vl")
    written = json.loads((tmp_path / "config.json").read_text())
    for part in (written, written["text_config"]):
        assert part["dtype"] == "float32"
        assert not {"torch_dtype", "quantization_config"} & part.keys()


def test_a_model_with_a_head_that_differs_is_saved_and_loaded(tmp_path, caplog):
    folder = rewrite("llama_tied_bf16", tmp_path / "one", head(lambda weight: weight * 2))
    first = load(folder)
    config = json.loads((folder / "config.json").read_text())
    save_model(first, config, tmp_path / "other", jnp.float32)
    second = load(tmp_path / "other")
    assert not second.config.tie_word_embeddings
    np.testing.assert_array_equal(first.lm_head.weight[...], second.lm_head.weight[...])
    assert len(caplog.records) == 2
