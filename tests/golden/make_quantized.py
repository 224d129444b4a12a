"""Write tiny quantised checkpoints by the tools that people use, and the logits of their weights.

    VENV/bin/python tests/golden/make_quantized.py CASE ...

in an environment with torch, transformers (5.24) and the tool of the case: llmcompressor (0.14) with
compressed-tensors (0.20); gptqmodel (7.7), whose source builds without CUDA; auto-round (0.16) beside
gptqmodel; nvidia-modelopt (0.47). Every case becomes a folder tests/golden/quantized/CASE: the
checkpoint as the tool wrote it, and golden.npz with

    tokens int32 [T], logits float32 [T, V]    of transformers in float32, with the weights that the
                                               tool itself decodes from what it wrote
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel

FOLDER = Path(__file__).parent / "quantized"
CONFIG: dict[str, Any] = dict(
    vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    tie_word_embeddings=False, dtype="bfloat16", initializer_range=0.1, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def make_model(seed: int, dtype: torch.dtype = torch.bfloat16, **other: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**CONFIG | other)
    return transformers.Qwen3ForCausalLM(config).to(dtype).eval()


def make_tokenizer() -> Any:
    """The tools want one."""
    words = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w2"
    )


def draw_texts() -> list[list[int]]:
    """For the tools that look at activations."""
    drawn = random.Random(0)
    return [[drawn.randrange(CONFIG["vocab_size"]) for _ in range(48)] for _ in range(64)]


def write_compressed(folder: Path, *, name: str, **recipe: Any) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import CompressedTensorsConfig

    with tempfile.TemporaryDirectory() as plain_folder:
        make_model(len(name)).save_pretrained(plain_folder)
        make_tokenizer().save_pretrained(plain_folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(plain_folder)
        processor = transformers.AutoTokenizer.from_pretrained(plain_folder)
        modifier = QuantizationModifier(targets="Linear", ignore=["lm_head"], **recipe)
        oneshot(model=model, processor=processor, recipe=modifier)
        model.save_pretrained(folder, save_compressed=True)
        # compressed-tensors multiplies in the dtype of the factors: with more bits it rounds once.
        shutil.copytree(folder, exact := f"{plain_folder}/exact")
        tensors = load_file(folder / "model.safetensors")
        exact_scales = {
            k: v.float()
            for k, v in tensors.items()
            if k.endswith("weight_scale") and v.is_floating_point()
        }
        save_file(tensors | exact_scales, f"{exact}/model.safetensors", {"format": "pt"})
        decoded = transformers.AutoModelForCausalLM.from_pretrained(
            exact, dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(run_compressed=False),
        )  # fmt: skip
        # Its layers would quantise their inputs, too: only the weights are taken.
        weights = {k: v for k, v in decoded.state_dict().items() if k.endswith(("weight", "bias"))}
        write_logits(weights, folder)


def write_gptqmodel(folder: Path, **options: Any) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    with tempfile.TemporaryDirectory() as plain_folder:
        make_model(3).save_pretrained(plain_folder)
        make_tokenizer().save_pretrained(plain_folder)
        model = GPTQModel.load(plain_folder, QuantizeConfig(bits=4, **options), device="cpu")
        texts = [{"input_ids": text, "attention_mask": [1] * len(text)} for text in draw_texts()]
        model.quantize(texts, batch_size=1)
        model.save(str(folder))
    if options.get("quant_method") == "awq":
        write_logits(awq_weights(folder), folder)
        return
    # Of itself it would round the factors to bfloat16.
    read = GPTQModel.load(
        str(folder), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16
    ).model
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if "weight" in k}
    for name, module in read.named_modules():
        if hasattr(module, "dequantize_weight"):
            module.scales = module.scales.float()  # it multiplies in their dtype
            weights[name + ".weight"] = module.dequantize_weight().T.contiguous()
    write_logits(weights, folder)


def awq_weights(folder: Path) -> dict[str, torch.Tensor]:
    """As gptqmodel decodes them."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tensors = load_file(folder / "model.safetensors")
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["group_size"]
    for name in [name for name in tensors if name.endswith(".qweight")]:
        base = name.removesuffix("qweight")
        numbers, zeros, scales = (tensors.pop(base + k) for k in ("qweight", "qzeros", "scales"))
        decoded = dequantize_gemm(numbers, zeros, scales.float(), 4, group)
        tensors[base + "weight"] = decoded.T.contiguous()
    return tensors


def write_autoround(folder: Path, *, form: str, **options: Any) -> None:
    from auto_round import AutoRound

    with tempfile.TemporaryDirectory() as inner:
        AutoRound(
            make_model(4), make_tokenizer(), iters=0, device_map="cpu", **options
        ).quantize_and_save(inner, format=form)
        (written,) = Path(inner).rglob("model.safetensors")
        shutil.copytree(written.parent, folder, dirs_exist_ok=True)
    write_logits(awq_weights(folder), folder)


