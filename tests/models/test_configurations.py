"""What the architectures read from config.json, and what they refuse."""

from __future__ import annotations

import json
import math
from importlib import resources

import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.rotary import rotary_frequencies, rotary_table
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
        ("gpt_oss", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index must be at least -1"),
    ],
)
def test_refused(case, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(case, **changes)


SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
NO_WINDOW = (
    "x: layer_types has 'sliding_attention', but no sliding window is in use: expected 'full"
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
HUGE = 10**400
RANGES = {  # keys of each case, numbers that they cannot be
    "llama": {
        "rms_norm_eps": [math.nan, math.inf, 0, -1e-6, 2, HUGE, "1e-6", True],
        "rope_theta": [math.nan, math.inf, -math.inf, 0, -1e4, 1, HUGE, "1e4"],
        "initializer_range": [math.nan, math.inf, 0, 1e39],
        "hidden_size": [math.nan, 64.0, 0, -64, HUGE, 2**31],
        "vocab_size": [0, 2**40],
        "max_position_embeddings": [0, -1, HUGE],
        "num_attention_heads": [0, 10**9],
        "num_hidden_layers": [0, 10**9],
        "head_dim": [0, -2],
    },
    "glm4_moe": {
        "routed_scaling_factor": [math.nan, math.inf, 0, -1, HUGE],
        "partial_rotary_factor": [math.nan, -0.5, 1.5],
        "n_routed_experts": [0, 10**9],
        "num_experts_per_tok": [0, -1],
        "num_nextn_predict_layers": [-1, 10**9],
    },
    "gpt_oss": {
        "swiglu_limit": [math.nan, math.inf, 0, -7],
        "swiglu_alpha": [math.nan, math.inf, 0],
        "sliding_window": [0, -8, HUGE],
    },
    "ernie4_5_moe": {"moe_norm_min": [math.nan, -1e-12, 0]},
}


@pytest.mark.parametrize(("case", "key"), [(c, k) for c, keys in RANGES.items() for k in keys])
def test_numbers_are_finite_and_in_range(case, key):
    for value in RANGES[case][key]:
        with pytest.raises(ValueError, match=f"^x: {key} must be ") as error:
            parse(case, **{key: value})
        assert len(str(error.value)) < 200


ROPE_RANGES = [
    *[(YARN, "factor", n) for n in (math.nan, math.inf, 0, -2, "4", None, HUGE, True)],
    *[(YARN, "original_max_position_embeddings", n) for n in (0, -32, 32.0, HUGE, math.nan)],
    *[(YARN, "beta_fast", n) for n in (math.nan, math.inf, 0, 0.5, "32")],
    *[(YARN, "beta_slow", n) for n in (math.nan, 0, -1)],
    *[(YARN, "mscale", n) for n in (math.nan, math.inf, -1, "1")],
    *[(YARN, "mscale_all_dim", n) for n in (math.nan, -1)],
    *[(YARN, "attention_factor", n) for n in (math.nan, math.inf, 0, -1)],
    *[(YARN, "attn_factor", n) for n in (math.nan, math.inf, 0, -1)],
    *[(YARN, "rope_theta", n) for n in (math.nan, math.inf, 0, 1)],
    *[(YARN, "partial_rotary_factor", n) for n in (math.nan, 0, -1, 2)],
    *[(YARN, "truncate", n) for n in (1, "no")],
    *[({"type": "linear"}, "factor", n) for n in (math.nan, math.inf, 0, -2, None)],
    *[(LLAMA3, "low_freq_factor", n) for n in (math.nan, 0, -1, None)],
    *[(LLAMA3, "high_freq_factor", n) for n in (math.nan, math.inf, 1, 0.5, None)],
    *[(LLAMA3, "original_max_position_embeddings", n) for n in (0, math.nan)],
]


@pytest.mark.parametrize(("scaling", "key", "value"), ROPE_RANGES)
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_numbers_of_rotary_positions_are_finite_and_in_range(place, scaling, key, value):
    with pytest.raises(ValueError, match=rf"^x: {place}: {key} (must be|is missing)") as error:
        parse("llama", **{"rope_scaling": None, place: scaling | {key: value}})
    assert len(str(error.value)) < 200


def test_a_context_beyond_all_integers_is_refused():
    with pytest.raises(ValueError, match=r"context of 32 tokens times factor 1e\+30 is out of ran"):
        parse("llama", rope_scaling=YARN | {"factor": 1e30})


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "llama",
            {"rope_scaling": YARN | {"scale": 2}},
            "x: rope_scaling: scale is not supported, expected rope_type, type, rope_theta",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}},
            "beta_fast is",
        ),
        ("llama", {"rope_scaling": {"rope_type": "default", "factor": 2}}, "factor is not supp"),
        ("llama", {"rope_scaling": LLAMA3 | {"attn_factor": 2}}, "attn_factor is not supported"),
        (
            "llama",
            {"rope_scaling": YARN | {"extrapolation_factor": 2}},
            "extrapolation_factor=2 is",
        ),
        ("llama", {"rope_scaling": YARN | {"apply_yarn_scaling": False}}, "yarn_scaling=False is"),
        (
            "llama",
            {"rope_scaling": YARN | {"type": "linear"}},
            "rope_type 'yarn' and type 'linear'",
        ),
        ("llama", {"rope_scaling": "yarn"}, "x: rope_scaling must be an object, got 'yarn'"),
        ("llama", {"rope_parameters": [1]}, r"x: rope_parameters must be an object, got \[1\]"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "x: rope_parameters: full_attention is not supported",
        ),
        (
            "llama",
            {"rope_scaling": YARN | {"attention_factor": 1.0, "attn_factor": 0.9}},
            "attention_factor, in place of the formula's, and attn_factor, on top",
        ),
        (
            "llama",
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "original_max_position_embeddings 32 and the 64 beside it differ",
        ),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types=.* is not supported"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers must be at least 0, got -1"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ("qwen2_vl", {"text_config": 3}, "x: text_config must be an object, got 3"),
        ("qwen2", {"use_sliding_window": False, **SLIDING}, NO_WINDOW),
        ("qwen2", {"sliding_window": None, **SLIDING}, NO_WINDOW),
        ("qwen2_moe", SLIDING, NO_WINDOW),
        ("qwen2_vl", SLIDING, NO_WINDOW),
        ("qwen3", SLIDING, NO_WINDOW),
    ],
)
def test_what_nobody_reads_or_contradicts_itself_is_refused(case, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(case, **changes)


def test_one_source_of_rotary_positions():
    """Of two that agree either serves; the base may be in one of them, or beside."""
    base = parse("llama", rope_theta=5e4, rope_scaling=YARN)
    assert base.rotary.theta == 5e4 and base.rotary.scaling.factor == 4
    legacy = {("type" if k == "rope_type" else k): v for k, v in YARN.items()}
    for new, old, beside in [
        (YARN | {"rope_theta": 5e4}, None, ...),
        (YARN | {"rope_theta": 5e4}, {}, 9e4),
        (YARN | {"rope_theta": 5e4}, YARN, ...),
        (YARN, legacy | {"rope_theta": 5e4}, ...),
        (YARN | {"mscale": None}, legacy, 5e4),
        (None, legacy, 5e4),
        (YARN, None, 5e4),
    ]:
        changes = {"rope_parameters": new, "rope_scaling": old, "rope_theta": beside}
        assert parse("llama", **changes) == base


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"rope_type": "default", "rope_theta": 5e4}, YARN),
        (YARN, YARN | {"factor": 2.0}),
        (YARN | {"rope_theta": 1e4}, YARN | {"rope_theta": 5e4}),
        (YARN, YARN | {"mscale": 1.0}),
    ],
)
def test_two_sources_of_rotary_positions_that_differ_are_refused(new, old):
    with pytest.raises(ValueError, match=r"^x: rope_parameters .* and rope_scaling .* differ"):
        parse("llama", rope_parameters=new, rope_scaling=old)


