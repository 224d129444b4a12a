"""What the architectures read from config.json, and what they refuse."""

from __future__ import annotations

import json
from importlib import resources

import jax.numpy as jnp
import pytest

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models import find_architecture
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.schedule.model_step import read_shape
from tests.golden_cases import DATA


def parse(case: str, **changes) -> DecoderConfig:
    """The configuration of a golden case with keys changed; `...` takes a key away."""
    values = json.loads((DATA / case / "config.json").read_text()) | changes
    values = {key: value for key, value in values.items() if value is not ...}
    return find_architecture(values["model_type"]).parse_config(HfConfig(values, "x"), jnp.float32)


def mrope(**options) -> dict:
    return {"rope_scaling": {"type": "mrope"} | options}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "x: use_sliding_window=True is not supported"),
        ("qwen2_moe", {"shared_expert_intermediate_size": ...}, "shared_expert_.* is missing"),
        ("qwen2_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers must list layers below 2: \[2\]"),
        ("qwen2_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ("glm4_moe", {"n_group": 5}, "x: 12 experts do not divide into 5 groups"),
        ("glm4_moe", {"topk_group": 5}, "x: 5 groups a token, of only 4"),
        ("glm4_moe", {"num_experts_per_tok": 7}, "x: 7 experts a token, of only 6 in 2 of 4"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be at least 0"),
        (
            "glm4_moe",
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor must be at most 1, got 1.5",
        ),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "3 dimensions of a head of 16 would be"),
        ("qwen2_vl", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ("qwen2_vl", {"image_token_id": -1}, "image_token_id must be at least 0, got -1"),
        ("qwen2_vl", mrope(mrope_section=[2, 3]), r"three positive integers, got \[2, 3\]"),
        ("qwen2_vl", mrope(), "mrope_section must be three positive integers, got None"),
        ("qwen2_vl", mrope(mrope_section=[2, 2, 2]), r"\[2, 2, 2\] must be 8 frequencies in all"),
        (
            "qwen2_vl",
            mrope(mrope_section=[2, 3, 3], mrope_interleaved=True),
            "mrope_interleaved true is not supported",
        ),
        ("llama", mrope(mrope_section=[2, 3, 3]), "RoPE scaling type 'mrope' is not supported"),
        (
            "llama",
            {"rope_scaling": {"mrope_section": [2, 3, 3]}},
            "mrope_section is not supported by this architecture",
        ),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not .* expected 4"),
        ("deepseek_v3", {"kv_lora_rank": ...}, "x: kv_lora_rank is missing"),
        ("deepseek_v3", {"q_lora_rank": 0}, "x: q_lora_rank must be positive, got 0"),
        ("deepseek_v3", {"head_dim": 24}, "x: head_dim=24 is not supported, expected 8"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "7 dimensions of a head of 7 would be rotated"),
        ("deepseek_v3", {"rope_interleave": 1}, "rope_interleave must be true or false, got 1"),
        ("deepseek_v3", {"rope_scaling": {"type": "dynamic"}}, "RoPE scaling type 'dynamic'"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported, expected 1"),
        ("ernie4_5", {"use_bias": "no"}, "use_bias must be true or false, got 'no'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported, expected False"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid' is not supported"),
        ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free=False is not supported"),
        ("ernie4_5_moe", {"moe_num_experts": [64, 64]}, "moe_num_experts must be int"),
        ("ernie4_5_moe", {"moe_k": 9}, "x: 9 experts a token, of only 8"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("gpt_oss", {"rope_scaling": None}, "x: rope_scaling is missing"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must list 2 layers, got"),
        (
            "gpt_oss",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer type 'chunked_attention' is not supported, expected 'sliding_attention' or",
        ),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ("gpt_oss", {"swiglu_limit": "7"}, "swiglu_limit must be float, got '7'"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "x: 9 experts a token, of only 8"),
        ("gpt_oss", {"attention_bias": None}, "attention_bias must be true or false, got None"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index must be at least -1"),
    ],
)
def test_refused(case, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(case, **changes)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"moe_layer_start_index": 0}, [0, 1, 2, 3, 4, 5]),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 4}, [3, 4]),
        ({"moe_layer_interval": 2}, [1, 3, 5]),
        ({"moe_layer_interval": 2, "moe_layer_end_index": 4}, [1, 3]),
    ],
)
def test_layers_of_ernie_with_experts(changes, sparse):
    base = {"num_hidden_layers": 6, "moe_layer_end_index": -1}
    config = parse("ernie4_5_moe", **(base | changes))
    assert [i for i in range(6) if config.is_sparse(i)] == sparse


