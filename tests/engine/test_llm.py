"""The whole engine on a tiny model: tokens, text, errors, statistics."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax import LLM, AsyncLLM, EngineConfig, SamplingParams, make_mesh
from tbo_jax.checkpoint.load import read_config
from tbo_jax.engine import llm as llm_module
from tbo_jax.engine import running as running_module
from tbo_jax.engine.cache_size import cache_config
from tbo_jax.engine.sharing import FairLock
from tbo_jax.parallel.sharding import RANKS
from tests.engine.engines import small_llm, wait_for
from tests.engine.prompt_checks import check, check_all, check_score
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)


def make_llm(folder, *, devices=1, mode="off", **options):
    return small_llm(folder, devices, mode, **dict(max_sequences=2, num_pages=48) | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder, prompt_logprobs=True)


slow = pytest.mark.slow
OTHERS = [pytest.param((1, "on"), marks=slow), pytest.param((4, "off"), marks=slow), (4, "on")]


@pytest.fixture(scope="module", params=OTHERS, ids=str)
def other_llm(folder, request):
    devices, mode = request.param
    return make_llm(folder, devices=devices, mode=mode, prompt_logprobs=True)


def test_a_snapshot_waits_for_no_step(llm):
    known, met = llm.statistics, []
    with llm.engine._lock:  # as during a step
        other = threading.Thread(target=lambda: met.append(llm.snapshot()))
        other.start()
        other.join(60)
        assert len(met) == 1
    assert met[0].keys() == known.keys() and met[0]["steps"] == known["steps"]


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


def test_priorities_change_the_order_and_no_token(llm):
    prompts = [GOLDEN.prompts[i % len(GOLDEN.prompts)] for i in range(6)]
    expected = llm.generate(prompts, greedy())
    order = []

    def on_token(index, event):
        if event.finish_reason is not None:
            order.append(index)

    given = np.array([3, 3, 2, 2, 1, -1])
    done = llm.generate(prompts, greedy(), on_token, priority=given)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [{4, 5}, {2, 3}, {0, 1}]  # in two rows
    order.clear()
    llm.generate(prompts[:3], greedy(4), on_token, priority=7)
    assert order == [0, 1, 2]
    for wrong, message in (
        ([1], "6 prompts and 1 priorities"),
        (itertools.repeat(1), "6 prompts and more priorities"),
        ([1] * 5 + [None], "priority is None: expected an integer"),
        ("high", "priority is 'high': expected an integer"),
        (True, "priority is True: expected an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, greedy(), priority=wrong)
    with pytest.raises(ValueError, match="priority is 0.5: expected an integer"):
        llm.engine.add([1], greedy(), priority=0.5)


def test_log_probabilities_of_prompts_are_those_of_transformers(llm, other_llm, compilations):
    before = compilations()
    for each in (llm, other_llm):
        check_all(each)
        scores = each.score(GOLDEN.tokens)
        for score, tokens, logits in zip(scores, GOLDEN.tokens, GOLDEN.logits, strict=True):
            check_score(score, tokens, logits)
    params = SamplingParams(max_new_tokens=2, prompt_logprobs=1)
    with AsyncLLM(llm) as front:
        done = asyncio.run(front.complete(GOLDEN.tokens[0], params))
    check(done.prompt_logprobs, GOLDEN.tokens[0], GOLDEN.logits[0], 1)
    assert compilations() == before


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[5, 6], [{"role": "user", "content": "w5"}]], "text 1: it is a chat: expected a text"),
        ([{"role": "user", "content": "w5"}], "expected a list of prompts"),
        ([[5], ""], "text 1 has an empty prompt"),
        ([[5], [5] * 500], "text 1 has a prompt of 500 tokens; expected at most"),
        ([[5, 999]], "text 0: prompt token id 999 is outside the vocabulary of 160"),
        ([7, "w5"], "text 0: a prompt is a text, .*, got int"),
        (7, "prompts is 7: expected"),
    ],
)
def test_texts_that_have_no_score_are_refused(llm, texts, message):
    steps = llm.statistics["steps"]
    with pytest.raises(ValueError, match=message):
        llm.score(texts)
    assert llm.statistics["steps"] == steps


@pytest.mark.slow
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
    ending = make_llm(folder, max_sequences=1, max_batched_tokens=16)
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
    step = llm.engine.runner.run

    def interrupted(*args):
        step(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(GOLDEN.prompts, greedy())
    monkeypatch.undo()
    assert not llm.engine.has_work
    assert [c.token_ids for c in llm.generate(GOLDEN.prompts, greedy())] == GOLDEN.greedy


def test_a_step_that_fails_after_its_dispatch_poisons_nothing(other_llm, monkeypatch):
    """What it returned is an error, not deleted; the requests after it get new buffers."""
    runner = other_llm.engine.runner
    broken = [True]

    def fail(zero):
        time.sleep(0.2)
        if broken:
            raise RuntimeError("0.2 s after the dispatch")
        return zero

    def failing(results):
        def on_device(results):
            zero = jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), np.float32(0))
            return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), results)

        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, results)
        sharded = jax.shard_map(
            on_device, mesh=runner.mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return jax.jit(sharded, donate_argnums=0)(results)

    step, returned = runner.run, []

    def late(*args):
        returned.append(failing(step(*args)))
        return returned[-1]

    monkeypatch.setattr(runner, "run", late)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"0\.2 s after the dispatch"):
        other_llm.generate(GOLDEN.prompts, greedy())
    # Nothing failed before, and what came back were arrays. On one device XLA:CPU runs a program
    # in the caller's thread when its inputs happen to be there already.
    assert returned or runner.mesh.size == 1
    monkeypatch.undo()
    # JAX keeps the error for its next barrier, as that of the last callback on these devices.
    broken.clear()
    ranks = NamedSharding(runner.mesh, PartitionSpec(RANKS))
    jax.block_until_ready(failing(jax.device_put(np.zeros(4, np.float32), ranks)))
    jax.effects_barrier()
    other_llm.engine.check()
    found = other_llm.generate(GOLDEN.prompts, greedy())
    assert [c.token_ids for c in found] == GOLDEN.greedy


# Several callers


class Patient(threading.Thread):
    """Runs a function; `result` gives what it returned, or raises what it raised."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self.outcome = Future()
        self.work = function, args
        self.start()

    def run(self):
        function, args = self.work
        try:
            self.outcome.set_result(function(*args))
        except BaseException as error:
            self.outcome.set_exception(error)

    def result(self):
        return self.outcome.result(timeout=300)


