"""`AsyncLLM` on a tiny model: many tasks, loops and threads; and what leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from tbo_jax import AsyncLLM, SamplingParams
from tbo_jax.engine import background
from tbo_jax.engine.background import STEP_ATTEMPTS
from tbo_jax.engine.structured.grammars import Grammars
from tests.engine.engines import small_llm, wait_for
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)
CHAT = [{"role": "user", "content": "w3 w4"}]
LONG = 100  # tokens that nobody waits for; the context ends before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ tail }}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return small_llm(folder, max_sequences=2, num_pages=96)


@pytest.fixture(scope="module")
def shared(llm):
    with AsyncLLM(llm) as front:
        yield front


@pytest.fixture
def front(llm, shared):
    """Nothing is left in it or in the engine when the test is over."""
    yield shared
    if shared.num_unfinished:
        gc.collect()  # streams in the frames of exceptions
    wait_for(lambda: not shared.num_unfinished)
    check_empty(llm)


def check_empty(llm):
    engine = llm.engine
    engine.check()
    assert not engine.has_work and not engine._reader.running and not engine._reader._events


def greedy(count=16, **options):
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **options)


def run(main):
    return asyncio.run(asyncio.wait_for(main, 300))


async def read(front, *args, **options):
    """A stream's events and its completion."""
    stream = await front.stream(*args, **options)
    events = [event async for event in stream]
    return events, stream.completion


def comparable(done):
    """What does not depend on the batch: not what was found in the cache, nor the last bits."""
    rounded = None
    if done.logprobs is not None:
        rounded = [(known.token_id, round(known.logprob, 3), known.rank) for known in done.logprobs]
    return dataclasses.replace(
        done, num_cached_tokens=0, logprobs=rounded, others=tuple(map(comparable, done.others))
    )


def test_results_are_those_of_generate(llm, front):
    text = " ".join(f"w{t}" for t in GOLDEN.prompts[0])
    wanted = [
        (GOLDEN.prompts[0], greedy()),
        (np.array(GOLDEN.prompts[1]), greedy(5, logprobs=2)),
        (text, greedy(6, n=3, temperature=0.9, seed=5, logprobs=0)),
        (CHAT, greedy(4)),
        (GOLDEN.prompts[2], greedy(9, stop=(f"w{GOLDEN.greedy[2][4]}",))),
    ]
    expected = llm.generate(
        [p for p, _ in wanted], [q for _, q in wanted], chat_template_kwargs={"tail": "w7"}
    )
    assert expected[0].token_ids == GOLDEN.greedy[0]
    before = llm.statistics

    async def main():
        options = dict(chat_template_kwargs={"tail": "w7"}, cache_salt="mine")
        streams = (read(front, *each, **options) for each in wanted)
        whole = (front.complete(*each, **options) for each in wanted)
        return await asyncio.gather(*streams), await asyncio.gather(*whole)

    streams, whole = run(main())
    for done, one, (events, completion) in zip(expected, whole, streams):
        np.testing.assert_equal(
            [dataclasses.asdict(comparable(c)) for c in (one, completion)],
            [dataclasses.asdict(comparable(done))] * 2,
        )
        for sample, each in enumerate((completion, *completion.others)):
            mine = [event for event in events if event.sample == sample]
            assert "".join(event.text for event in mine) == each.text
            assert [event.finish_reason for event in mine if event.finish_reason] == [
                each.finish_reason
            ]
            if each.logprobs is not None:
                assert [event.logprobs for event in mine] == each.logprobs
    assert expected[3].prompt_token_ids == [3, 4, 7] and len(expected[2].others) == 2
    wait_for(lambda: llm.statistics["seconds"] == llm.statistics["seconds"])  # it has to do nothing
    assert llm.statistics["seconds"] > before["seconds"]


