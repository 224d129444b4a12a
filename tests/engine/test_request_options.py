"""Options of requests in the engine: the same tokens however steps are planned, and who refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tbo_jax import LLM, SamplingParams
from tbo_jax.engine.dispatch import DispatchedStep
from tbo_jax.engine.engine import Engine
from tests.engine.engines import like, small_llm
from tests.engine.loads import END_OF_SEQUENCE, VOCABULARY, Load, Result, run
from tests.engine.option_checks import WORDS, check_changed, random_options
from tests.golden_cases import Golden, with_tokenizer
from tests.sampling.option_reference import agree, reference_logprobs

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)
DRAFTS = 3
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}w5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_SEQUENCE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def make_llm(folder, devices=1, mode="off", **options):
    """With few rows and pages, so that requests wait and are preempted."""
    few = dict(max_sequences=3, num_pages=14, look_ahead=False)
    return small_llm(folder, devices, mode, **few | options)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_llm(folder, max_logprobs=VOCABULARY + 5)


@pytest.fixture(scope="module")
def waiting(llm) -> Engine:
    return llm.engine


@pytest.fixture(scope="module")
def ahead(waiting) -> Engine:
    return like(waiting, max_logprobs=waiting.max_logprobs)


@pytest.fixture(scope="module")
def speculating(waiting) -> Engine:
    return like(waiting, max_logprobs=waiting.max_logprobs, speculate=DRAFTS)


slow = pytest.mark.slow
OTHERS = [pytest.param(other, marks=slow) for other in ((1, "on"), (4, "off"), (4, "on"))]


@pytest.fixture(scope="module", params=OTHERS, ids=str)
def elsewhere(folder, request) -> Engine:
    devices, mode = request.param
    return make_llm(folder, devices, mode, look_ahead=None, max_logprobs=10).engine


def option_load(seed: int) -> Load:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 30)).tolist() for _ in range(count)]
    params = []
    for _ in range(count):
        options = random_options(rng)
        if rng.random() < 0.5:
            options |= dict(temperature=1.0, top_p=0.95, seed=int(rng.integers(1000)))
        if rng.random() < 0.3:
            options["stop"] = ("7 w1", "w30", "3 w")
        if rng.random() < 0.5:
            options["logprobs"] = int(rng.integers(0, 10))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            options[name] = bool(rng.random() < 0.5)
        params.append(SamplingParams(max_new_tokens=int(rng.integers(9, 30)), **options))
    return Load(prompts, params, [0] * count)


def run_with_logprobs(engine: Engine, load: Load, monkeypatch) -> tuple[Result, list]:
    """`run` keeps events without log-probabilities; these are beside it, request by request."""
    told: dict[int, list] = {}
    step = engine.step

    def watched(owner=None):
        events = step(owner)
        for event in events:
            told.setdefault(event.request_id, []).append(event.logprobs)
        return events

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", watched)
        result = run(engine, load)
    return result, [told[request_id] for request_id in sorted(told)]


def same_logprobs(ours: list, theirs: list) -> bool:
    """To 1e-4; equal ones may be in another order, as steps of another shape round otherwise."""
    for mine, yours in zip(ours, theirs, strict=True):
        if (mine is None) != (yours is None):
            return False
        if mine is not None and not (
            mine.token_id == yours.token_id
            and agree(np.array([mine.logprob]), np.array([yours.logprob]))
            and agree(np.array(list(mine.top.values())), np.array(list(yours.top.values())))
        ):
            return False
    return True


@pytest.mark.parametrize("seed", range(6))
def test_every_step_equals_the_reference(waiting, seed, monkeypatch, compilations):
    """Logits and log-probabilities of each row, amid queues, chunks and preemptions."""
    load = option_load(seed)
    rows = waiting._dispatcher._options
    change, raw, compared = rows.change, {}, []

    def watched_change(plan, options, logits, before, width):
        changed = change(plan, options, logits, before, width)
        given, found = np.asarray(logits), np.asarray(changed)
        compared.append(check_changed(plan, given, found, END_OF_SEQUENCE))
        for rank, values in zip(plan.ranks, given, strict=True):
            for sequence, row in zip(rank, values, strict=False):
                if sequence.samples:
                    key = sequence.request.request_id, sequence.request.num_generated
                    raw[key] = row
        return changed

    monkeypatch.setattr(rows, "change", watched_change)
    first = waiting._next_id
    result, told = run_with_logprobs(waiting, load, monkeypatch)
    assert sum(compared) > 20
    described = 0
    for index, params in enumerate(load.params):
        for place, known in enumerate(told[index]):
            assert (known is None) == (params.logprobs is None)
            if known is not None:
                row = raw[first + index, place]
                expected = reference_logprobs(row)
                assert known.token_id == result.events[index][place].token_id
                assert abs(known.logprob - expected[known.token_id]) < 1e-4
                assert known.rank == (row >= row[known.token_id]).sum()
                best = np.sort(expected)[::-1][: params.logprobs]
                assert agree(np.array(list(known.top.values())), best)
                assert agree(expected[list(known.top)], best)
                described += 1
    assert described == sum(len(t) for t, p in zip(told, load.params) if p.logprobs is not None)
    assert compilations() == 0


def test_the_same_tokens_however_steps_are_planned(
    waiting, ahead, speculating, monkeypatch, compilations
):
    """Ahead of their tokens, with drafts, and with requests that are preempted in between."""
    before = [e.scheduler.statistics.preemptions for e in (waiting, ahead, speculating)]
    compilations_before = compilations()
    for seed in range(20, 32):
        load = option_load(seed)
        expected, told = run_with_logprobs(waiting, load, monkeypatch)
        for engine in ahead, speculating:
            found, others = run_with_logprobs(engine, load, monkeypatch)
            assert found == expected
            assert all(map(same_logprobs, others, told))
    assert ahead.statistics.steps_ahead > 100
    assert speculating.statistics.accepted_tokens > 0
    after = [e.scheduler.statistics.preemptions for e in (waiting, ahead, speculating)]
    assert all(a > b for a, b in zip(after, before))
    assert compilations() == compilations_before


def test_the_same_tokens_on_other_devices_and_with_overlap(
    waiting, elsewhere, monkeypatch, compilations
):
    compilations_before = compilations()
    for seed in range(40, 44):
        load = option_load(seed)
        expected, told = run_with_logprobs(waiting, load, monkeypatch)
        found, others = run_with_logprobs(elsewhere, load, monkeypatch)
        assert found == expected
        assert all(map(same_logprobs, others, told))
    assert compilations() == compilations_before


def test_where_tokens_count_there_are_no_drafts(speculating):
    """And there are with any other option."""
    loop = [9, 10, 11] * 5
    for options, expected in (dict(bad_words=list(WORDS), min_tokens=3), True), (
        dict(frequency_penalty=0.1), False,
    ):  # fmt: skip
        before = speculating.statistics.drafted_tokens
        params = SamplingParams(max_new_tokens=8, allowed_token_ids=[9, 10, 11], **options)
        run(speculating, Load([loop], [params], [0]))
        assert (speculating.statistics.drafted_tokens > before) == expected


def test_a_step_without_options_runs_none_of_their_programs(waiting, monkeypatch):
    monkeypatch.setattr(waiting._dispatcher, "_options", None)
    load = Load(GOLDEN.prompts, [SamplingParams(max_new_tokens=4, ignore_eos=True)] * 3, [0] * 3)
    found = run(waiting, load)
    assert [[e.token_id for e in of] for of in found.events] == [g[:4] for g in GOLDEN.greedy]


def test_a_step_that_fails_forgets_no_token(waiting, monkeypatch):
    """What counts is counted anew, after the tables were lost with the step."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, frequency_penalty=1.5)
    load = Load([GOLDEN.prompts[0]], [params], [0])
    expected = run(waiting, load).events[0]
    read, calls = DispatchedStep.read, []

    def failing(step):
        calls.append(step)
        if len(calls) == 5:
            raise RuntimeError("no more")
        return read(step)

    monkeypatch.setattr(DispatchedStep, "read", failing)
    request_id = waiting.add(GOLDEN.prompts[0], params)
    events = []
    while waiting.has_work:
        try:
            events += waiting.step()
        except RuntimeError as error:
            assert "no more" in str(error)
    waiting.pop(request_id)
    assert [e.token_id for e in events] == [e.token_id for e in expected]
    assert len(calls) == 13


