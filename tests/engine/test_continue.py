"""Requests that go on after tokens that another engine gave: the rest is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tbo_jax import SamplingParams
from tbo_jax.engine.engine import Engine
from tbo_jax.engine.running import TokenEvent
from tests.engine.engines import small_llm
from tests.engine.structured.letters import with_letters

NAME = "qwen3_moe"
PROMPT = [40, 7, 9, 8, 7, 99, 100, 3]
LENGTH = 14

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": dict(temperature=1.0, top_p=0.95, seed=5),
    "hot": dict(temperature=3.0, seed=2),  # bytes of unfinished characters, too
    "penalties": dict(
        repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.4, temperature=0.8, seed=3
    ),
    "bad words and bias": dict(bad_words=("an", "th"), logit_bias={50: 2.0}, temperature=1.2, seed=9),
    "min tokens": dict(min_tokens=6, stop_token_ids=list(range(0, 160, 3)), temperature=1.5, seed=4),
    "stop": dict(stop=("e", "a1"), temperature=2.0, seed=6),
    "logprobs": dict(logprobs=2, temperature=1.0, seed=8),
    "prompt logprobs": dict(prompt_logprobs=1),
    "regex": dict(regex="[a-z]{3}( [0-9a-f]+){1,3}", ignore_eos=False, temperature=1.0, seed=11),
    "schema": dict(
        json_schema={
            "type": "object", "properties": {"ab": {"type": "boolean"}}, "required": ["ab"],
            "additionalProperties": False,
        },
        ignore_eos=False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = with_letters(NAME, tmp_path_factory.mktemp("model"))
    return small_llm(folder, max_sequences=4, num_pages=96, prompt_logprobs=True).engine


def drain(engine: Engine, request_id: int) -> tuple[list[TokenEvent], Any, str]:
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += [event for event in engine.step() if event.request_id == request_id]
    return events, *engine.pop(request_id)


def rounded(event: TokenEvent) -> tuple[Any, ...]:
    known = event.logprobs
    told = None if known is None else (known.token_id, round(known.logprob, 3), list(known.top))
    return event.token_id, event.text, event.finish_reason, told


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_rest_is_the_same_after_every_token(engine: Engine, options: dict[str, Any]) -> None:
    params = SamplingParams(**dict(max_new_tokens=LENGTH, ignore_eos=True) | options)
    whole, request, text = drain(engine, engine.add(PROMPT, params))
    assert "".join(event.text for event in whole) == text and len(whole) > 2
    for k in range(1, len(whole)):
        tokens = [event.token_id for event in whole[:k]]
        rest, again, all_text = drain(engine, engine.add(PROMPT, params, generated=tokens))
        assert list(map(rounded, rest)) == list(map(rounded, whole[k:]))
        assert again.generated_token_ids == request.generated_token_ids and all_text == text
        if params.prompt_logprobs is not None:
            told, first = again.prompt_logprobs.read(), request.prompt_logprobs.read()
            assert [t and t.token_id for t in told] == [t and t.token_id for t in first]
    engine.check()
    assert not engine.has_work and not engine._reader.running


def test_many_go_on_at_a_time(engine: Engine) -> None:
    """More than there are rows, so that they wait, and are preempted."""
    params = [SamplingParams(max_new_tokens=40, ignore_eos=True, **CASES[name]) for name in
              ("greedy", "drawn", "hot", "penalties", "logprobs")]  # fmt: skip
    alone = [drain(engine, engine.add(PROMPT, one))[0] for one in params]
    wanted, found = {}, {}
    for one, events in zip(params, alone):
        for k in (1, 9, 25):
            tokens = [event.token_id for event in events[:k]]
            request_id = engine.add(PROMPT, one, generated=tokens)
            wanted[request_id], found[request_id] = events[k:], []
    while engine.has_work:
        for event in engine.step():
            found[event.request_id].append(event)
    for request_id in wanted:
        engine.pop(request_id)
        assert list(map(rounded, found[request_id])) == list(map(rounded, wanted[request_id]))
    engine.check()


def test_what_a_request_cannot_go_on_after_is_refused(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=3, stop_token_ids=[9], stop=("the",))
    the = engine.tokenizer.encode("the")
    for tokens, reason in (
        ([50, 51, 52], "3 tokens, and the request ends"),
        ([9], "1 tokens, and the request ends"),
        (the, "the request ends"),
        ([160], "generated token id 160 is outside the vocabulary of 160"),
        (["a"], "generated token id 'a': expected an integer"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.add(PROMPT, params, generated=tokens)
    with pytest.raises(ValueError, match="regex cannot be followed"):
        engine.add(PROMPT, SamplingParams(regex="[0-9]+"), generated=the)
    assert not engine.has_work and not engine._reader.running