@pytest.mark.parametrize(("dense", "sparse"), [(0, [0, 1, 2]), (2, [2]), (9, [])])
def test_first_layers_of_glm_are_dense(dense, sparse):
    config = parse("glm4_moe", first_k_dense_replace=dense)
    assert [i for i in range(3) if config.is_sparse(i)] == sparse


def test_no_shared_experts():
    assert parse("glm4_moe", n_shared_experts=0).shared_expert_intermediate_size == 0
    assert parse("ernie4_5_moe", moe_num_shared_experts=...).shared_expert_intermediate_size == 0


def test_keys_of_both_generations_of_files_mean_the_same():
    """Partial rotation and theta stand at the top, or in `rope_parameters`."""
    new = {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}
    new["rope_parameters"]["partial_rotary_factor"] = 0.25
    old = {"rope_theta": 5e4, "partial_rotary_factor": 0.25}
    absent = {"rope_theta": ..., "rope_scaling": ..., "partial_rotary_factor": ...}
    first, second = parse("glm4_moe", **old), parse("glm4_moe", **(absent | new))
    assert first == second
    assert first.rotary.dim == 4
    assert parse("glm4_moe", **absent).rotary.dim == 8


def test_windows_of_gpt_oss():
    def windows(**changes):
        config = parse("gpt_oss", **({"num_hidden_layers": 3} | changes))
        return [config.of_layer(i).sliding_window for i in range(3)]

    assert windows() == [8, None, 8]
    assert windows(sliding_window=...) == [128, None, 128]
    assert windows(layer_types=["full_attention", "sliding_attention", "full_attention"]) == [
        None,
        8,
        None,
    ]


def test_theta_of_ernie_where_the_file_has_none():
    assert parse("ernie4_5_moe", rope_theta=...).rotary.theta == 500000.0


def test_latent_attention_is_one_head_to_the_cache():
    config = parse("deepseek_v3")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 1, 32 + 8)
    assert (config.value_dim, config.cached_elements) == (32, 40)
    assert config.rotary.dim == 8 and config.rotary.interleaved
    assert not parse("deepseek_v3", rope_interleave=False).rotary.interleaved
    with_values = parse("glm4_moe")
    assert with_values.cached_elements == 2 * with_values.num_kv_heads * with_values.head_dim


@pytest.mark.parametrize(
    ("scaling", "growth"),
    [
        (..., 1.0),
        ({"type": "yarn", "factor": 40, "mscale": 1.0}, 1.0),
        ({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.3688879),
        ({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.1844440),
        ({"type": "yarn", "factor": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_scores_of_deepseek_grow_with_the_stretch_of_the_context(scaling, growth):
    """0.1 ln(40) + 1, which DeepSeek-V2's code squares."""
    config = parse("deepseek_v3", rope_scaling=scaling)
    assert config.latent.scale == pytest.approx(24**-0.5 * growth**2)


def test_kimi_k2_is_deepseek_v3_with_other_sizes():
    """The values of its config.json, where they differ from those of DeepSeek-V3."""
    deepseek = read_shape("deepseek-v3")
    text = (resources.files("tbo_jax.schedule") / "presets/deepseek-v3.json").read_text("utf-8")
    kimi = dict(
        model_type="kimi_k2", num_attention_heads=64, num_key_value_heads=64, n_group=1,
        topk_group=1, n_routed_experts=384, first_k_dense_replace=1, num_nextn_predict_layers=0,
        routed_scaling_factor=2.827, vocab_size=163840, rope_theta=50000.0,
    )  # fmt: skip
    hf = HfConfig(json.loads(text) | kimi, "x")
    found = find_architecture("kimi_k2").parse_config(hf, jnp.bfloat16)
    assert (found.num_heads, found.num_experts) == (64, 384)
    assert found.dense_layers == {0} and found.router.num_groups == 1
    assert (found.latent, found.head_dim) == (deepseek.latent, 576)
    assert deepseek.dense_layers == {0, 1, 2}