def test_threads_generate_together(llm):
    """More prompts than rows; each call gets the events of its own requests, in order."""
    wanted = [greedy(8 + i, temperature=0.5 * (i % 2), seed=i) for i in range(9)]
    prompts = [GOLDEN.prompts[i % 3] for i in range(9)]
    expected = [c.token_ids for c in llm.generate(prompts, wanted)]
    events = [[] for _ in prompts]
    start = threading.Barrier(3)

    def call(first):
        def on_token(index, event):
            events[first + 3 * index].append(event)

        start.wait()
        return llm.generate(prompts[first::3], wanted[first::3], on_token)

    threads = [Patient(call, first) for first in range(3)]
    found = [thread.result() for thread in threads]
    for index, tokens in enumerate(expected):
        done = found[index % 3][index // 3]
        assert done.token_ids == tokens == [event.token_id for event in events[index]]
        assert done.text == "".join(event.text for event in events[index])
    assert (
        not llm.engine.has_work
        and not llm.engine._reader.running
        and not llm.engine._reader._events
    )
    stats = llm.statistics
    assert stats["seconds"] == llm.statistics["seconds"]  # no call is under way


def test_on_token_may_generate(llm):
    inner = []

    def on_token(index, event):
        if index == 1 and len(inner) < 2:
            inner.append([c.token_ids for c in llm.generate(GOLDEN.prompts[1:], greedy())])

    outer = llm.generate(GOLDEN.prompts, greedy(), on_token)
    assert [c.token_ids for c in outer] == GOLDEN.greedy
    assert inner == [GOLDEN.greedy[1:]] * 2


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["dispatch", "commit"])
def test_a_step_that_fails_in_one_call_loses_no_request_of_another(
    llm, monkeypatch, failure, where
):
    """The other call has tokens, some of them not read yet, and requests that wait."""
    target, name = {
        "dispatch": (llm.engine.runner, "run"),
        "commit": (llm.engine.scheduler, "commit"),
    }[where]
    original, events = getattr(target, name), []

    def failing(*args):
        monkeypatch.setattr(target, name, original)
        if where == "dispatch":
            original(*args)  # has taken the donated buffers
        raise failure("mine")

    def on_token(index, event):
        events.append((index, event.token_id, event.text))
        if len(events) == 7:
            monkeypatch.setattr(target, name, failing)
            with pytest.raises(failure, match="mine"):
                llm.generate(GOLDEN.prompts[:2], greedy())
            llm.engine.check()

    found = llm.generate(GOLDEN.prompts, greedy(), on_token)
    assert [c.token_ids for c in found] == GOLDEN.greedy
    for index, done in enumerate(found):
        assert [token for i, token, _ in events if i == index] == done.token_ids
        assert "".join(text for i, _, text in events if i == index) == done.text
    assert not llm.engine._reader.running


