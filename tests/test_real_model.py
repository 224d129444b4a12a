"""SmolLM2-135M-Instruct against the tokens of transformers, in float32.

    TBO_REAL_MODEL=FOLDER [TBO_REAL_MODEL_MOE=FOLDER] pytest -m real_model

FOLDER holds the model; the second one the same network as a Mixtral with equal experts. The expected
tokens were written by tests/golden/make_real_model.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tbo_jax import LLM, OverlapConfig, SamplingParams

pytestmark = pytest.mark.real_model
EXPECTED = json.loads(
    (Path(__file__).parent / "golden" / "smollm2_135m_instruct.json").read_text("utf-8")
)


def folder(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    return value


def check(llm: LLM, expected) -> None:
    prompts = [row["prompt"] for row in expected]
    completions = llm.generate(prompts, SamplingParams(max_new_tokens=64))
    for row, done in zip(expected, completions, strict=True):
        assert done.error is None
        assert done.prompt_token_ids == row["prompt_token_ids"]
        assert done.token_ids == row["token_ids"]
        assert done.text == row["text"]
        assert done.finish_reason == row["finish_reason"]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_llama_gives_the_tokens_of_transformers(mode):
    llm = LLM(
        folder("TBO_REAL_MODEL"),
        devices=1,
        dtype="float32",
        overlap=OverlapConfig(mode),
        max_context=1024,
    )
    check(llm, EXPECTED)
    assert bool(llm.statistics["steps_split"]) == (mode == "on")


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("mode", ["off", "on"])
def test_mixtral_gives_the_same_tokens_on_any_devices(devices, mode):
    """Its experts are copies of the dense block, so its tokens are the dense model's."""
    llm = LLM(
        folder("TBO_REAL_MODEL_MOE"),
        devices=devices,
        dtype="float32",
        overlap=OverlapConfig(mode),
        max_context=1024,
        max_sequences=16 // devices,
        max_batched_tokens=64,
        scanned=True,  # compiles in a tenth of the time
    )
    check(llm, EXPECTED)