def test_a_grammar_is_not_compiled_by_the_thread_that_decodes(front, monkeypatch):
    compiled, compile = [], Grammars._compile

    def noting(self, *args):
        known = len(self._compiled)
        grammar = compile(self, *args)
        if len(self._compiled) > known:
            compiled.append(threading.current_thread().name)
        return grammar

    monkeypatch.setattr(Grammars, "_compile", noting)
    done = run(front.complete([1], SamplingParams(regex="w7( w[12])+ w3")))
    assert re.fullmatch("w7( w[12])+ w3", done.text) or done.finish_reason == "length"
    assert len(compiled) == 1 and compiled[0].startswith("tbo_jax prompts")
    with pytest.raises(ValueError, match=r"SamplingParams.regex cannot be used: invalid regex"):
        run(front.complete([1], SamplingParams(regex="(")))


def test_threads_and_loops_beside_generate(llm, front, monkeypatch):
    """Each loop hears of a step once; nothing is run when there is nothing to do."""
    prompts = [GOLDEN.prompts[i % 3] for i in range(18)]
    wanted = [greedy(4 + i, temperature=0.5 * (i % 2), seed=i) for i in range(18)]
    expected = [c.token_ids for c in llm.generate(prompts, wanted)]
    told: list[list] = [[]]  # the loops that are told of tokens, in each step of the thread
    step, send = llm.engine.step, background.send

    def stepping(owner):
        if owner is front._thread._owner:
            told.append([])
        return step(owner)

    def sending(loop, batch):
        if any(item is not None for _, item in batch):
            told[-1].append(loop)
        send(loop, batch)

    monkeypatch.setattr(llm.engine, "step", stepping)
    monkeypatch.setattr(background, "send", sending)
    start = threading.Barrier(4)

    async def main(first):
        start.wait()
        asked = zip(prompts[first::4], wanted[first::4])
        return await asyncio.gather(*(read(front, *each) for each in asked))

    def generate():
        start.wait()
        return llm.generate(prompts[3::4], wanted[3::4])

    with ThreadPoolExecutor(4) as threads:
        loops = [threads.submit(run, main(first)) for first in range(3)]
        generated = threads.submit(generate)
        for first, each in enumerate(loops):
            for (events, done), tokens in zip(each.result(), expected[first::4]):
                assert done.token_ids == tokens == [event.token_id for event in events]
        assert [done.token_ids for done in generated.result()] == expected[3::4]
    wait_for(lambda: not front.num_unfinished)
    assert len({loop for each in told for loop in each}) == 3
    assert all(len(set(each)) == len(each) for each in told)
    before = len(told)
    time.sleep(0.05)
    assert len(told) == before


@pytest.mark.parametrize("how", ["break", "cancel", "cancel complete", "drop", "raise", "wait"])
def test_who_goes_away_ends_its_request(llm, front, how):
    before = llm.statistics["finished"]
    begun = asyncio.Event()

    async def leave():
        if how == "cancel complete":
            await front.complete(GOLDEN.prompts[0], greedy(LONG))
        stream = await front.stream(GOLDEN.prompts[0], greedy(LONG))
        if how == "drop":
            return None
        async for _ in stream:
            begun.set()
            if how == "break":
                break
            if how == "raise":
                raise KeyError("mine")
            if how == "wait":
                await asyncio.sleep(300)
        assert how == "break"
        rest = [event async for event in stream]  # who kept it is told how it ended
        assert rest[-1].finish_reason == stream.completion.finish_reason == "abort"

    async def main():
        other = asyncio.create_task(read(front, GOLDEN.prompts[1], greedy()))
        task = asyncio.create_task(leave())
        if how == "cancel complete":
            while front.num_unfinished < 2:
                await asyncio.sleep(0.001)
        elif how != "drop":
            await begun.wait()
        if how in ("cancel", "cancel complete", "wait"):
            task.cancel()
        expected = {"raise": KeyError, "break": (), "drop": ()}.get(how, asyncio.CancelledError)
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            await task
        return (await other)[1]

    assert run(main()).token_ids == GOLDEN.greedy[1]
    wait_for(lambda: not front.num_unfinished)
    after = llm.statistics["finished"]
    assert (after["abort"] - before["abort"], after["length"] - before["length"]) == (1, 1)