def test_an_exception_in_one_thread_ends_the_requests_of_its_call_only(llm):
    started = threading.Event()

    def explode(index, event):
        started.set()
        wait_for(lambda: len(llm.engine._reader.running) > 3)  # those of the other call
        raise KeyError("mine")

    def fail():
        with pytest.raises(KeyError, match="mine"):
            llm.generate(GOLDEN.prompts, greedy(), explode)

    failing = Patient(fail)
    assert started.wait(300)
    other = Patient(llm.generate, GOLDEN.prompts, greedy())
    failing.result()
    assert [c.token_ids for c in other.result()] == GOLDEN.greedy
    assert not llm.engine._reader.running


@pytest.mark.parametrize("thread", [False, True], ids=["on_token", "another thread"])
def test_an_aborted_request_gives_what_it_has(llm, thread):
    before = llm.statistics["finished"]
    events = []

    def on_token(index, event):
        if index == 1:
            events.append(event)
        if len(events) == 3 and event is events[2]:
            call = llm.abort if index else llm.engine.abort
            assert Patient(call, event.request_id).result() if thread else call(event.request_id)
            assert not call(event.request_id)

    found = llm.generate(GOLDEN.prompts, greedy(), on_token)
    assert [c.finish_reason for c in found] == ["length", "abort", "length"]
    assert [found[0].token_ids, found[2].token_ids] == [GOLDEN.greedy[0], GOLDEN.greedy[2]]
    assert 3 <= len(found[1].token_ids) < 16
    assert found[1].token_ids == GOLDEN.greedy[1][: len(found[1].token_ids)]
    assert found[1].error is None
    assert (events[-1].token_id, events[-1].finish_reason) == (None, "abort")
    assert found[1].text == "".join(event.text for event in events)
    assert [event.token_id for event in events[:-1]] == found[1].token_ids
    after = llm.statistics["finished"]
    assert {reason: after[reason] - before[reason] for reason in after} == {
        "stop": 0, "length": 2, "abort": 1, "error": 0,
    }  # fmt: skip


def test_an_abort_gives_the_text_that_was_held_back(llm):
    """A stop string had begun."""
    stop = f"w{GOLDEN.greedy[0][2]} w{GOLDEN.greedy[0][3]} never"
    texts = []

    def on_token(index, event):
        texts.append(event.text)
        if len(texts) == 4:
            assert texts[3] == ""
            llm.abort(event.request_id)

    (done,) = llm.generate(GOLDEN.prompts[:1], greedy(stop=(stop,)), on_token)
    assert done.text == "".join(texts) == " ".join(f"w{t}" for t in GOLDEN.greedy[0][:4])


def test_requests_of_two_owners_and_one_that_nobody_takes(llm):
    engine = llm.engine
    mine = engine.add(GOLDEN.prompts[0], greedy(3))
    (done,) = llm.generate(GOLDEN.prompts[1:2], greedy(6))
    assert done.token_ids == GOLDEN.greedy[1][:6]
    assert engine.has_work
    assert [event.token_id for event in engine.step()] == GOLDEN.greedy[0][:3]
    assert engine.pop(mine)[0].finish_reason == "length"
    gone = []

    def take_out(index, event):
        gone.append(event.request_id)
        engine.abort(event.request_id)
        engine.pop(event.request_id)

    with pytest.raises(RuntimeError, match=r"requests \[\d+\] were taken out of the engine"):
        llm.generate(GOLDEN.prompts[:1], greedy(), take_out)
    assert len(gone) == 1 and not engine.has_work and not engine._reader._events


