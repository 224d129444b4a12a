"""The whole engine on a tiny model: tokens, text, errors, statistics."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tbo_jax import LLM, OverlapConfig, SamplingParams
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)


def make_llm(folder, *, devices=1, mode="off", **options):
    defaults = dict(max_sequences=2, max_tokens=32, page_size=4, num_pages=48)
    return LLM(
        folder,
        devices=devices,
        overlap=OverlapConfig(mode),
        compilation_cache=False,
        **(defaults | options),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder)


slow = pytest.mark.slow
OTHERS = [pytest.param((1, "on"), marks=slow), pytest.param((4, "off"), marks=slow), (4, "on")]


@pytest.fixture(scope="module", params=OTHERS, ids=str)
def other_llm(folder, request):
    devices, mode = request.param
    return make_llm(folder, devices=devices, mode=mode)


def greedy(count=16, **options):
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **options)


def test_greedy_tokens_of_transformers(llm, compilations):
    completions = llm.generate(GOLDEN.prompts, greedy())
    assert [c.token_ids for c in completions] == GOLDEN.greedy
    assert compilations() == 0  # everything was compiled at warm-up
    assert llm.statistics["use_tbo"] == 0
    assert llm.statistics["steps_split"] == 0


def test_same_tokens_on_other_devices_and_with_overlap(llm, other_llm, compilations):
    """Greedy and sampled, with prompts that go through chunks, queues and mixed steps."""
    prompts = [*GOLDEN.prompts, *GOLDEN.tokens]
    params = [greedy()] * len(GOLDEN.prompts) + [
        greedy(10, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=i)
        for i in range(len(GOLDEN.tokens))
    ]
    before = compilations()
    expected = [c.token_ids for c in llm.generate(prompts, params)]
    found = [c.token_ids for c in other_llm.generate(prompts, params)]
    assert found == expected
    assert expected[: len(GOLDEN.greedy)] == GOLDEN.greedy
    assert compilations() == before
    stats = other_llm.statistics
    assert bool(stats["steps_split"]) == bool(stats["use_tbo"])
    assert stats["steps_split"] <= stats["steps"]
    sets = 2 if stats["use_tbo"] else 1  # of attention work metadata
    assert stats["work_bytes"] == sets * llm.statistics["work_bytes"] > 0
    assert any(name.endswith(f" x{sets}") for name in stats["temporary_bytes"])


def test_seeded_tokens_do_not_depend_on_the_batch(llm):
    wanted = greedy(12, temperature=1.0, seed=7)
    prompt = GOLDEN.prompts[1]
    (alone,) = llm.generate([prompt], wanted)
    others = [greedy(5, temperature=1.3, seed=1), greedy(12), greedy(9, temperature=0.7)]
    crowd = [GOLDEN.prompts[2], GOLDEN.prompts[0], GOLDEN.tokens[3]]
    together = llm.generate([*crowd, prompt], [*others, wanted])
    assert together[-1].token_ids == alone.token_ids
    (other_seed,) = llm.generate([prompt], greedy(12, temperature=1.0, seed=8))
    assert other_seed.token_ids != alone.token_ids


def test_preemption_changes_no_token(folder, llm):
    """Pages for one long request at a time: the younger one is preempted and computed anew."""
    tight = make_llm(folder, num_pages=16)
    prompts = [GOLDEN.prompts[2][:20], GOLDEN.prompts[2][3:23], GOLDEN.prompts[1]]
    expected = [c.token_ids for c in llm.generate(prompts, greedy(24))]
    assert [c.token_ids for c in tight.generate(prompts, greedy(24))] == expected
    assert tight.statistics["preemptions"] > 0
    assert llm.statistics["preemptions"] == 0


def test_stream_joins_to_the_text(llm):
    events = {}
    completions = llm.generate(
        GOLDEN.prompts, greedy(), lambda i, event: events.setdefault(i, []).append(event)
    )
    for i, done in enumerate(completions):
        assert "".join(event.text for event in events[i]) == done.text
        assert [event.token_id for event in events[i]] == done.token_ids
        assert [event.finish_reason for event in events[i]][:-1] == [None] * 15
        assert events[i][-1].finish_reason == done.finish_reason == "length"


def test_stop_string_and_end_of_sequence(folder, llm):
    tokens = GOLDEN.greedy[0]
    (full,) = llm.generate([GOLDEN.prompts[0]], greedy())
    third = full.text.split()[2]
    (cut,) = llm.generate([GOLDEN.prompts[0]], greedy(stop=(third,)))
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(third)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[3]]}))
    ending = make_llm(folder)
    (folder / "generation_config.json").unlink()
    (ended,) = ending.generate([GOLDEN.prompts[0]], SamplingParams(max_new_tokens=16))
    assert ended.token_ids == tokens[: tokens.index(tokens[3])]
    assert ended.finish_reason == "stop"


def test_a_bad_prompt_costs_the_others_nothing(llm):
    longest = llm.engine.max_context
    prompts = [
        "",
        GOLDEN.prompts[0],
        [1] * longest,
        [1, 9999],
        [{"role": "user"}],
        GOLDEN.prompts[1],
    ]
    completions = llm.generate(prompts, greedy())
    assert [c.finish_reason for c in completions] == [
        "error", "length", "error", "error", "error", "length",
    ]  # fmt: skip
    assert "empty prompt" in completions[0].error
    assert f"prompt of {longest} tokens; expected at most {longest - 1}" in completions[2].error
    assert "9999 is outside the vocabulary of 160" in completions[3].error
    assert [completions[1].token_ids, completions[5].token_ids] == GOLDEN.greedy[:2]


def test_a_full_context_ends_the_request(llm):
    prompt = (GOLDEN.tokens[-1] * 3)[:120]
    (done,) = llm.generate([prompt], greedy(100))
    assert llm.engine.max_context == 128
    assert len(prompt) + len(done.token_ids) == 128
    assert done.finish_reason == "length"


def test_a_raising_callback_leaves_a_usable_engine(llm):
    def explode(index, event):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate(GOLDEN.prompts, greedy(), explode)
    assert not llm.engine.has_work
    llm.engine.check()
    assert [c.token_ids for c in llm.generate(GOLDEN.prompts, greedy())] == GOLDEN.greedy


def test_an_interrupted_step_leaves_a_usable_engine(llm, monkeypatch):
    """The step has taken the donated buffers when the interrupt comes."""
    step = llm.engine.runner.step

    def interrupted(bucket, buffers, batch):
        step(bucket, buffers, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(GOLDEN.prompts, greedy())
    monkeypatch.undo()
    assert not llm.engine.has_work
    assert [c.token_ids for c in llm.generate(GOLDEN.prompts, greedy())] == GOLDEN.greedy


@pytest.mark.parametrize("prompt", [None, 5, b"ab", {"role": "user"}, [1.5], [True]])
def test_a_prompt_of_no_known_kind_costs_the_others_nothing(llm, prompt):
    bad, good = llm.generate([prompt, GOLDEN.prompts[0]], greedy(2))
    assert "a prompt is a text, a list of token ids, or a list of chat messages" in bad.error
    assert good.token_ids == GOLDEN.greedy[0][:2]


def test_numpy_token_ids_and_a_single_text(llm):
    (done,) = llm.generate([np.array(GOLDEN.prompts[0])], greedy(2))
    assert done.token_ids == GOLDEN.greedy[0][:2]
    (single,) = llm.generate(" ".join(f"w{t}" for t in GOLDEN.prompts[0]), greedy(2))
    assert single.token_ids == done.token_ids


def test_text_prompts_and_statistics(llm):
    text = " ".join(f"w{t}" for t in GOLDEN.prompts[0])
    before = llm.statistics
    (done,) = llm.generate([text], greedy())
    assert done.prompt_token_ids == GOLDEN.prompts[0]
    assert done.token_ids == GOLDEN.greedy[0]
    stats = llm.statistics
    assert stats["generated_tokens"] == before["generated_tokens"] + 16
    assert stats["prompt_tokens"] == before["prompt_tokens"] + len(GOLDEN.prompts[0])
    assert stats["steps"] == before["steps"] + 16
    assert sum(stats["steps_by_bucket"].values()) == stats["steps"]
    assert stats["tokens_per_second"] == stats["generated_tokens"] / stats["seconds"]
    assert stats["devices"] == 1
    assert stats["compile_seconds"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 99}, "99 devices were asked for, 8 exist"),
        ({"devices": 0}, "0 devices were asked for"),
        ({"devices": 3}, "8 experts cannot be shared equally by 3 devices"),
        ({"max_context": 1000}, "max_context 1000 is out of range: expected 2 to 128"),
        ({"max_context": 128, "num_pages": 8}, "max_context 128 does not fit: .* 28 tokens"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"max_tokens": 1}, "max_tokens is 1: expected at least max_sequences, 2"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported"),
        ({"transport": "pigeon"}, "unknown transport 'pigeon'"),
    ],
)
def test_bad_arguments(folder, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(folder, **options)


def test_bad_environment(folder, monkeypatch):
    monkeypatch.setenv("USE_TBO", "maybe")
    with pytest.raises(ValueError, match="USE_TBO=maybe is not understood: expected 0, 1 or auto"):
        LLM(folder)


def test_missing_tokenizer(tmp_path):
    folder = with_tokenizer(NAME, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        make_llm(folder)


def test_params_of_another_number(llm):
    with pytest.raises(ValueError, match="3 prompts and 2 SamplingParams"):
        llm.generate(GOLDEN.prompts, [greedy(), greedy()])
    with pytest.raises(ValueError, match="params must be SamplingParams"):
        llm.generate(GOLDEN.prompts[:1], [{"temperature": 1}])


def test_dense_model_says_that_nothing_overlaps(tmp_path, caplog):
    llm = make_llm(with_tokenizer("llama", tmp_path), devices=2, mode="on", max_tokens=2)
    assert sum("nothing to overlap" in r.getMessage() for r in caplog.records) == 1
    golden = Golden("llama")
    found = [c.token_ids for c in llm.generate(golden.prompts, greedy())]
    assert found == golden.greedy
    assert np.asarray(llm.engine.runner.mesh.devices).size == 2


def test_the_models_sampling_is_the_default_and_said_once(folder, tmp_path, caplog, monkeypatch):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    asked = json.loads((copy / "generation_config.json").read_text())
    asked |= {"do_sample": True, "temperature": 0.7, "max_new_tokens": 5, "repetition_penalty": 1.1}
    (copy / "generation_config.json").write_text(json.dumps(asked))
    llm = make_llm(copy, max_sequences=1, max_tokens=16)
    (said,) = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
    assert "temperature 0.7" in said and "not applied: repetition_penalty 1.1" in said
    prompt = GOLDEN.prompts[0]
    drawn = llm.default_sampling.params(seed=4)
    assert (drawn.temperature, drawn.max_new_tokens) == (0.7, 5)
    expected, found = llm.generate([prompt, prompt], [drawn, greedy(5)])
    assert found.token_ids == GOLDEN.greedy[0][:5]  # params that are given count as they are
    monkeypatch.setattr("secrets.randbelow", lambda most: 4)
    assert llm.generate([prompt])[0].token_ids == expected.token_ids