def test_a_task_that_is_cancelled_before_the_engine_has_its_prompt(llm, front):
    async def main():
        with llm.engine._lock:  # the thread cannot add it
            task = asyncio.create_task(front.stream(GOLDEN.prompts[0], greedy(LONG)))
            while not front.num_unfinished:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert front.num_unfinished == 1  # and the event loop did not wait for it

    run(main())


def test_a_time_limit_for_one_event_loses_nothing(llm, front, monkeypatch):
    step, go = llm.engine.step, threading.Event()
    monkeypatch.setattr(llm.engine, "step", lambda owner: go.wait(300) and step(owner))

    async def main():
        stream = await front.stream(GOLDEN.prompts[0], greedy())
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
        go.set()
        return [event.token_id async for event in stream]

    assert run(main()) == GOLDEN.greedy[0]


@pytest.mark.parametrize("thread", [False, True])
def test_abort_by_name(front, thread):
    async def main():
        stream = await front.stream(GOLDEN.prompts[0], greedy(LONG, n=2), request_id="mine")
        with pytest.raises(ValueError, match="request_id is 'mine': expected one that no unf"):
            await front.complete(GOLDEN.prompts[0], request_id="mine")
        whole = asyncio.create_task(front.complete(GOLDEN.prompts[0], greedy(LONG)))
        events = [await anext(stream)]
        call = (front.abort, stream.request_id)
        assert await asyncio.to_thread(*call) if thread else front.abort("mine")
        events += [event async for event in stream]
        assert not front.abort("mine") and not front.abort("other")
        (other,) = front._thread._tickets
        assert front.abort(other)
        return events, stream.completion, await whole

    events, done, whole = run(main())
    for sample, each in enumerate((done, *done.others)):
        mine = [event for event in events if event.sample == sample]
        assert each.finish_reason == mine[-1].finish_reason == "abort"
        assert each.text == "".join(event.text for event in mine)
    assert done.token_ids == GOLDEN.greedy[0][: len(done.token_ids)]
    assert whole.finish_reason == "abort" and len(whole.token_ids) < LONG


def test_a_slow_reader_holds_up_nobody(front):
    async def main():
        slow = await front.stream(GOLDEN.prompts[0], greedy())
        fast = await asyncio.gather(*(front.complete(GOLDEN.prompts[1], greedy()) for _ in "123"))
        while front.num_unfinished:
            await asyncio.sleep(0.001)
        assert slow.completion is None
        return fast, [event.token_id async for event in slow], slow.completion

    fast, tokens, done = run(main())
    assert [c.token_ids for c in fast] == [GOLDEN.greedy[1]] * 3
    assert tokens == done.token_ids == GOLDEN.greedy[0]


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ("", None, {}, "empty prompt"),
        (None, None, {}, "a prompt is a text, .*, got NoneType"),
        ([1] * 200, None, {}, "prompt of 200 tokens; expected at most"),
        ([9999], None, {}, "9999 is outside the vocabulary of 160"),
        ([1], {"n": 2}, {}, "params must be SamplingParams, got {'n': 2}"),
        ([1], greedy(logprobs=100), {}, "logprobs is 100: expected at most max_logprobs"),
        ([1], None, {"cache_salt": 7}, "cache_salt is 7: expected a text"),
        ([1], None, {"priority": 1.5}, r"priority is 1\.5: expected an integer"),
        ([1], None, {"request_id": 7}, "request_id is 7: expected a text"),
        (CHAT, None, {"chat_template_kwargs": 7}, "chat template arguments: .*, got 7"),
        ([{"role": "user"}], None, {}, "content"),
    ],
)
def test_what_is_wrong_is_told_when_it_is_asked_for(front, prompt, params, options, message):
    for call in (front.stream, front.complete):
        with pytest.raises(ValueError, match=message):
            run(call(prompt, params, **options))
    with pytest.raises(ValueError, match="request_id is 7: expected a text"):
        front.abort(7)