# What `LLM` makes of it


def test_several_completions_of_a_prompt(llm):
    prompt, wanted = GOLDEN.prompts[1], SamplingParams(max_new_tokens=6, temperature=1.0, seed=5)
    alone = llm.generate([prompt] * 3, [replace(wanted, seed=seed) for seed in (5, 6, 7)])
    events: dict = {}
    greedy = SamplingParams(max_new_tokens=3)
    first, second = llm.generate(
        [prompt, GOLDEN.prompts[0]],
        [replace(wanted, n=3, logprobs=1), greedy],
        lambda index, event: events.setdefault((index, event.sample), []).append(event),
    )
    together = [first, *first.others]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == 3
    assert second.others == () and second.logprobs is None
    assert sorted(events) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    for sample, completion in enumerate(together):
        assert "".join(e.text for e in events[0, sample]) == completion.text
        known = [e.logprobs for e in events[0, sample]][: len(completion.token_ids)]
        assert completion.logprobs == known
        assert [k.token_id for k in known] == completion.token_ids
    (bad,) = llm.generate([[VOCABULARY]], replace(wanted, n=3))
    assert bad.error is not None and bad.others == ()
    with pytest.raises(ValueError, match=r"SamplingParams\.n is 3: expected 1"):
        llm.engine.add(prompt, replace(wanted, n=3))