def test_of_several_processes_one_thread_calls(llm, monkeypatch):
    """Another one's requests would come at another step in each process."""
    refused = []

    def on_token(index, event):
        if not refused:
            with monkeypatch.context() as patch:
                patch.setattr(jax, "process_count", lambda: 2)
                for call in (lambda: llm.generate(["w1"]), lambda: llm.abort(event.request_id)):
                    with pytest.raises(RuntimeError, match="call it from one thread") as error:
                        Patient(call).result()
                    refused.append(str(error.value).split()[0])

    found = llm.generate(GOLDEN.prompts, greedy(), on_token)
    assert refused == ["generate", "abort"]
    assert [c.token_ids for c in found] == GOLDEN.greedy


def test_the_lock_is_fair_and_survives_an_interrupt():
    lock, order, threads = FairLock(), [], []

    def take(number):
        for _ in range(2):
            with lock:
                order.append(number)

    with lock, lock:
        for number in range(5):
            threads.append(Patient(take, number))
            wait_for(lambda: len(lock._queue) == len(threads) + 1)
    for thread in threads:
        thread.result()
    assert order[:5] == list(range(5)) and sorted(order[5:]) == list(range(5))

    def interrupted(*_):
        raise KeyboardInterrupt

    def take_in_vain():
        patient, lock._changed.wait_for = lock._changed.wait_for, interrupted
        try:
            take(5)
        finally:
            lock._changed.wait_for = patient

    with lock, pytest.raises(KeyboardInterrupt):
        Patient(take_in_vain).result()
    Patient(take, 6).result()
    assert order[10:] == [6, 6]


# What is asked for


def test_prompts_and_params_may_come_one_by_one(llm):
    prompts = (iter(prompt) for prompt in GOLDEN.prompts)
    found = llm.generate(prompts, (greedy(count) for count in (1, 2, 3)))
    assert [c.token_ids for c in found] == [GOLDEN.greedy[i][: i + 1] for i in range(3)]
    assert [c.prompt for c in found] == GOLDEN.prompts
    assert llm.generate([]) == []

    def failing():
        yield GOLDEN.prompts[0]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate(failing())


