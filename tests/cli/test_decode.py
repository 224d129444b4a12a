"""`tbo-jax decode`, on a tiny model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tyro

from tbo_jax import EngineConfig, OverlapConfig, SamplingParams, TokenEvent
from tbo_jax.cli import decode
from tbo_jax.text import DefaultSampling
from tests.golden_cases import Golden, with_tokenizer

GOLDEN = Golden("qwen3_moe")
PROMPTS = [" ".join(f"w{t}" for t in prompt) for prompt in GOLDEN.prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def silenced(monkeypatch):
    """What `--quiet` does to the process, which the other tests need not silenced."""
    calls: list[bool] = []
    monkeypatch.setattr(decode, "silence_libraries", lambda: calls.append(True))
    return calls


def arguments(*words: object) -> decode.Arguments:
    return tyro.cli(decode.Arguments, args=["--model", "m", *map(str, words)])


def test_decode_json(folder, monkeypatch, capsys, tmp_path, silenced):
    monkeypatch.setenv("USE_TBO", "1")
    (tmp_path / "prompts.txt").write_text(f"{PROMPTS[1]}\n\n{'w9 ' * 200}\n")
    words = (
        *("--model", folder, "--prompt", PROMPTS[0], "--prompts-file", tmp_path / "prompts.txt"),
        *("--max-new-tokens", 8, "--devices", 2, "--page-size", 4, "--json", "--quiet"),
        *("--max-batched-tokens", 16),  # fewer sizes are compiled
    )
    status = decode.main(list(map(str, words)), "decode")
    assert silenced
    out = capsys.readouterr()
    rows = [json.loads(line) for line in out.out.splitlines()]
    assert status == 1  # one prompt does not fit the context; the others are complete
    assert [row["token_ids"] for row in rows[:2]] == [g[:8] for g in GOLDEN.greedy[:2]]
    assert [row["prompt_token_ids"] for row in rows[:2]] == GOLDEN.prompts[:2]
    assert rows[0]["text"] == " ".join(f"w{t}" for t in GOLDEN.greedy[0][:8])
    assert [row["finish_reason"] for row in rows[:3]] == ["length", "length", "error"]
    assert [row["num_cached_tokens"] for row in rows[:3]] == [0, 0, 0]
    assert "prompt of 200 tokens" in rows[2]["error"]
    assert "prompt 2" in out.err
    stats = rows[3]["stats"]
    assert (stats["use_tbo"], stats["devices"], stats["generated_tokens"]) == (1, 2, 16)
    assert 0 < stats["steps_split"] <= stats["steps"]
    assert {"seconds", "tokens_per_second", "compile_seconds"} <= stats.keys()


def test_decode_summary_says_what_was_split():
    stats = dict(
        generated_tokens=8, seconds=2.0, tokens_per_second=4.0, steps=9, steps_split=3, devices=2,
        platform="cpu", compile_seconds=1.0, speculate=0,
    )  # fmt: skip
    summary = decode.summary
    assert " 3 split, USE_TBO=1; " in summary(stats | {"use_tbo": 1, "decisions": {}})
    drafts = dict(
        speculate=2, drafted_tokens=8, accepted_tokens=6, acceptance_rate=0.75, tokens_per_row=1.6
    )
    text = summary(stats | {"use_tbo": 0} | drafts)
    assert "; 6 of 8 drafts accepted (75%), 1.60 tokens a sequence and step; 2 cpu" in text
    decisions = {"decode 1": {"strategy": "off"}, "prefill 16": {"strategy": "expert_chunks 2"}}
    text = summary(stats | {"use_tbo": "auto", "decisions": decisions})
    assert " 3 split, USE_TBO=auto (1 of 2 buckets overlap); " in text


def test_decode_streams_text_in_order(capsys):
    stream = decode.OrderedStream(["one", "two"])
    stream.push(1, TokenEvent(1, 5, "late", None))
    assert capsys.readouterr().out == ">>> one\n"
    stream.push(0, TokenEvent(0, 5, "ear", None))
    assert capsys.readouterr().out == "ear"
    stream.push(0, TokenEvent(0, 5, "ly", "stop"))
    assert capsys.readouterr().out == "ly\n\n>>> two\nlate"
    stream.push(1, TokenEvent(1, 5, "r", "length"))
    assert capsys.readouterr().out == "r\n"


def test_a_prompt_that_failed_does_not_hold_up_the_stream(capsys):
    stream = decode.OrderedStream(["bad", "good"])
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
        (
            ["--prompt", "a", "--chat", "--chat-template-kwargs", "[1]"],
            {},
            "expected a JSON object, got list",
        ),
        (
            ["--prompt", "a", "--chat", "--chat-template-kwargs", '{"tools": 1}'],
            {},
            "'tools': the template has",
        ),
        (["--prompt", "a", "--chat-template-kwargs", "{}"], {}, "-kwargs needs --chat"),
        (
            ["--prompt", "a", "--seed", "-1"],
            {},
            "--seed must be from 0 to 9223372036854775807, got",
        ),
        (["--prompt", "a", "--n", "2"], {}, "--n 2 needs --json"),
        (["--prompt", "a", "--logprobs", "0"], {}, "--logprobs 0 needs --json"),
        (["--prompt", "a", "--prompt-logprobs", "1"], {}, "--prompt-logprobs 1 needs --json"),
        (["--prompt", "a", "--logit-bias", '{"w1": 1}'], {}, "has the key 'w1': expected a token"),
        (["--prompt", "a", "--logit-bias", "[1]"], {}, "expected a JSON object, got list"),
        (
            ["--prompt", "a", "--json-schema", "absent.json"],
            {},
            "--json-schema absent.json: [Errno",
        ),
        (["--prompt", "a", "--regex", "a", "--choice", "b"], {}, "expected one of regex, choice"),
        (["--prompt", "a", "--min-tokens", "200"], {}, "min_tokens is 200; expected at most"),
        (["--prompt", "a", "--micro-batches", "3"], {}, "--micro-batches 3 needs USE_TBO=1 or"),
        (["--prompt", "a", "--micro-batches", "1"], {"USE_TBO": "1"}, "must be at least 2, got 1"),
        (["--prompt", "a"], {"USE_TBO": "maybe"}, "USE_TBO=maybe is not understood"),
    ],
)
def test_decode_errors(monkeypatch, capsys, words, environ, message):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert decode.main(words, "decode", "absent") == 2
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
def test_stop_takes_several_texts(words, stop):
    args = arguments("--prompt", "x", *words)
    assert decode.sampling_params(args, 1)[0].stop == stop


def test_options_of_requests_are_those_of_their_params():
    args = arguments(
        *("--prompt", "x", "--json", "--n", 2, "--logprobs", 3, "--repetition-penalty", 1.2),
        *("--prompt-logprobs", 1),
        *("--frequency-penalty", 0.5, "--presence-penalty", -0.5, "--min-tokens", 4),
        *("--logit-bias", '{"7": -2.5, "8": 1}', "--allowed-token-ids", 7, 8, 9),
        *("--bad-words", "a b", "c", "--bad-words", "d", "--stop-token-ids", 5, 6),
        *("--include-stop-str-in-output", "--no-skip-special-tokens"),
    )
    assert decode.sampling_params(args, 1) == [
        SamplingParams(
            n=2, logprobs=3, prompt_logprobs=1, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.5,
            min_tokens=4, logit_bias={7: -2.5, 8: 1}, allowed_token_ids=(7, 8, 9),
            bad_words=("a b", "c", "d"), stop_token_ids=(5, 6), include_stop_str_in_output=True,
            skip_special_tokens=False,
        )
    ]  # fmt: skip
    every = {field.name for field in dataclasses.fields(SamplingParams)} - {"ignore_eos"}
    assert every <= {field.name for field in dataclasses.fields(decode.Arguments)}


@pytest.mark.parametrize("name", ["json_schema", "grammar"])
def test_a_structure_is_text_or_a_file(tmp_path, name):
    text = {"json_schema": '{"type": "null"}', "grammar": 'start: "a"'}[name]
    file = tmp_path / "file.txt"
    file.write_text(text)
    for given in (text, file):
        args = arguments("--prompt", "x", f"--{name.replace('_', '-')}", given)
        assert decode.sampling_params(args, 1) == [SamplingParams(**{name: text})]


def test_a_structure_on_the_command_line():
    args = arguments("--prompt", "x", "--choice", "a", "b c", "--choice", "d")
    assert decode.sampling_params(args, 1) == [SamplingParams(choice=("a", "b c", "d"))]
    args = arguments("--prompt", "x", "--regex", "a: {2}")
    assert decode.sampling_params(args, 1) == [SamplingParams(regex="a: {2}")]
    args = arguments("--prompt", "x", "--json-object")
    assert decode.sampling_params(args, 1) == [SamplingParams(json_object=True)]


def test_decode_several_completions(folder, capsys):
    words = (
        *("--model", folder, "--prompt", PROMPTS[0], "--max-new-tokens", 4, "--n", 2, "--seed", 1),
        *("--temperature", 1, "--logprobs", 2, "--frequency-penalty", 2, "--json", "--quiet"),
        *("--max-batched-tokens", 16, "--prompt-logprobs", 1),
    )
    assert decode.main(list(map(str, words)), "decode") == 0
    *rows, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS[:1] * 2
    assert rows[0]["token_ids"] != rows[1]["token_ids"]
    for row in rows:
        assert [known["token_id"] for known in row["logprobs"]] == row["token_ids"]
        assert all(len(known["top"]) == 2 and known["logprob"] < 0 for known in row["logprobs"])
        none, *of_prompt = row["prompt_logprobs"]
        assert none is None
        assert [known["token_id"] for known in of_prompt] == row["prompt_token_ids"][1:]
        assert all(len(known["top"]) == 1 and known["logprob"] < 0 for known in of_prompt)
    assert last["stats"]["generated_tokens"] == 8


@pytest.mark.parametrize(("value", "mode"), [("1", "on"), ("auto", "auto")])
def test_micro_batches(monkeypatch, value, mode):
    monkeypatch.setenv("USE_TBO", value)
    args = arguments("--prompt", "x", "--micro-batches", 4)
    assert decode.overlap_config(args.micro_batches) == OverlapConfig(mode, 4)
    args = arguments("--prompt", "x")
    assert decode.overlap_config(args.micro_batches) == OverlapConfig(mode, 2)


def test_unknown_option_is_refused():
    with pytest.raises(SystemExit) as stopped:
        decode.main(["--prompt", "a", "--dtype", "int3"], "decode", "m")
    assert stopped.value.code == 2


def test_options_of_the_engine_are_those_of_its_config():
    args = arguments(
        "--prompt", "x", "--devices", 4, "--transport", "all_gather", "--look-ahead", False
    )
    assert args.engine == EngineConfig(devices=4, transport="all_gather", look_ahead=False)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--devices", 0, "devices must be at least 1, got 0"), ("--speculate", -1, "got -1")],
)
def test_a_value_that_no_engine_can_have_is_refused(capsys, option, value, message):
    with pytest.raises(SystemExit) as stopped:
        arguments("--prompt", "x", option, value)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_no_more_rows_than_prompts_are_compiled():
    args = arguments("--prompt", "x", "--max-sequences", 8, "--devices", 2)
    assert [decode.engine_config(args, count).max_sequences for count in (1, 3, 99)] == [1, 2, 8]


def test_what_the_command_line_leaves_open_is_the_models():
    asked = DefaultSampling({"temperature": 0.6, "top_k": 20}, {})
    args = arguments("--prompt", "x", "--top-k", 5, "--seed", 3)
    first, second = decode.sampling_params(args, 2, asked.params)
    assert (first.temperature, first.top_k, first.max_new_tokens) == (0.6, 5, 128)
    assert (first.seed, second.seed) == (3, 4)
    assert decode.sampling_params(args, 1)[0].temperature == 0.0
