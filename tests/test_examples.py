"""The example programs, on tiny models."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tbo_jax import LLM, OverlapConfig, SamplingParams
from tests.golden_cases import Golden, with_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
GOLDEN = Golden("qwen3_moe")
PROMPTS = [" ".join(f"w{t}" for t in prompt) for prompt in GOLDEN.prompts]


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name, as when it is run from its folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_bring_your_own_model():
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "bring_your_own_model.py")],
        env=os.environ | {"USE_TBO": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "4 devices, 2 micro-batch(es), 11 barriers" in result.stdout
    difference = float(result.stdout.split()[-1])
    assert 0 <= difference < 1e-5


def test_bring_your_own_model_decides_nothing(example, monkeypatch):
    monkeypatch.setenv("USE_TBO", "auto")
    with pytest.raises(SystemExit, match="USE_TBO=auto: .* expected 0 or 1"):
        example("bring_your_own_model").main()


@pytest.mark.slow
def test_train_writes_a_model_and_resumes_on_more_devices(example, monkeypatch, tmp_path):
    train = example("train")
    text = tmp_path / "text.txt"
    chapter = "The ship went down to the sea in the evening, and the men sang as they rowed. "
    text.write_text("\n\n\n\n".join(f"Chapter {i}\n\n{chapter * 12}" for i in range(30)))
    out = tmp_path / "model"
    small = dict(
        out=out, source=str(text), batch=4, length=8, vocab_size=300, hidden=64, layers=1,
        experts=8, expert_width=16, save_every=4, quiet=True,
    )  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        train.main(train.Arguments(steps=4, devices=1, **small))
        monkeypatch.setenv("USE_TBO", "1")
        train.main(train.Arguments(steps=8, devices=2, **small))
    log = [json.loads(line) for line in (out / "state" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [4, 8]
    assert log[1]["loss"] < log[0]["loss"]
    llm = LLM(
        out, devices=1, overlap=OverlapConfig(), compilation_cache=False,
        max_sequences=1, max_batched_tokens=16,
    )  # fmt: skip
    (done,) = llm.generate(["The ship"], SamplingParams(max_new_tokens=4))
    assert done.error is None
    assert len(done.token_ids) == 4
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(SystemExit, match="another model shape"),
    ):
        train.main(train.Arguments(steps=9, devices=2, **(small | {"hidden": 128})))


@pytest.mark.parametrize(
    ("use_tbo", "batch", "message"),
    [
        ("auto", 4, "USE_TBO=auto: the engine decides .* expected 0 or 1"),
        ("maybe", 4, "USE_TBO=maybe is not understood"),
        ("1", 6, r"6 sequences a step .* 2 device\(s\) with 2 micro.*: expected a multiple of 4"),
    ],
)
def test_train_refuses_before_it_begins(example, monkeypatch, tmp_path, use_tbo, batch, message):
    train = example("train")
    monkeypatch.setenv("USE_TBO", use_tbo)
    out = tmp_path / "model"
    small = dict(hidden=64, layers=1, experts=8, expert_width=16, quiet=True)
    with pytest.raises(ValueError, match=message):
        train.main(train.Arguments(out=out, batch=batch, devices=2, **small))
    assert not out.exists()
