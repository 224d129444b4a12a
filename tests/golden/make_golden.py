"""Write tiny Hugging Face checkpoints and the outputs that transformers computes from them.

    python -m venv VENV && VENV/bin/pip install -r tests/golden/requirements.txt
    VENV/bin/python tests/golden/make_golden.py [CASE ...]      # CPU wheels of torch are enough

Every case becomes a folder tests/golden/data/CASE: an ordinary checkpoint with random weights, and
golden.npz, which holds, all computed in float32 with eager attention and no cache,

    tokens_i int32 [T], logits_i float32 [T, V]    i = 0..5, one forward of the whole sequence
    prompt_i int32 [T], greedy_i int32 [16]        i = 0..2, argmax, one full forward per token

and, of a model that takes images, sequences with images in them:

    image_tokens_i int32 [T], image_positions_i int32 [3, T], image_embeds_i float32 [T, D],
    image_logits_i float32 [T, V]                  i = 0..2; embeds of tokens that are no image: 0

A seed is taken only if no choice in it is a near tie (next token, last expert routed to), so that
another implementation has to agree on all of them, and if no continuation stops or only repeats a
few tokens. Where a case is named after an option, the script also makes sure that the option moves
the logits.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

DATA = Path(__file__).parent / "data"
VOCAB = 160
LENGTHS = (1, 2, 7, 16, 33, 50)
PROMPT_LENGTHS = (3, 12, 40)
NEW_TOKENS = 16
MIN_TOKEN_GAP = 0.02  # logits, best against second best
MIN_ROUTER_GAP = 1e-3  # router logits, last expert taken against first one left out
MIN_SCORE_GAP = 1e-4  # the same in scores between 0 and 1, which have a bias added
MIN_DISTINCT = 6  # tokens in a continuation
MIN_EFFECT = 0.05  # logits, largest change when the option is taken away

COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=80, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False,
    attention_dropout=0.0, initializer_range=0.02, use_cache=True, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA = COMMON | dict(
    model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False, mlp_bias=False
)
# The window is shorter than most sequences, and only the second layer has it.
QWEN2 = COMMON | dict(
    model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=48,
    intermediate_size=48, tie_word_embeddings=True, rope_theta=1000000.0, use_sliding_window=True, sliding_window=8,
    max_window_layers=1,
)  # fmt: skip
# The window is in every layer; head_dim (16) is not hidden_size / num_attention_heads (12).
MISTRAL = COMMON | dict(
    model_type="mistral", architectures=["MistralForCausalLM"], hidden_size=48, head_dim=16,
    intermediate_size=32, tie_word_embeddings=True, sliding_window=8,
)  # fmt: skip
# Hidden size 48 makes head_dim (16) differ from hidden_size / num_attention_heads (12), as it does
# in published Qwen3 checkpoints.
QWEN3 = COMMON | dict(
    model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=48, head_dim=16,
    rms_norm_eps=1e-6, rope_theta=1000000.0, attention_bias=False, tie_word_embeddings=True,
    use_sliding_window=False, sliding_window=None, max_window_layers=2,
)  # fmt: skip
QWEN3_MOE = QWEN3 | dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False,
    router_aux_loss_coef=0.001,
)  # fmt: skip
# Dense layers 0 and 2 by decoder_sparse_step, layer 1 by mlp_only_layers; layer 3 has experts.
QWEN3_MOE_MIXED = QWEN3_MOE | dict(
    num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=False,
    intermediate_size=48,
)  # fmt: skip
MIXTRAL = COMMON | dict(
    model_type="mixtral", architectures=["MixtralForCausalLM"], intermediate_size=32,
    rope_theta=1000000.0, num_local_experts=8, num_experts_per_tok=2, output_router_logits=False,
    router_aux_loss_coef=0.02, sliding_window=None,
)  # fmt: skip
QWEN2_MOE = COMMON | dict(
    model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], hidden_size=48,
    intermediate_size=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=40, norm_topk_prob=False, qkv_bias=True, decoder_sparse_step=1,
    mlp_only_layers=[], output_router_logits=False, router_aux_loss_coef=0.001,
    use_sliding_window=False, sliding_window=None, max_window_layers=2,
)  # fmt: skip
# A dense layer, then two with experts: 3 of 12, from the 2 best of 4 groups.
GLM4_MOE = COMMON | dict(
    model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], hidden_size=48, head_dim=16,
    intermediate_size=64, num_hidden_layers=3, attention_bias=True, use_qk_norm=True,
    partial_rotary_factor=0.5, n_routed_experts=12, num_experts_per_tok=3,
    moe_intermediate_size=16, n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2,
    norm_topk_prob=True, routed_scaling_factor=1.5, num_nextn_predict_layers=1,
)  # fmt: skip
# One block of a vision tower that nothing runs, so that its tensors are there to be passed over.
QWEN2_VL = COMMON | dict(
    model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"], image_token_id=3,
    video_token_id=4, vision_start_token_id=5, vision_end_token_id=6, use_sliding_window=False,
    sliding_window=None, max_window_layers=2, rope_theta=100.0,
    rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]),
    vision_config=dict(
        model_type="qwen2_vl_vision", depth=1, embed_dim=16, num_heads=2, hidden_size=64,
        mlp_ratio=1, patch_size=2, spatial_merge_size=2, temporal_patch_size=1,
    ),
)  # fmt: skip
ERNIE4_5 = COMMON | dict(
    model_type="ernie4_5", architectures=["Ernie4_5ForCausalLM"], hidden_size=48, head_dim=16,
    intermediate_size=64, tie_word_embeddings=True, use_bias=True, rope_theta=500000.0,
    pad_token_id=0,
)  # fmt: skip
# Experts in layer 1 of 3 only.
ERNIE4_5_MOE = COMMON | dict(
    model_type="ernie4_5_moe", architectures=["Ernie4_5_MoeForCausalLM"], hidden_size=48,
    num_attention_heads=4, num_key_value_heads=1, intermediate_size=48, num_hidden_layers=3,
    tie_word_embeddings=True, use_bias=False, rope_theta=500000.0, pad_token_id=0,
    moe_num_experts=8, moe_k=3, moe_intermediate_size=16, moe_num_shared_experts=2,
    moe_layer_start_index=1, moe_layer_end_index=1, moe_layer_interval=1, moe_norm_min=1e-12,
    moe_use_aux_free=True, num_nextn_predict_layers=1, output_router_logits=False,
    router_aux_loss_coef=0.001,
)  # fmt: skip
# Two layers with experts behind a dense one. A head's query and key have 16 + 8 elements, its value
# 12, the cache a row of 32 + 8.
DEEPSEEK_V3 = COMMON | dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], hidden_size=48,
    num_key_value_heads=4, intermediate_size=64, num_hidden_layers=3, attention_bias=True,
    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=2,
    first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True,
    routed_scaling_factor=2.5, num_nextn_predict_layers=1,
)  # fmt: skip
# 6 heads of 16 beside a hidden size of 64. The window is shorter than most sequences, and the limit
# low enough to be reached.
GPT_OSS = COMMON | dict(
    model_type="gpt_oss", architectures=["GptOssForCausalLM"], head_dim=16, num_attention_heads=6,
    intermediate_size=32, num_local_experts=8, num_experts_per_tok=3, sliding_window=8,
    attention_bias=True, swiglu_limit=1.5, rope_theta=150000.0, output_router_logits=False,
    router_aux_loss_coef=0.02,
    rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0,
        beta_slow=0.5, truncate=False,
    ),
)  # fmt: skip
WINDOW_LAST = ["full_attention", "sliding_attention"]  # the other way round than by default
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
# "type" is the key that older checkpoints have in place of "rope_type".
LINEAR = dict(type="linear", factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
YARN_FULL = YARN | dict(
    beta_fast=8.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.5, truncate=False
)
YARN_DEEPSEEK = YARN | dict(mscale=1.0, mscale_all_dim=0.7)


def tied_llama(**options: Any) -> dict[str, Any]:
    return LLAMA | dict(tie_word_embeddings=True) | options


@dataclass(frozen=True)
class Case:
    """One fixture; `without` holds the config entries that take its option away."""

    config: dict[str, Any]
    without: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16  # of the stored weights
    shard_size: str = "1GB"
    spread: float = 0.15  # standard deviation of most weights; more of it makes livelier text
    # Keys of config.json: 4 = rope_theta, rope_scaling, torch_dtype, num_experts, as in most
    # published checkpoints; 5 = rope_parameters, dtype, num_local_experts, as transformers 5 saves.
    style: int = 4
    image_grids: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # of each sequence with images
    block: tuple[int, int] | None = None  # projections in float8 with a factor for each such block
    mxfp4: bool = False  # experts in that format


NO_SCALING = dict(rope_scaling=None)
NO_BIAS = dict(attention_bias=False, mlp_bias=False)
CASES = {
    "llama": Case(LLAMA, dtype=torch.float32),
    "llama_tied_bf16": Case(tied_llama(head_dim=16)),
    "llama_bias": Case(LLAMA | dict(attention_bias=True, mlp_bias=True), NO_BIAS),
    "llama_rope_llama3": Case(
        tied_llama(rope_scaling=LLAMA3, eos_token_id=[2, 3]), NO_SCALING, style=5
    ),
    "llama_rope_linear": Case(tied_llama(rope_scaling=LINEAR), NO_SCALING),
    "llama_rope_yarn": Case(tied_llama(rope_scaling=YARN_FULL), dict(rope_scaling=YARN)),
    "llama_sharded": Case(LLAMA, shard_size="60KB"),
    "qwen3": Case(QWEN3, style=5),
    "qwen3_rope_yarn": Case(QWEN3 | dict(rope_scaling=YARN), NO_SCALING),
    "qwen3_moe": Case(QWEN3_MOE, dict(norm_topk_prob=False), shard_size="80KB"),
    "qwen3_moe_mixed": Case(QWEN3_MOE_MIXED, dict(norm_topk_prob=True), style=5),
    "mistral": Case(MISTRAL, dict(sliding_window=None), style=5),
    "mixtral": Case(MIXTRAL),
    "qwen2": Case(QWEN2, dict(use_sliding_window=False)),
    "qwen2_moe": Case(QWEN2_MOE, dict(norm_topk_prob=True)),
    "glm4_moe": Case(GLM4_MOE, dict(n_group=1, topk_group=1)),
    "qwen2_vl": Case(
        QWEN2_VL,
        image_grids=(((1, 3, 4),), ((2, 2, 2), (1, 2, 5)), ((1, 5, 5),)),
    ),
    "ernie4_5": Case(ERNIE4_5, style=5, spread=0.25),
    "gpt_oss": Case(GPT_OSS, dict(sliding_window=128)),
    "gpt_oss_mxfp4": Case(
        GPT_OSS | dict(layer_types=WINDOW_LAST), dict(swiglu_limit=7.0), style=5, mxfp4=True
    ),
    "ernie4_5_moe": Case(ERNIE4_5_MOE, dict(rope_theta=10000.0), spread=0.25),
    "deepseek_v3": Case(DEEPSEEK_V3 | dict(rope_scaling=YARN_DEEPSEEK), dict(rope_scaling=YARN)),
    "deepseek_v3_fp8": Case(
        DEEPSEEK_V3 | dict(q_lora_rank=None, attention_bias=False, n_group=1, topk_group=1),
        dict(rope_interleave=False),
        dtype=torch.float32,
        block=(20, 12),
    ),
}


class UnfitSeedError(Exception):
    """The seed led to a choice that rounding could turn, a stop token, or a dull continuation."""


def build(config: dict[str, Any]) -> Any:
    """An untrained float32 model of `config`, on the plain code paths of transformers."""
    made = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    return loader(config).from_config(made, dtype=torch.float32, **plain(config)).eval()


def loader(config: dict[str, Any]) -> Any:
    if "vision_config" in config:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def plain(config: dict[str, Any]) -> dict[str, str]:
    moe = any(key in config for key in ("num_experts_per_tok", "moe_k"))
    return dict(attn_implementation="eager") | (dict(experts_implementation="eager") if moe else {})


@torch.no_grad()
def randomize(model: Any, generator: torch.Generator, case: Case) -> dict[str, torch.Tensor]:
    """Random weights, rounded to the dtype that they are stored in.

    Returns those that are stored in another form, by their names there.
    """
    packed: dict[str, torch.Tensor] = {}
    for name, weight in sorted([*model.named_parameters(), *correction_biases(model)]):
        noise = torch.randn(weight.shape, generator=generator)
        if case.mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = draw_mxfp4(weight.shape, generator)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            continue
        if "norm" in name:
            value = 1 + 0.25 * noise
        elif "correction_bias" in name:
            value = 0.1 * noise
        elif name.endswith(("bias", "mlp.gate.weight", "mlp.router.weight")):
            value = 0.3 * noise
        elif name.endswith("sinks"):
            value = 1 + noise
        else:
            value = case.spread * noise
        if case.block and "_proj" in name:
            value = round_to_blocks(name, value, case.block)
        weight.copy_(value.to(case.dtype))
    return packed


def draw_mxfp4(shape: torch.Size, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales, uint8, of a weight [E, in, out]."""
    experts, fan_in, fan_out = shape
    groups = experts, fan_out, fan_in // 32
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator)
    scales = torch.randint(121, 125, groups, generator=generator)  # 2 ** -6 to 2 ** -3
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def block_factors(rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    """A factor for each block of a matrix, from its place alone: what is rounded stays so."""
    i = torch.arange(-(-rows // block[0]))[:, None]
    j = torch.arange(-(-columns // block[1]))
    return (0.0015 + 0.0001 * ((3 * i + 5 * j) % 7)).to(torch.float32)


def to_blocks(
    matrix: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matrices [..., out, in] in float8, the factors of their blocks, and what the two stand for."""
    rows, columns = matrix.shape[-2:]
    factors = block_factors(rows, columns, block)
    spread = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)
    spread = spread[:, :columns]
    small = (matrix / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return small, factors, small.float() * spread


def round_to_blocks(name: str, weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What float8 keeps of a weight of the model, whose experts are fused."""
    if name.endswith("gate_up_proj"):  # two matrices in the checkpoint
        weight = weight.unflatten(1, (2, -1))
        return to_blocks(weight, block)[2].flatten(1, 2)
    return to_blocks(weight, block)[2]


def quantize(folder: Path, block: tuple[int, int]) -> None:
    """Write the projections of a checkpoint in float8, without loss, as DeepSeek-V3 has them."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")
                     or name.endswith("_with_mqa.weight")]:  # fmt: skip
            small, factors, value = to_blocks(tensors[name], block)
            assert torch.equal(value, tensors[name]), name
            tensors |= {name: small, name + "_scale_inv": factors}
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=list(block)
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def correction_biases(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The routers' correction biases that are not parameters."""
    return [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]


@contextlib.contextmanager
def watch_routers(model: Any) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """Collects a (router, logits [T, E]) for every call of a router."""
    seen: list[tuple[Any, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda router, _, out: seen.append((router, out[0])))
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def gap(values: torch.Tensor, taken: int) -> float:
    """The least distance, over rows, from the last of the `taken` largest to the one after it."""
    ranked = values.sort(dim=-1, descending=True).values
    return float((ranked[:, taken - 1] - ranked[:, taken]).min())


def is_near_tie(router: Any, logits: torch.Tensor) -> bool:
    """Whether rounding could change the experts, or the groups, that a token goes to."""
    if hasattr(router, "moe_statics"):  # ERNIE
        return gap(router.moe_statics(logits.softmax(-1)), router.top_k) < MIN_SCORE_GAP
    if not hasattr(router, "e_score_correction_bias"):
        return gap(logits, router.top_k) < MIN_ROUTER_GAP
    scores = logits.sigmoid() + router.e_score_correction_bias
    if router.num_group > 1:
        grouped = scores.unflatten(-1, (router.num_group, -1))
        groups = grouped.topk(2, dim=-1).values.sum(-1)
        if gap(groups, router.topk_group) < MIN_SCORE_GAP:
            return True
        chosen = groups.topk(router.topk_group, dim=-1).indices
        left_out = torch.ones_like(groups).scatter(1, chosen, 0)[..., None].bool()
        scores = grouped.masked_fill(left_out, -torch.inf).flatten(1)
    return gap(scores, router.top_k) < MIN_SCORE_GAP


@torch.no_grad()
def forward(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of `tokens` [T]; UnfitSeedError if the choice of experts is a near tie."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with watch_routers(model) as routed:
        out = model(input_ids=ids, use_cache=False)
    if any(is_near_tie(*seen) for seen in routed):
        raise UnfitSeedError
    logits: np.ndarray = out.logits[0].numpy()
    return logits


def greedy(model: Any, prompt: np.ndarray, stop: set[int]) -> np.ndarray:
    """`NEW_TOKENS` argmax tokens after `prompt`."""
    tokens = prompt
    for _ in range(NEW_TOKENS):
        last = forward(model, tokens)[-1]
        second, best = np.sort(last)[-2:]
        if best - second < MIN_TOKEN_GAP or int(last.argmax()) in stop:
            raise UnfitSeedError
        tokens = np.append(tokens, np.int32(last.argmax()))
    if len(set(tokens[len(prompt) :].tolist())) < MIN_DISTINCT:
        raise UnfitSeedError
    return tokens[len(prompt) :]


def image_sequence(
    rng: np.random.Generator, grids: tuple[tuple[int, int, int], ...], image: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [T] and positions [3, T]: text, and before each further text an image.

    The positions are those of Wang et al. 2024: text counts on in all three; an image counts in
    time, height and width from where the text stopped, and text goes on after the largest.
    """
    ids: list[int] = []
    positions: list[np.ndarray] = []
    start = 0
    for grid in (None, *grids):
        if grid is not None:
            ids += [image] * int(np.prod(grid))
            positions.append(np.indices(grid).reshape(3, -1) + start)
            start += max(grid)
        text = int(rng.integers(2, 6))
        ids += rng.integers(7, VOCAB, text).tolist()
        positions.append(np.arange(start, start + text)[None].repeat(3, 0))
        start += text
    return np.array(ids, np.int32), np.concatenate(positions, 1).astype(np.int32)


@torch.no_grad()
def forward_images(
    model: Any, tokens: np.ndarray, positions: np.ndarray, embeds: np.ndarray
) -> np.ndarray:
    """Logits [T, V] of tokens [T] at positions [3, T], those of images with embeds [T, D]."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    given = (ids == model.config.image_token_id)[..., None]
    looked_up = model.get_input_embeddings()(ids)
    out = model(
        inputs_embeds=torch.where(given, torch.from_numpy(embeds)[None], looked_up),
        position_ids=torch.from_numpy(positions.astype(np.int64))[:, None],
        use_cache=False,
    )
    logits: np.ndarray = out.logits[0].numpy()
    return logits


def compute(
    case: Case, name: str, seed: int
) -> tuple[Any, dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """The model of this seed, its weights in another form, and the arrays of golden.npz."""
    number = zlib.crc32(name.encode()) + seed
    model = build(case.config)
    packed = randomize(model, torch.Generator().manual_seed(number), case)
    rng = np.random.default_rng(number)
    arrays: dict[str, np.ndarray] = {}
    for i, length in enumerate(LENGTHS):
        arrays[f"tokens_{i}"] = rng.integers(4, VOCAB, length, dtype=np.int32)
        arrays[f"logits_{i}"] = forward(model, arrays[f"tokens_{i}"])
    stop = set(np.atleast_1d(case.config["eos_token_id"]).tolist())
    for i, length in enumerate(PROMPT_LENGTHS):
        arrays[f"prompt_{i}"] = rng.integers(4, VOCAB, length, dtype=np.int32)
        arrays[f"greedy_{i}"] = greedy(model, arrays[f"prompt_{i}"], stop)
    for i, grids in enumerate(case.image_grids):
        image = case.config["image_token_id"]
        tokens, positions = image_sequence(rng, grids, image)
        embeds = rng.normal(0, case.spread, (len(tokens), case.config["hidden_size"]))
        embeds = np.where((tokens == image)[:, None], embeds, 0).astype(np.float32)
        arrays |= {f"image_tokens_{i}": tokens, f"image_positions_{i}": positions}
        arrays |= {f"image_embeds_{i}": embeds}
        arrays[f"image_logits_{i}"] = forward_images(model, tokens, positions, embeds)
    return model, packed, arrays


def save(case: Case, model: Any, packed: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the checkpoint as it is published: per-expert tensors, but for gpt-oss.

    And config.json in the style of the case.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # A copy, because the cast also rounds the rotary frequencies of the model.
    copy.deepcopy(model).to(case.dtype).save_pretrained(folder, max_shard_size=case.shard_size)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            names = [k for k in tensors.keys() if not k.startswith("visual.")]  # noqa: SIM118
            fused = [k for k in names if len(tensors.get_slice(k).get_shape()) > 2]
        if case.config["model_type"] != "gpt_oss":
            assert not fused, f"{file}: fused experts {fused}"
    if case.style == 4:
        config = case.config | dict(torch_dtype=str(case.dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if packed:
        file = folder / "model.safetensors"
        kept = {k: v for k, v in load_file(file).items() if f"{k}_blocks" not in packed}
        save_file(kept | packed, file, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = dict(quant_method="mxfp4")
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check(case: Case, model: Any, arrays: dict[str, np.ndarray], folder: Path) -> str:
    """Reload the folder and compare; say how far the logits move without the option of the case."""
    options: dict[str, Any] = plain(case.config)
    if case.mxfp4:
        options |= dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
    auto = loader(case.config)
    again = auto.from_pretrained(folder, dtype=torch.float32, **options).eval()
    for i in range(len(LENGTHS)):
        # Not bit for bit: torch's matrix product depends on how the weights lie in memory.
        np.testing.assert_allclose(
            forward(again, arrays[f"tokens_{i}"]), arrays[f"logits_{i}"], rtol=0, atol=2e-5
        )
    said = []
    if case.without:
        other = build(case.config | case.without)
        other.load_state_dict(model.state_dict(), strict=False)
        said.append(f"the option moves {effect(other, arrays)}")
    for i in range(len(case.image_grids)):
        given = [arrays[f"image_{name}_{i}"] for name in ("tokens", "positions", "embeds")]
        logits = arrays[f"image_logits_{i}"]
        np.testing.assert_allclose(forward_images(again, *given), logits, rtol=0, atol=2e-5)
        given[1] = np.arange(len(given[0]))[None].repeat(3, 0)
        moved = np.abs(forward_images(model, *given) - logits).max()
        assert moved > MIN_EFFECT, f"places in images move the logits by {moved} only"
        said.append(f"places in images move logits by {moved:.2f}")
    for part in ("correction_bias", "sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias"):
        other = copy.deepcopy(model)
        found = [*other.named_parameters(), *other.named_buffers()]
        found = [value for name, value in found if part in name]
        for value in found:
            value.data.zero_()
        if found:
            said.append(f"{part} moves {effect(other, arrays)}")
    return ", ".join(said)


def effect(other: Any, arrays: dict[str, np.ndarray]) -> str:
    """What changes with the model `other`; AssertionError if nothing does."""
    i = LENGTHS.index(max(LENGTHS))
    try:
        moved = np.abs(forward(other, arrays[f"tokens_{i}"]) - arrays[f"logits_{i}"]).max()
    except UnfitSeedError:
        return "the routing"
    assert moved > MIN_EFFECT, f"logits move by {moved} only"
    return f"logits by {moved:.2f}"


def main(names: list[str]) -> None:
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    transformers.utils.logging.disable_progress_bar()
    for name in names or CASES:
        case, folder = CASES[name], DATA / name
        for seed in range(1000):
            try:
                model, packed, arrays = compute(case, name, seed)
                break
            except UnfitSeedError:
                continue
        else:
            raise SystemExit(f"{name}: no seed fits")
        save(case, model, packed, folder)
        np.savez_compressed(folder / "golden.npz", **arrays)
        effect = check(case, model, arrays, folder)
        if case.block:
            quantize(folder, case.block)
        size = sum(f.stat().st_size for f in folder.iterdir()) / 1000
        print(f"{name:20} {size:6.1f} kB  seed {seed:3}  {effect}")


if __name__ == "__main__":
    main(sys.argv[1:])