def test_a_stream_has_one_reader_in_one_loop(front):
    async def main():
        stream = await front.stream(GOLDEN.prompts[0], greedy(LONG))
        while stream._ticket.channel.items:
            await anext(stream)
        waits = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="read by two tasks at a time"):
            while True:
                await anext(stream)
        await waits
        with pytest.raises(RuntimeError, match="in another event loop than the one that made it"):
            await asyncio.to_thread(run, drain(stream))

    async def drain(stream):
        while True:
            await anext(stream)

    run(main())


# What goes wrong


@pytest.mark.parametrize("failures", [STEP_ATTEMPTS - 1, STEP_ATTEMPTS])
def test_steps_that_fail(llm, front, monkeypatch, failures):
    """They are repeated, and after some who waits is told. The next prompt runs."""
    step, failed = llm.engine.runner.run, []

    def failing(*args):
        result = step(*args)  # it has taken the donated buffers
        if len(failed) < failures:
            failed.append(KeyError("mine"))
            raise failed[-1]
        return result

    async def main():
        stream = await front.stream(GOLDEN.prompts[0], greedy(n=2))
        await anext(stream)
        monkeypatch.setattr(llm.engine.runner, "run", failing)
        rest = read_all(stream), front.complete(GOLDEN.prompts[1], greedy())
        return stream, await asyncio.gather(*rest, return_exceptions=True)

    async def read_all(stream):
        return [event async for event in stream]

    stream, (events, done) = run(main())
    assert len(failed) == failures
    if failures < STEP_ATTEMPTS:
        assert [event.token_id for event in events if not event.sample] == GOLDEN.greedy[0][1:]
        assert stream.completion.token_ids == GOLDEN.greedy[0]
        assert done.token_ids == GOLDEN.greedy[1]
        assert front.step_error is None
    else:
        for error in events, done:
            assert isinstance(error, RuntimeError)
            assert str(error) == "3 steps failed in a row, the last one with KeyError('mine')"
            assert error.__cause__ is failed[-1] is front.step_error
        assert events is not done and stream.completion is None
    assert run(front.complete(GOLDEN.prompts[2], greedy())).token_ids == GOLDEN.greedy[2]
    assert front.step_error is None


def test_a_request_that_is_taken_out_of_the_engine(llm, front):
    async def main():
        stream = await front.stream(GOLDEN.prompts[0], greedy(LONG, n=2))
        other = asyncio.create_task(front.complete(GOLDEN.prompts[1], greedy()))
        event = await anext(stream)
        with llm.engine._lock:
            llm.engine.abort(event.request_id)
            llm.engine.pop(event.request_id)
        with pytest.raises(RuntimeError, match=r"requests \[\d+\] were taken out|no request \d+"):
            async for _ in stream:
                pass
        return await other

    assert run(main()).token_ids == GOLDEN.greedy[1]


def test_a_loop_that_ended_with_streams_in_it(llm, front):
    kept, before = [], llm.statistics["finished"]["abort"]

    async def main():
        kept.append(await front.stream(GOLDEN.prompts[0], greedy(LONG, n=2)))
        kept.append(await front.stream(GOLDEN.prompts[1], greedy(LONG)))

    run(main())
    wait_for(lambda: not front.num_unfinished)
    assert llm.statistics["finished"]["abort"] == before + 3


def test_a_thread_that_has_an_error_says_so(llm, monkeypatch, caplog):
    front = AsyncLLM(llm)

    def broken(event):
        raise KeyError("mine")

    async def main():
        stream = await front.stream(GOLDEN.prompts[0], greedy(LONG))
        monkeypatch.setattr(front._thread, "_take", broken)
        calls = (anext(stream), front.complete(GOLDEN.prompts[1], greedy(LONG)))
        return await asyncio.gather(*calls, return_exceptions=True)

    *waited, error = (*run(main()), *run(refusals(front)))
    assert isinstance(waited[0], RuntimeError)
    for told in (*waited, error):
        assert "the engine's thread has ended: KeyError('mine')" in str(told)
        assert isinstance(told.__cause__, KeyError)
    front.shutdown()
    assert any("thread has ended" in record.getMessage() for record in caplog.records)
    check_empty(llm)