def test_the_original_context_may_stand_beside():
    """As Phi-3 has it; without it the context counts as the original."""
    inside = parse("llama", rope_scaling=YARN)
    outside = {key: value for key, value in YARN.items() if not key.startswith("original")}
    key = "original_max_position_embeddings"
    assert parse("llama", rope_scaling=outside, **{key: 32}) == inside
    assert parse("llama", rope_scaling=YARN, **{key: 32}) == inside
    assert parse("llama", rope_scaling=outside).rotary.scaling.original_context == 128


def test_the_context_is_what_yarn_stretches_it_to():
    def context(**changes) -> int:
        return parse("llama", **changes).max_position_embeddings

    assert context(rope_scaling=YARN, max_position_embeddings=40) == 32 * 4
    assert context(rope_scaling=YARN | {"factor": 2.5}, max_position_embeddings=40) == 80
    assert context(rope_scaling=LLAMA3, max_position_embeddings=40) == 40
    assert context(rope_scaling={"type": "linear", "factor": 2}, max_position_embeddings=40) == 40


@pytest.mark.parametrize(
    ("options", "magnitude"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        # DeepSeek-R1-0528-Qwen3-8B: the growth is taken back.
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.5),
        ({"attn_factor": 2, "factor": 1}, 2.0),
    ],
)
def test_the_magnitude_of_yarn(options, magnitude):
    """`attn_factor` multiplies what the formula gives, as in vLLM and the code of YaRN's authors."""
    config = parse("llama", rope_scaling=YARN | options).rotary
    assert rotary_frequencies(config)[1] == pytest.approx(magnitude, rel=1e-6)
    cos, _ = rotary_table(config, jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(cos, magnitude, rtol=1e-6)


@pytest.mark.parametrize("case", ["llama", "gpt_oss", "qwen3_moe", "ernie4_5"])
def test_swish_is_silu(case):
    assert parse(case, hidden_act="swish") == parse(case)


@pytest.mark.parametrize(("case", "key"), [("llama", "attention_bias"), ("qwen2_moe", "qkv_bias")])
def test_a_null_flag_is_absent(case, key):
    assert parse(case, **{key: None}) == parse(case, **{key: ...})


def test_the_text_config_of_qwen2_vl_needs_no_model_type():
    values = json.loads((DATA / "qwen2_vl" / "config.json").read_text())
    text = {key: value for key, value in values.items() if key != "model_type"}
    text |= values.get("text_config") or {}
    text.pop("model_type", None)
    config = parse("qwen2_vl", text_config=text)
    assert config == parse("qwen2_vl")
    assert config.model_type == "qwen2_vl"


def test_windows_of_qwen2_and_mistral():
    def windows(case, **changes):
        config = parse(case, **changes)
        return [config.of_layer(i).sliding_window for i in range(2)]

    assert windows("qwen2") == [None, 8]
    assert windows("qwen2", max_window_layers=0) == [8, 8]
    assert windows("qwen2", max_window_layers=...) == [None, None]
    assert windows("qwen2", use_sliding_window=False) == [None, None]
    assert windows("qwen2", sliding_window=None) == [None, None]
    full = ["full_attention"] * 2
    assert windows("qwen2", use_sliding_window=False, layer_types=full) == [None, None]
    assert windows("qwen2", layer_types=["sliding_attention", "full_attention"]) == [8, None]
    assert windows("mistral") == [8, 8]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("mistral", sliding_window=...) == [4096, 4096]


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