def test_ends_by_a_token_of_the_request(llm):
    prompt = GOLDEN.prompts[0]
    free = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    (whole,) = llm.generate([prompt], free)
    end = whole.token_ids[3]
    count = whole.token_ids.index(end)
    stopping = replace(free, stop_token_ids=(end,))
    (cut,) = llm.generate([prompt], stopping)
    assert cut.token_ids == whole.token_ids[:count] and cut.finish_reason == "stop"
    assert f"w{end}" not in cut.text.split()
    assert cut.logprobs == whole.logprobs[:count]
    (kept,) = llm.generate([prompt], replace(stopping, include_stop_str_in_output=True))
    assert kept.token_ids == whole.token_ids[: count + 1] and kept.finish_reason == "stop"
    assert kept.text.split()[-1] == f"w{end}"
    assert kept.logprobs == whole.logprobs[: count + 1]
    (later,) = llm.generate([prompt], replace(stopping, min_tokens=8))
    assert len(later.token_ids) == 8 and end not in later.token_ids


def test_an_end_of_sequence_waits_for_the_least_number_of_tokens(llm):
    ends = set(END_OF_SEQUENCE)
    wanted = SamplingParams(max_new_tokens=12, temperature=1.0, seed=0)
    lengths = []
    for seed in range(6):
        (done,) = llm.generate([GOLDEN.prompts[2]], replace(wanted, seed=seed, min_tokens=5))
        assert not ends & set(done.token_ids)
        lengths.append(len(done.token_ids))
    assert min(lengths) >= 5
    short = [
        len(llm.generate([GOLDEN.prompts[2]], replace(wanted, seed=seed))[0].token_ids)
        for seed in range(6)
    ]
    assert min(short) < 5


def test_an_option_that_cannot_be_had_costs_its_prompt_only(llm):
    asked = [SamplingParams(max_new_tokens=2, logit_bias={999: 1.0}), SamplingParams(max_tokens=2)]
    bad, good = llm.generate(GOLDEN.prompts[:2], asked)
    assert "SamplingParams.logit_bias has id 999" in bad.error
    assert good.error is None and len(good.token_ids) <= 2


def test_a_chat_and_several(llm):
    hello = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    other = [{"role": "user", "content": "w4"}]
    wanted = SamplingParams(max_new_tokens=3, ignore_eos=True)
    (one,) = llm.chat(hello, wanted)
    assert one.prompt_token_ids == [1, 2, 3, 5]
    assert [c.token_ids for c in llm.chat([hello, other], wanted)] == [
        c.token_ids for c in llm.generate([[1, 2, 3, 5], [4, 5]], wanted)
    ]
    assert llm.chat([]) == []
    for wrong in "w1", 5, {"role": "user"}, [hello, "w1"], [[1, 2]]:
        with pytest.raises(ValueError, match=r"messages is .*: expected a list of messages"):
            llm.chat(wrong)


@slow
def test_an_engine_that_has_no_options(folder):
    llm = make_llm(folder, request_options=False, max_sequences=1, max_batched_tokens=16)
    assert llm.engine._dispatcher._options is None
    wanted = SamplingParams(max_new_tokens=4, ignore_eos=True)
    bad, good = llm.generate(GOLDEN.prompts[:2], [replace(wanted, presence_penalty=1.0), wanted])
    assert "presence_penalty was given to an engine with request_options=False" in bad.error
    assert good.token_ids == GOLDEN.greedy[1][:4]
