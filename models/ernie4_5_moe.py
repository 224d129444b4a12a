"""ERNIE 4.5, mixture of experts: the dense model's attention, shared experts, a correction bias."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import Architecture, ExpertTensors
from tbo_jax.models.ernie4_5 import THETA
from tbo_jax.models.hf_config import MOST_PARTS, HfConfig
from tbo_jax.moe.routing import Routing


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of an ERNIE 4.5 MoE config.json."""
    hf.expect("use_bias", False, None)
    hf.expect("moe_gate_act", "softmax", None)
    hf.expect("moe_use_aux_free", True, None)
    width = hf.number("moe_intermediate_size")
    return hf.common(
        dtype,
        default_theta=THETA,
        interleaved_rotary=True,
        rms_norm_eps=hf.epsilon(1e-5),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        # Transformers 5 may write the names in common with other families.
        num_experts=hf.num_experts("moe_num_experts", "num_experts"),
        router=Routing(
            hf.number("moe_k", hf.values.get("num_experts_per_tok")),
            smallest_sum=hf.number("moe_norm_min", 1e-12, float, most=1.0),
        ),
        expert_intermediate_size=width,
        shared_expert_intermediate_size=width * hf.number("moe_num_shared_experts", 0, least=0),
        correction_bias=True,
        float32_router=True,
        dense_layers=dense_layers(hf),
        num_prediction_layers=hf.number("num_nextn_predict_layers", 0, least=0, most=MOST_PARTS),
    )


def dense_layers(hf: HfConfig) -> frozenset[int]:
    """All but every `moe_layer_interval`-th layer between the first and the last index."""
    layers, period = hf.num_layers, hf.number("moe_layer_interval", 1)
    first = hf.number("moe_layer_start_index", 1, least=0)
    last = hf.number("moe_layer_end_index", -1, least=-1)
    last = layers - 1 if last == -1 else last
    return frozenset(i for i in range(layers) if (i + 1) % period or not first <= i <= last)


BIAS = "mlp.gate.e_score_correction_bias"  # [1, E] in the checkpoint
ARCHITECTURE = Architecture(
    parse_config,
    experts=(
        ExpertTensors(names={BIAS: "mlp.moe_statics.e_score_correction_bias"}, ndim={BIAS: 2}),
        ExpertTensors(
            fused="halves",
            names={BIAS: "mlp.gate.moe_statics.e_score_correction_bias"},
            ndim={BIAS: 2},
        ),
    ),
    # Multi-token prediction.
    ignored=("mtp_block.", "mtp_emb_norm.", "mtp_hidden_norm.", "mtp_linear_proj."),
)