async def refusals(front):
    """What each call raises once it is over."""
    calls = (front.stream([1]), front.complete([1]), asyncio.to_thread(front.abort, "mine"))
    return await asyncio.gather(*calls, return_exceptions=True)


# The end


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown(llm, drain):
    front = AsyncLLM(llm)

    async def main():
        count = 16 if drain else LONG
        streams = [await front.stream(p, greedy(count)) for p in GOLDEN.prompts]
        ending = asyncio.create_task(front.ashutdown(drain=drain))
        read = [[event async for event in stream] for stream in streams]
        await ending
        return [stream.completion for stream in streams], read

    done, events = run(main())
    assert [c.text for c in done] == ["".join(event.text for event in each) for each in events]
    if drain:
        assert [c.token_ids for c in done] == GOLDEN.greedy
    else:
        assert "abort" in [c.finish_reason for c in done]
    for error in run(refusals(front)):
        assert isinstance(error, RuntimeError)
        assert str(error) == "the AsyncLLM was shut down: it takes no more calls"
    front.shutdown(drain=True)
    assert not front._thread._thread.is_alive()
    check_empty(llm)
    assert llm.generate(GOLDEN.prompts[:1], greedy())[0].token_ids == GOLDEN.greedy[0]


def test_of_a_block_that_raised_nothing_is_finished(llm):
    async def main():
        with pytest.raises(KeyError, match="mine"):
            async with AsyncLLM(llm) as front:
                stream = await front.stream(GOLDEN.prompts[0], greedy(LONG))
                raise KeyError("mine")
        assert [event.finish_reason async for event in stream][-1] == "abort"
        async with AsyncLLM(llm) as front:
            stream = await front.stream(GOLDEN.prompts[0], greedy())
        assert len([event async for event in stream]) == 16
        with llm.engine._lock:  # nothing is finished before the second shutdown
            front = AsyncLLM(llm)
            call = asyncio.create_task(front.complete(GOLDEN.prompts[0], greedy(LONG)))
            while not front.num_unfinished:
                await asyncio.sleep(0.001)
            draining = asyncio.create_task(front.ashutdown(drain=True))
            await asyncio.sleep(0)
            front._stop(False)
        await draining
        assert (await call).finish_reason == "abort"

    run(main())
    check_empty(llm)


def test_one_that_nobody_has_any_more_ends(llm):
    front = AsyncLLM(llm)
    thread = front._thread._thread
    stream = run(front.stream(GOLDEN.prompts[0], greedy(LONG)))
    del front
    gc.collect()
    assert thread.is_alive()
    del stream
    gc.collect()
    thread.join(300)
    assert not thread.is_alive()
    check_empty(llm)


def test_what_it_is_made_of(llm, monkeypatch):
    with pytest.raises(TypeError, match="expected an LLM or options, got both: {'devices': 2}"):
        AsyncLLM(llm, devices=2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="there are 2 processes: expected one"):
        AsyncLLM(llm)


@pytest.mark.slow
def test_an_interpreter_exits_without_a_shutdown(folder):
    """In the midst of steps, for a request that would go on for long."""
    code = f"""
import asyncio
from tbo_jax import AsyncLLM, SamplingParams
llm = AsyncLLM({str(folder)!r}, devices=1, max_sequences=1, max_batched_tokens=16,
               compilation_cache=False)
async def main():
    for _ in range(2):
        stream = await llm.stream([1, 2, 3], SamplingParams(max_new_tokens=100, ignore_eos=True))
        await anext(stream)
    return stream
stream = asyncio.run(main())
print(stream.completion, llm.num_unfinished > 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "None True\n", "")