@pytest.mark.parametrize("prompts", [None, 5, b"ab", {"role": "user"}, {"a", "b"}, 1.5])
def test_prompts_of_no_known_kind_are_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompts is .*: expected a text, or a list of prompts"):
        llm.generate(prompts)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (itertools.repeat(SamplingParams()), "3 prompts and more SamplingParams"),
        ({"temperature": 1}, "params must be SamplingParams, or one for each prompt"),
        ("greedy", "params must be SamplingParams, or one for each prompt"),
        (0.5, "params must be SamplingParams, or one for each prompt"),
        ([None] * 3, "params must be SamplingParams, got None"),
    ],
)
def test_params_of_another_kind_are_refused(llm, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(GOLDEN.prompts, params)


def test_an_on_token_that_cannot_be_called_is_refused(llm):
    with pytest.raises(ValueError, match="on_token is 'print': expected a function"):
        llm.generate(GOLDEN.prompts, greedy(), "print")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1, 2.0], greedy(), "prompt token id 2.0: expected an integer"),
        ([True], greedy(), "prompt token id True: expected an integer"),
        (["1"], greedy(), "prompt token id '1': expected an integer"),
        (np.ones((2, 2), np.int32), greedy(), "prompt token id array.*: expected an integer"),
        ([1, -1], greedy(), "prompt token id -1 is outside the vocabulary of 160"),
        ([160], greedy(), "prompt token id 160 is outside the vocabulary of 160"),
        ("w1 w2", greedy(), "the prompt is 'w1 w2': expected token ids"),
        (7, greedy(), "the prompt is 7: expected token ids"),
        ([1], None, "params is None: expected SamplingParams"),
        ([], greedy(), "has an empty prompt"),
    ],
)
def test_add_checks_what_it_gets(llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        llm.engine.add(prompt, params)
    assert not llm.engine.has_work and not llm.engine._reader.running


def test_pop_checks_what_it_gets(llm):
    engine = llm.engine
    request_id = engine.add(np.array(GOLDEN.prompts[0], np.uint8), greedy(1))
    with pytest.raises(ValueError, match=f"request {request_id} is not finished"):
        engine.pop(request_id)
    with pytest.raises(ValueError, match="there is no request 10000"):
        engine.pop(10_000)
    while not engine.step():
        pass
    request, text = engine.pop(request_id)
    assert request.prompt_token_ids == tuple(GOLDEN.prompts[0])
    assert {type(token) for token in request.token_ids} == {int}
    assert text == f"w{GOLDEN.greedy[0][0]}"
    with pytest.raises(ValueError, match=f"there is no request {request_id}"):
        engine.pop(request_id)
    assert not engine.abort(request_id)


@pytest.mark.parametrize("prompt", [None, 5, b"ab", {"role": "user"}, [1.5], [True]])
def test_a_prompt_of_no_known_kind_costs_the_others_nothing(llm, prompt):
    bad, good = llm.generate([prompt, GOLDEN.prompts[0]], greedy(2))
    assert "a prompt is a text, a list of token ids, or a list of chat messages" in bad.error
    assert good.token_ids == GOLDEN.greedy[0][:2]


@pytest.mark.parametrize("prompt", [{3, 1, 2}, frozenset({1}), {1: 2}.keys(), {1: 2}.items()])
def test_what_has_no_order_is_no_prompt(prompt):
    with pytest.raises(ValueError, match=f"a prompt is .*, got {type(prompt).__name__}"):
        LLM.encode(SimpleNamespace(tokenizer=None), prompt)


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
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"devices": 3}, "8 experts cannot be shared equally by 3 devices"),
        ({"max_context": 1000}, "max_context 1000 is out of range: expected 2 to 128"),
        ({"max_context": 128, "num_pages": 8}, "max_context 128 does not fit: .* 28 tokens"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"max_batched_tokens": 1}, "max_batched_tokens is 1: expected at least max_sequences, 2"),
        ({"dtype": "float16"}, "dtype is 'float16': expected"),
        ({"transport": "pigeon"}, "transport is 'pigeon': expected"),
    ],
)
def test_bad_arguments(folder, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(folder, **options)


def test_bad_environment(folder, monkeypatch):
    monkeypatch.setenv("USE_TBO", "maybe")
    with pytest.raises(ValueError, match="USE_TBO=maybe is not understood: expected 0, 1, auto, "):
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


@pytest.mark.slow
def test_dense_model_says_that_nothing_overlaps(tmp_path, caplog):
    llm = make_llm(
        with_tokenizer("llama", tmp_path),
        devices=2,
        mode="on",
        max_sequences=1,
        max_batched_tokens=2,
    )
    assert sum("nothing to overlap" in r.getMessage() for r in caplog.records) == 1
    golden = Golden("llama")
    found = [c.token_ids for c in llm.generate(golden.prompts, greedy())]
    assert found == golden.greedy
    assert np.asarray(llm.engine.runner.mesh.devices).size == 2


def test_the_models_sampling_is_the_default_and_said_once(folder, tmp_path, caplog, monkeypatch):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    asked = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 5, "typical_p": 0.9}
    (copy / "generation_config.json").write_text(json.dumps(asked))
    llm = make_llm(copy, max_sequences=1, max_batched_tokens=16)
    (said,) = [r.getMessage() for r in caplog.records if "generation_config" in r.getMessage()]
    assert "temperature 0.7" in said and "not applied: typical_p 0.9" in said
    prompt = GOLDEN.prompts[0]
    drawn = llm.default_sampling.params(seed=4)
    assert (drawn.temperature, drawn.max_new_tokens) == (0.7, 5)
    expected, found = llm.generate([prompt, prompt], [drawn, greedy(5)])
    assert found.token_ids == GOLDEN.greedy[0][:5]  # params that are given count as they are
    monkeypatch.setattr("secrets.randbelow", lambda most: 4)
    assert llm.generate([prompt])[0].token_ids == expected.token_ids


def test_a_request_that_another_thread_finishes_is_not_lost(llm, monkeypatch):
    """Its events wait in the engine when this call looks for them."""
    step, first = llm.engine.step, []

    def other_thread_steps(owner=None):
        events = step(owner)
        if not first:
            first.append(True)
            while llm.engine.scheduler.has_work:
                step("other")
            return []
        return events

    monkeypatch.setattr(llm.engine, "step", other_thread_steps)
    # Longer than a step, so that the first one has no token.
    (done,) = llm.generate([GOLDEN.prompts[0] * 6], greedy(3))
    assert done.finish_reason == "length" and len(done.token_ids) == 3


def test_tokens_without_text_end_their_request_only(llm, monkeypatch):
    """One whose tokens are looked at one by one, and one whose text is made at the end."""
    stream = running_module.TextStream
    made = []

    class Broken(stream):
        def push(self, token_id):
            if made.index(self) == 0 and len(made) > 1:
                raise ValueError("no such token")
            return super().push(token_id)

    def make(*args, **options):
        made.append(Broken(*args, **options))
        return made[-1]

    wanted = SamplingParams(max_new_tokens=4, stop=("never",))
    with monkeypatch.context() as patch:
        patch.setattr(running_module, "TextStream", make)
        bad, good = llm.generate(GOLDEN.prompts[:2], wanted)
    assert bad.finish_reason == "error" and "no text: no such token" in bad.error
    assert good.token_ids == GOLDEN.greedy[1][:4]

    def decode(ids, skip_special_tokens=True):
        if ids == GOLDEN.greedy[0][:4]:
            raise ValueError("no such token")
        return tokenizer.decode(ids, skip_special_tokens)

    engine, tokenizer = llm.engine, llm.engine.tokenizer
    monkeypatch.setattr(engine.language, "tokenizer", SimpleNamespace(decode=decode))
    bad, good = llm.generate(GOLDEN.prompts[:2], greedy(4))
    assert bad.finish_reason == "error" and "no text: no such token" in bad.error
    assert good.token_ids == GOLDEN.greedy[1][:4] and good.finish_reason == "length"


@pytest.mark.parametrize("request_id", ["0", [], None, True])
def test_ids_of_requests_are_integers(llm, request_id):
    for call in (llm.engine.pop, llm.abort):
        with pytest.raises(ValueError, match="request id .*: expected an integer"):
            call(request_id)


def test_devices_are_made_before_anything_asks_for_them(folder):
    """In a process of its own: JAX is not in use there yet."""
    code = f"""
from tbo_jax import LLM
try:
    LLM({str(folder)!r}, devices=2, show_progress=True, transport="two_level", max_context=10**6)
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert "max_context 1000000 is out of range" in done.stdout


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, {}, "quant_method='hqq' is not supp"),
        ({"eos_token_id": 99999}, {}, r"eos_token_id is \[99999\], and the vocabulary has 160"),
        ({}, {"tensor_parallel": 3, "devices": 3}, "cannot be shared equally by 3 devices"),
        ({}, {"devices": 3}, "experts cannot be shared equally by 3 devices"),
    ],
)
def test_what_is_not_supported_is_refused_before_the_weights(
    folder, tmp_path, monkeypatch, change, options, message
):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").unlink(missing_ok=True)

    def fetched(*args, **kwargs):
        raise AssertionError("the weights were fetched")

    monkeypatch.setattr(llm_module, "fetch_weights", fetched)
    with pytest.raises(ValueError, match=message):
        make_llm(copy, **options)


@pytest.mark.parametrize(
    ("prompts", "what"),
    [([1, 2, 3], "token ids"), ([{"role": "user", "content": "w1"}], "chat messages")],
)
def test_one_prompt_in_place_of_a_list_of_them(llm, prompts, what):
    with pytest.raises(ValueError, match=rf"one list of {what}: expected a list of prompts"):
        llm.generate(prompts)


def test_a_step_has_no_more_tokens_than_the_cache(folder):
    config = EngineConfig(max_batched_tokens=10**9, num_pages=5, page_size=4)
    decoder, _ = read_config(folder, np.float32)
    cache, longest = cache_config(config, decoder, make_mesh(1), 64)
    assert (cache.max_tokens, longest) == (16, 16)
    rows = dataclasses.replace(config, max_sequences=10**9)
    with pytest.raises(
        ValueError, match="max_sequences is 1000000000: expected at most 16, the tok"
    ):
        cache_config(rows, decoder, make_mesh(1), 64)