def write_modelopt(folder: Path, *, config: str, decode: Callable[..., torch.Tensor]) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: Any) -> None:
        for text in draw_texts()[:16]:
            model(torch.tensor([text]))

    with tempfile.TemporaryDirectory() as plain_folder:
        make_model(5).save_pretrained(plain_folder)  # which names the architecture
        plain = transformers.AutoModelForCausalLM.from_pretrained(plain_folder)
    model = mtq.quantize(plain, getattr(mtq, config), calibrate)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        weight = name.removesuffix("_scale")
        tensors[weight] = decode(tensors[weight], tensors[name])
    write_logits(tensors, folder)


def modelopt_fp8(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    each = scale if scale.ndim == 0 else scale[:, None]
    held = FP8QTensor(numbers.shape, torch.float32, numbers)
    return held.dequantize(torch.float32, scale=each)


def modelopt_mxfp4(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    shape = torch.Size((numbers.shape[0], 2 * numbers.shape[1]))
    held = MXFP4QTensor(shape, torch.float32, numbers)
    return held.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})


def write_transformers_fp8(folder: Path) -> None:
    """DeepSeek's blocks. The check for a GPU is passed over: it writes without one."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    with tempfile.TemporaryDirectory() as plain_folder:
        make_model(6, num_key_value_heads=4).save_pretrained(plain_folder)
        with_check = FineGrainedFP8HfQuantizer.validate_environment
        FineGrainedFP8HfQuantizer.validate_environment = lambda *given, **named: None
        config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain_folder, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
        )
        model.save_pretrained(folder)
        FineGrainedFP8HfQuantizer.validate_environment = with_check
    read = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    write_logits(read.state_dict(), folder)


def write_logits(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Of a model with decoded weights; what else is among them does not count."""
    heads = json.loads((folder / "config.json").read_text())["num_key_value_heads"]
    model = make_model(0, torch.float32, num_key_value_heads=heads)
    wanted = model.state_dict()
    model.load_state_dict({k: weights[k].float() for k in wanted})
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 24)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0]
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens.astype(np.int32), logits=logits.numpy()
    )


CASES: dict[str, Callable[[Path], None]] = {
    "fp8_dynamic": partial(write_compressed, name="fp8_dynamic", scheme="FP8_DYNAMIC"),
    "fp8_block": partial(write_compressed, name="fp8_block", scheme="FP8_BLOCK"),
    "w8a16": partial(write_compressed, name="w8a16", scheme="W8A16"),
    "w8a8": partial(write_compressed, name="w8a8", scheme="W8A8"),
    "w4a16": partial(write_compressed, name="w4a16", scheme="W4A16"),
    "w4a16_asym": partial(write_compressed, name="w4a16_asym", scheme="W4A16_ASYM"),
    "mxfp4a16": partial(write_compressed, name="mxfp4a16", scheme="MXFP4A16"),
    "gptq": partial(write_gptqmodel, group_size=64, sym=True, desc_act=False),
    "gptq_asym": partial(write_gptqmodel, group_size=64, sym=False, desc_act=False),
    "gptq_v2_asym": partial(
        write_gptqmodel, group_size=64, sym=False, desc_act=False, format="gptq_v2"
    ),
    "gptq_act_order": partial(
        write_gptqmodel, group_size=64, sym=True, desc_act=True, act_group_aware=False
    ),
    "awq": partial(write_gptqmodel, group_size=64, sym=False, quant_method="awq", format="gemm"),
    "awq_autoround": partial(write_autoround, form="auto_awq", bits=4, group_size=64, sym=False),
    "fp8_modelopt": partial(write_modelopt, config="FP8_DEFAULT_CFG", decode=modelopt_fp8),
    "fp8_modelopt_channel": partial(
        write_modelopt, config="FP8_PER_CHANNEL_PER_TOKEN_CFG", decode=modelopt_fp8
    ),
    "mxfp4_modelopt": partial(write_modelopt, config="MXFP4_DEFAULT_CFG", decode=modelopt_mxfp4),
    "fp8_transformers": write_transformers_fp8,
}


def main(names: list[str]) -> None:
    for name in names:
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        CASES[name](folder)
        for file in folder.iterdir():
            if file.suffix not in (".json", ".safetensors", ".npz") or (
                file.name.startswith(("generation", "token", "quanti", "recipe"))
            ):
                file.unlink()
        print(name, json.loads((folder / "config.json").read_text())["quantization_config"])


if __name__ == "__main__":
    main(sys.argv[1:])
