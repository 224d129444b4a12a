"""Write tiny quantised checkpoints by the tools that people use, and the logits of their weights.

    VENV/bin/python tests/golden/make_quantized.py [CASE ...]

in an environment with torch, transformers, llmcompressor (0.14) and compressed-tensors (0.20), for
"gptq" and "awq" with gptqmodel's and autoawq's modules for packing. Every case becomes a folder
tests/golden/quantized/CASE: the checkpoint as the tool wrote it, and golden.npz with

    tokens int32 [T], logits float32 [T, V]    of transformers in float32, with the weights that the
                                               tool itself decodes from what it wrote
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel
from transformers import CompressedTensorsConfig

FOLDER = Path(__file__).parent / "quantized"
CONFIG: dict[str, Any] = dict(
    vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    tie_word_embeddings=False, dtype="bfloat16", initializer_range=0.1, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "fp8_dynamic": dict(scheme="FP8_DYNAMIC"),
    "fp8_block": dict(scheme="FP8_BLOCK"),
    "w8a16": dict(scheme="W8A16"),
    "w8a8": dict(scheme="W8A8"),
    "w4a16": dict(scheme="W4A16"),
    "w4a16_asym": dict(scheme="W4A16_ASYM"),
}


def make_model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**CONFIG)
    return transformers.Qwen3ForCausalLM(config).to(dtype).eval()


def make_tokenizer() -> Any:
    """llm-compressor wants one, though nothing is calibrated here."""
    words = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


def write_compressed(name: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as plain_folder:
        make_model(len(name)).save_pretrained(plain_folder)
        make_tokenizer().save_pretrained(plain_folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(plain_folder)
        processor = transformers.AutoTokenizer.from_pretrained(plain_folder)
        recipe = QuantizationModifier(targets="Linear", ignore=["lm_head"], **WEIGHTS[name])
        oneshot(model=model, processor=processor, recipe=recipe)
        model.save_pretrained(folder, save_compressed=True)
        # compressed-tensors multiplies in the dtype of the factors: with more bits it rounds once.
        shutil.copytree(folder, exact := f"{plain_folder}/exact")
        tensors = load_file(folder / "model.safetensors")
        exact_scales = {k: v.float() for k, v in tensors.items() if k.endswith("weight_scale")}
        save_file(tensors | exact_scales, f"{exact}/model.safetensors", {"format": "pt"})
        decoded = transformers.AutoModelForCausalLM.from_pretrained(
            exact, dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(run_compressed=False),
        )  # fmt: skip
        # Its layers would quantise their inputs, too: only the weights are taken.
        weights = {k: v for k, v in decoded.state_dict().items() if k.endswith(("weight", "bias"))}
        plain = make_model(0, torch.float32)
        plain.load_state_dict({k: v.float() for k, v in weights.items()})
        write_logits(plain, folder)


def write_logits(model: Any, folder: Path) -> None:
    """Of a model whose weights are decoded."""
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 24)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0]
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens.astype(np.int32), logits=logits.numpy()
    )


def main(names: list[str]) -> None:
    for name in names or list(WEIGHTS):
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_compressed(name, folder)
        for file in folder.iterdir():
            if file.suffix not in (".json", ".safetensors", ".npz") or "generation" in file.name:
                file.unlink()
        print(name, json.loads((folder / "config.json").read_text())["quantization_config"])


if __name__ == "__main__":
    main(sys.argv[1:])
