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
import tyro

from tbo_jax import LLM, OverlapConfig, SamplingParams, TokenEvent
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


def run_decode(decode, *words: object) -> int:
    return decode.decode(tyro.cli(decode.Arguments, args=list(map(str, words))))


def test_decode_json(example, folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("USE_TBO", "1")
    (tmp_path / "prompts.txt").write_text(f"{PROMPTS[1]}\n\n{'w9 ' * 200}\n")
    status = run_decode(
        example("decode"),
        *("--model", folder, "--prompt", PROMPTS[0], "--prompts-file", tmp_path / "prompts.txt"),
        *("--max-new-tokens", 8, "--devices", 2, "--page-size", 4, "--json", "--quiet"),
    )
    out = capsys.readouterr()
    rows = [json.loads(line) for line in out.out.splitlines()]
    assert status == 1  # one prompt does not fit the context; the others are complete
    assert [row["token_ids"] for row in rows[:2]] == [g[:8] for g in GOLDEN.greedy[:2]]
    assert [row["prompt_token_ids"] for row in rows[:2]] == GOLDEN.prompts[:2]
    assert rows[0]["text"] == " ".join(f"w{t}" for t in GOLDEN.greedy[0][:8])
    assert [row["finish_reason"] for row in rows[:3]] == ["length", "length", "error"]
    assert "prompt of 200 tokens" in rows[2]["error"]
    assert "prompt 2" in out.err
    stats = rows[3]["stats"]
    assert (stats["use_tbo"], stats["devices"], stats["generated_tokens"]) == (1, 2, 16)
    assert 0 < stats["steps_split"] <= stats["steps"]
    assert {"seconds", "tokens_per_second", "compile_seconds"} <= stats.keys()


def test_decode_summary_says_what_was_split(example):
    stats = dict(
        generated_tokens=8, seconds=2.0, tokens_per_second=4.0, steps=9, steps_split=3, devices=2,
        platform="cpu", compile_seconds=1.0, speculate=0,
    )  # fmt: skip
    summary = example("decode").summary
    assert " 3 split, USE_TBO=1; " in summary(stats | {"use_tbo": 1, "decisions": {}})
    drafts = dict(
        speculate=2, drafted_tokens=8, accepted_tokens=6, acceptance_rate=0.75, tokens_per_row=1.6
    )
    text = summary(stats | {"use_tbo": 0} | drafts)
    assert "; 6 of 8 drafts accepted (75%), 1.60 tokens a sequence and step; 2 cpu" in text
    decisions = {"decode 1": {"micro_batches": 1}, "prefill 16": {"micro_batches": 2}}
    text = summary(stats | {"use_tbo": "auto", "decisions": decisions})
    assert " 3 split, USE_TBO=auto (1 of 2 buckets split); " in text


def test_decode_streams_text_in_order(example, capsys):
    decode = example("decode")
    stream = decode.OrderedStream(["one", "two"])
    stream.push(1, TokenEvent(1, 5, "late", None))
    assert capsys.readouterr().out == ">>> one\n"
    stream.push(0, TokenEvent(0, 5, "ear", None))
    assert capsys.readouterr().out == "ear"
    stream.push(0, TokenEvent(0, 5, "ly", "stop"))
    assert capsys.readouterr().out == "ly\n\n>>> two\nlate"
    stream.push(1, TokenEvent(1, 5, "r", "length"))
    assert capsys.readouterr().out == "r\n"


def test_a_prompt_that_failed_does_not_hold_up_the_stream(example, capsys):
    stream = example("decode").OrderedStream(["bad", "good"])
    stream.push(1, TokenEvent(0, 5, "text", "stop"))
    stream.push(0, TokenEvent(None, None, "", "error"))
    assert capsys.readouterr().out.endswith(">>> good\ntext\n")


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ([], {}, "nothing to decode: give --prompt TEXT or --prompts-file FILE"),
        (["--prompts-file", "absent.txt"], {}, "--prompts-file absent.txt"),
        (["--prompt", "a", "--model", "./absent"], {}, "absent"),
        (["--prompt", "a", "--temperature", "-1"], {}, "temperature is -1.0"),
        (["--prompt", "a", "--top-p", "0"], {}, "top_p is 0.0"),
        (["--prompt", "a", "--speculate", "-1"], {}, "speculate is -1"),
        (["--prompt", "a", "--micro-batches", "3"], {}, "--micro-batches 3 needs USE_TBO=1 or"),
        (["--prompt", "a", "--micro-batches", "1"], {"USE_TBO": "1"}, "must be at least 2, got 1"),
        (["--prompt", "a"], {"USE_TBO": "maybe"}, "USE_TBO=maybe is not understood"),
    ],
)
def test_decode_errors(example, monkeypatch, capsys, words, environ, message):
    decode = example("decode")
    monkeypatch.setattr(sys, "argv", ["decode.py", *words])
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert decode.main() == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        ([], ()),
        (["--stop", "a", "b"], ("a", "b")),
        (["--stop", "a", "--stop", "b"], ("a", "b")),
        (["--stop", "a", "b", "--stop", "c"], ("a", "b", "c")),
    ],
)
def test_stop_takes_several_texts(example, words, stop):
    decode = example("decode")
    args = tyro.cli(decode.Arguments, args=["--prompt", "x", *words])
    assert decode.sampling_params(args, 1)[0].stop == stop


@pytest.mark.parametrize(("value", "mode"), [("1", "on"), ("auto", "auto")])
def test_micro_batches(example, monkeypatch, value, mode):
    monkeypatch.setenv("USE_TBO", value)
    decode = example("decode")
    args = tyro.cli(decode.Arguments, args=["--prompt", "x", "--micro-batches", "4"])
    assert decode.overlap_config(args) == OverlapConfig(mode, 4)
    args = tyro.cli(decode.Arguments, args=["--prompt", "x"])
    assert decode.overlap_config(args) == OverlapConfig(mode, 2)


def test_unknown_option_is_refused(example):
    with pytest.raises(SystemExit) as stopped:
        run_decode(example("decode"), "--prompt", "a", "--dtype", "int3")
    assert stopped.value.code == 2


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
        max_sequences=1, max_tokens=16,
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
