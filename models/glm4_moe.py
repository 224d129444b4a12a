"""GLM-4.5 and 4.6, mixtures of experts: DeepSeek-V3's routing behind partly rotated attention."""

from __future__ import annotations

from typing import Any

from tbo_jax.layers.config import DecoderConfig
from tbo_jax.models.architecture import FUSED, Architecture, ExpertTensors
from tbo_jax.models.hf_config import MOST_PARTS, HfConfig
from tbo_jax.moe.routing import Routing


def parse_config(hf: HfConfig, dtype: Any) -> DecoderConfig:
    """The `DecoderConfig` of a GLM-4.5 MoE config.json."""
    return hf.common(
        dtype,
        attention_output_bias=False,
        query_key_norm=hf.flag("use_qk_norm"),
        default_partial_rotary=0.5,
        **sigmoid_experts(hf),
    )


def sigmoid_experts(hf: HfConfig) -> dict[str, Any]:
    """Fields of a mixture whose keys and routing are those of DeepSeek-V3 (2024, section 2.1.2).

    Raises:
        ValueError: a key that is missing or wrong, or another routing.
    """
    hf.expect("scoring_func", "sigmoid", None)
    hf.expect("topk_method", "noaux_tc", None)
    hf.expect("moe_layer_freq", 1, None)
    layers, width = hf.num_layers, hf.number("moe_intermediate_size")
    dense = min(hf.number("first_k_dense_replace", least=0), layers)
    return dict(
        # Transformers 5 may write num_local_experts.
        num_experts=hf.num_experts("n_routed_experts", "num_local_experts"),
        expert_intermediate_size=width,
        shared_expert_intermediate_size=width * hf.number("n_shared_experts", 0, least=0),
        dense_layers=frozenset(range(dense)),
        router=Routing(
            hf.number("num_experts_per_tok"),
            score="sigmoid",
            renormalize=hf.flag("norm_topk_prob", True),
            scale=hf.number("routed_scaling_factor", 1.0, float),
            num_groups=hf.number("n_group"),
            groups_per_token=hf.number("topk_group"),
        ),
        correction_bias=True,
        float32_router=True,
        num_prediction_layers=hf.number("num_nextn_predict_layers", 0, least=0, most=MOST_PARTS),
    )


ARCHITECTURE = Architecture(
    parse_config, experts=(ExpertTensors(), FUSED), ignored=("layers.{prediction}.",)
)
