"""The golden checkpoints: tiny models with the logits that transformers gives in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

DATA = Path(__file__).parent / "golden" / "data"
CASES = sorted(path.name for path in DATA.iterdir())


class Golden:
    """One case: sequences with their logits, prompts with their greedy continuations."""

    def __init__(self, name: str):
        self.folder = DATA / name
        arrays = np.load(self.folder / "golden.npz")
        sequences = range(sum(key.startswith("tokens_") for key in arrays))
        self.tokens = [arrays[f"tokens_{i}"].tolist() for i in sequences]
        self.logits = [arrays[f"logits_{i}"] for i in sequences]  # [len, V] each
        prompts = range(sum(key.startswith("prompt_") for key in arrays))
        self.prompts = [arrays[f"prompt_{i}"].tolist() for i in prompts]
        self.greedy = [arrays[f"greedy_{i}"].tolist() for i in prompts]


def with_tokenizer(name: str, folder: Path) -> Path:
    """Copy a case to `folder`, with a tokenizer whose token i reads "w<i>"."""
    shutil.copytree(DATA / name, folder, dirs_exist_ok=True)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder
