from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer, train_byte_level

from tbo_jax.text import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds a byte-level `tokenizer.json` and nothing else."""
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Callable[[str, str], None]:
    """Writes a text file into `folder`."""

    def write_file(name: str, text: str) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return write_file
