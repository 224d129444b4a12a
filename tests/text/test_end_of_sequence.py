from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tbo_jax.text import Tokenizer, TokenizerError, end_of_sequence_ids

Write = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {5}),
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 6}, {5, 7}),
        ({}, {"eos_token_id": 0}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": [6, 8]}, {6, 8}),
        (None, {"eos_token_id": None}, {1}),
        (None, None, {1}),
    ],
)
def test_first_file_that_names_ids_decides(
    tmp_path: Path, byte_level: Tokenizer, generation: Any, config: Any, expected: set[int]
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert end_of_sequence_ids(tmp_path, byte_level) == expected


def test_no_id_anywhere_gives_the_empty_set(tmp_path: Path, sentencepiece: Tokenizer) -> None:
    assert end_of_sequence_ids(tmp_path, sentencepiece) == frozenset()


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [], [1, "2"], [None], {"id": 2}])
def test_other_types_are_refused(folder: Path, write: Write, value: Any) -> None:
    write("generation_config.json", json.dumps({"eos_token_id": value}))
    with pytest.raises(TokenizerError, match=r"generation_config.json: eos_token_id: expected"):
        end_of_sequence_ids(folder, Tokenizer.from_folder(folder))
