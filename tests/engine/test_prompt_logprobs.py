"""Log-probabilities of prompts, and scores of texts, against the logits of transformers."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from tbo_jax import LLM, SamplingParams, Score
from tbo_jax.engine.dispatch import DispatchedStep
from tbo_jax.engine.engine import Engine
from tests.engine.engines import like, small_llm
from tests.engine.prompt_checks import GOLDEN, MOST, check, check_all, check_score, wanting
from tests.golden_cases import with_tokenizer

pytestmark = pytest.mark.slow  # tests/engine/test_llm.py has a quick one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


def make_llm(folder, devices=1, mode="off", **options) -> LLM:
    """With few rows and pages; blocks of 5 tokens do not divide a step of 16."""
    few = dict(max_sequences=2, num_pages=39, page_size=2, max_logprobs=MOST, prompt_logprobs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tbo_jax.step.forward.TOKENS_AT_A_TIME", 5)
        return small_llm(folder, devices, mode, **few | options)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make_llm(folder)


OTHERS = [
    pytest.param(dict(devices=1, mode="on"), id="on"),
    pytest.param(dict(devices=4, mode="off"), id="4"),
    pytest.param(dict(devices=4, mode="on"), id="4-on"),
    pytest.param(dict(devices=4, mode="on", tensor_parallel=2, scanned=True), id="4-on-tensor"),
    pytest.param(dict(speculate=2), id="speculate"),
]


@pytest.fixture(scope="module", params=OTHERS)
def other_llm(folder, request) -> LLM:
    return make_llm(folder, request_options=False, **request.param)


def test_they_are_those_of_transformers(llm: LLM, compilations) -> None:
    first = check_all(llm)
    # They take nothing of what was kept.
    again = check_all(llm)
    wanted = len(GOLDEN.tokens)
    assert not any(completion.num_cached_tokens for completion in again[:wanted])
    # Others find it.
    (long,) = [i for i in range(wanted) if len(GOLDEN.tokens[i]) == max(map(len, GOLDEN.tokens))]
    plain = SamplingParams(max_new_tokens=3, ignore_eos=True)
    llm.generate([GOLDEN.tokens[long]], wanting(0))
    (found,) = llm.generate([GOLDEN.tokens[long]], plain)
    assert found.num_cached_tokens >= (len(GOLDEN.tokens[long]) - 1) // 2 * 2 > 0
    assert found.token_ids == first[long].token_ids
    assert compilations() == 0


def test_other_devices_micro_batches_and_drafts(other_llm: LLM, compilations) -> None:
    before = compilations()
    check_all(other_llm)
    assert compilations() == before
    scores = other_llm.score(GOLDEN.tokens)
    for score, tokens, logits in zip(scores, GOLDEN.tokens, GOLDEN.logits, strict=True):
        check_score(score, tokens, logits)
    assert compilations() == before


def test_the_logits_of_all_tokens_are_never_there(llm: LLM) -> None:
    dispatcher = llm.engine._dispatcher
    bucket = llm.engine.buckets[-1]
    assert bucket.tokens == 16 and dispatcher._describing is not None
    text = dispatcher._describing.lower(bucket).as_text()
    vocabulary = llm.engine.runner.config.vocab_size
    blocks = f"tensor<{128 if bucket.tokens > 128 else 16}x{vocabulary}xf32>"
    assert blocks in text  # traced now, with the block as it is
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tbo_jax.step.forward.TOKENS_AT_A_TIME", 5)
        text = dispatcher._describing.lower(bucket).as_text()
    assert blocks not in text and f"tensor<5x{vocabulary}xf32>" in text


def test_who_does_not_ask_runs_the_usual_program(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine._dispatcher, "_describing", None)
    plain = SamplingParams(max_new_tokens=16, ignore_eos=True)
    done = llm.generate([*GOLDEN.prompts, [5]], [*[plain] * len(GOLDEN.prompts), wanting()])
    assert [c.token_ids for c in done[:-1]] == GOLDEN.greedy
    assert done[-1].prompt_logprobs == [None]  # nothing is to be told of one token


def test_samples_of_a_prompt_share_them(llm: LLM) -> None:
    tokens, logits = max(zip(GOLDEN.tokens, GOLDEN.logits, strict=True), key=lambda p: len(p[0]))
    params = wanting(2, n=3, temperature=1.0, seed=3, logprobs=1, frequency_penalty=1.0)
    (done,) = llm.generate([tokens], params)
    check(done.prompt_logprobs, tokens, logits, 2)
    assert done.logprobs is not None and len(done.logprobs) == 3
    assert [other.prompt_logprobs for other in done.others] == [done.prompt_logprobs] * 2
    (none,) = llm.generate([tokens], wanting(0))
    check(none.prompt_logprobs, tokens, logits, 0)


def completions(engine: Engine, requests: dict[int, tuple[list[int], np.ndarray | None]]) -> int:
    """Run the requests that were added and check them; returns preemptions amid a prompt."""
    amid, seen = 0, dict.fromkeys(requests, 0)
    while engine.scheduler.has_work:
        engine.step()
        engine.check()
        for request_id in requests:
            request = engine._reader.running[request_id].request
            told = request.prompt_logprobs
            if request.num_preemptions > seen[request_id]:
                seen[request_id] = request.num_preemptions
                amid += told is not None and told.num_told > 0 and not told.is_whole
    for request_id, (tokens, logits) in requests.items():
        request, _ = engine.pop(request_id)
        assert request.error is None and list(request.prompt_token_ids) == tokens
        if logits is not None:
            assert request.prompt_logprobs is not None
            check(request.prompt_logprobs.read(), tokens, logits)
    return amid


@pytest.mark.parametrize("look_ahead", [False, True])
def test_preemption_loses_none_and_doubles_none(llm: LLM, look_ahead: bool) -> None:
    """Decodes of a higher priority take the pages of a prompt that is computed in part."""
    engine = like(llm.engine, max_prompt_logprobs=MOST, look_ahead=look_ahead)
    longest = max(range(len(GOLDEN.tokens)), key=lambda i: len(GOLDEN.tokens[i]))
    tokens, logits = GOLDEN.tokens[longest], GOLDEN.logits[longest]
    pages = engine.runner.cache.num_pages - 1
    amid = 0
    # The page that a decode wants comes at another place of the prompt each time.
    for length in range(4):
        urgent = GOLDEN.prompts[0][:1] * (2 * (pages - -(-len(tokens) // 2) - 1) - length)
        requests: dict[int, tuple[list[int], np.ndarray | None]] = {}
        params = SamplingParams(max_new_tokens=12, ignore_eos=True)
        requests[engine.add(urgent, params, priority=-1)] = urgent, None
        requests[engine.add(tokens, wanting(), priority=1)] = tokens, logits
        amid += completions(engine, requests)
    assert amid > 0


def test_a_step_that_failed_loses_none(llm: LLM, monkeypatch) -> None:
    engine, read, calls = llm.engine, DispatchedStep.read, itertools.count()
    requests: dict[int, tuple[list[int], np.ndarray | None]] = {}
    for tokens, logits in zip(GOLDEN.tokens, GOLDEN.logits, strict=True):
        requests[engine.add(tokens, wanting())] = tokens, logits

    def failing(step):
        if next(calls) % 3 == 1:
            raise OSError("device lost")
        return read(step)

    monkeypatch.setattr(DispatchedStep, "read", failing)
    for _ in range(6):
        try:
            engine.step()
        except OSError:
            engine.check()
    monkeypatch.setattr(DispatchedStep, "read", read)
    completions(engine, requests)


def test_an_aborted_request_has_what_there_is(llm: LLM) -> None:
    longest = max(range(len(GOLDEN.tokens)), key=lambda i: len(GOLDEN.tokens[i]))
    tokens, logits = GOLDEN.tokens[longest], GOLDEN.logits[longest]
    request_id = llm.engine.add(tokens, wanting())
    llm.engine.step()
    llm.engine.abort(request_id)
    llm.engine.step()
    request, _ = llm.engine.pop(request_id)
    assert request.prompt_logprobs is not None
    known = request.prompt_logprobs.read()
    assert len(known) == 17 < len(tokens)
    check(known, tokens[:17], logits[:16])


# Scores


def test_scores_are_those_of_transformers(llm: LLM, compilations) -> None:
    before = compilations()
    scores = llm.score(GOLDEN.tokens)
    for score, tokens, logits in zip(scores, GOLDEN.tokens, GOLDEN.logits, strict=True):
        check_score(score, tokens, logits)
    text = " ".join(f"w{token}" for token in GOLDEN.tokens[0])
    (of_text,) = llm.score(text, priority=3, cache_salt="mine")
    assert of_text.token_ids == GOLDEN.tokens[0]
    assert np.allclose(of_text.logprobs, scores[0].logprobs, atol=1e-4)
    assert llm.score([[7]]) == [Score([7], [])]
    assert (llm.score([[7]])[0].total, llm.score([[7]])[0].count) == (0.0, 0)
    assert llm.score([]) == []
    assert compilations() == before


def test_what_was_not_compiled_is_refused_by_name(llm: LLM) -> None:
    (bad,) = llm.generate([[5, 6]], wanting(MOST + 1))
    assert bad.error is not None
    assert "prompt_logprobs is 5: expected at most max_logprobs of the engine, 4" in bad.error
    without = Engine(
        llm.engine.runner,
        llm.tokenizer,
        llm.engine.end_of_sequence,
        max_sequences=llm.engine.max_sequences,
        max_context=llm.engine.max_context,
    )
    with pytest.raises(ValueError, match="an engine with prompt_logprobs=True"):
        without.add([5, 6], wanting(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "engine", without)
        with pytest.raises(ValueError, match="an engine with prompt_logprobs=True"):
            llm.score(["w5 w6"])
