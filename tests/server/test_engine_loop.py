"""The device's loop: what it tells of steps, and when."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from tbo_jax import SamplingParams
from tbo_jax.server import wire
from tbo_jax.server.engine_loop import EngineLoop
from tests.engine.engines import small_llm
from tests.golden_cases import with_tokenizer


@dataclass(eq=False)
class Reader:
    """A receiver that keeps what it is told until so many requests are over."""

    requests: int
    steps: list[wire.Step] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def tell(self, message):
        self.steps.append(message)
        self.requests -= sum(told.finish_reason is not None for told in message.others)
        if not self.requests:
            self.over.set()

    def of(self, number):
        """The tokens and the text of a request."""
        tokens, text = [], ""
        for step in self.steps:
            plain = zip(step.numbers, step.token_ids, step.texts, strict=True)
            told = [wire.Told(of, [token], piece) for of, token, piece in plain] + step.others
            for one in told:
                if one.number == number:
                    tokens += one.token_ids
                    text += one.text
        return tokens, text


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return small_llm(with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model")))


def run(llm, stream_interval, adds):
    """What a reader is told of requests, all of which are there before the first step."""
    reader = Reader(len(adds))
    loop = EngineLoop(llm, stream_interval=stream_interval)
    for number, (prompt, params, tells_tokens) in enumerate(adds):
        loop.add(reader, wire.Add(number, prompt, {}, tells_tokens=tells_tokens), params)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    assert reader.over.wait(60)
    loop.stop()
    thread.join(60)
    return reader


def test_tokens_are_gathered_for_an_interval(llm):
    """All of them come: those of the first step at once, the others when a request is over."""
    adds = [
        ([5, 6], SamplingParams(max_new_tokens=40, ignore_eos=True), True),
        ([7], SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=1, seed=3), True),
        ([8], SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=2), True),
    ]
    at_once, gathered = run(llm, 0.0, adds), run(llm, 1000.0, adds)
    for number, (_, params, _) in enumerate(adds):
        tokens, text = gathered.of(number)
        assert (tokens, text) == at_once.of(number) and text
        assert len(tokens) == params.max_new_tokens
    assert len(at_once.steps) >= 40
    # A first token, that of others where their prompts came later, and three ends.
    assert 4 <= len(gathered.steps) <= 6
    first = gathered.steps[0]
    assert len(first.numbers) + len(first.others) <= len(adds)


def test_requests_whose_tokens_nobody_waits_for_are_told_when_they_are_over(llm):
    adds = [
        ([5, 6], SamplingParams(max_new_tokens=40, ignore_eos=True), False),
        ([7], SamplingParams(max_new_tokens=30, ignore_eos=True), False),
    ]
    reader = run(llm, 0.0, adds)
    assert [len(step.others) for step in reader.steps] == [1, 1]
    assert not any(step.numbers for step in reader.steps)
    assert [len(reader.of(number)[0]) for number in (0, 1)] == [40, 30]
