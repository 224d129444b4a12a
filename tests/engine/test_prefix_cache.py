"""Prompts that begin alike: with kept pages the same tokens and text as without, for less work."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from tbo_jax import SamplingParams
from tbo_jax.engine.engine import Engine
from tests.engine.engines import like, small_llm
from tests.engine.loads import END_OF_SEQUENCE, VOCABULARY, Load, random_load, run
from tests.engine.not_finite import EMBEDDING, ERROR, poisoned
from tests.golden_cases import Golden, with_tokenizer

NAME = "qwen3_moe"
GOLDEN = Golden(NAME)


@dataclass(frozen=True)
class Case:
    model: str = NAME
    devices: int = 1
    tensor: int = 1
    mode: str = "off"
    drafts: int = 0
    waits: bool = False  # no look-ahead


CASES = [
    Case(devices=4, mode="on"),
    Case(drafts=3),
    pytest.param(Case(waits=True), marks=pytest.mark.slow),
    pytest.param(Case(devices=4, tensor=2), marks=pytest.mark.slow),
    pytest.param(Case(devices=4, mode="on", drafts=3), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", mode="on"), marks=pytest.mark.slow),  # latent
    pytest.param(Case("gpt_oss", mode="on"), marks=pytest.mark.slow),  # sliding windows
    # Windows in all layers, so that pages are given up.
    pytest.param(Case("mistral", drafts=3), marks=pytest.mark.slow),
    pytest.param(Case("mistral", mode="on"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def engines(tmp_path_factory, request) -> tuple[Engine, Engine]:
    """Without and with, on the same compiled steps, and with few pages."""
    case = request.param
    folder = with_tokenizer(case.model, tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_SEQUENCE}))
    without = small_llm(
        folder,
        case.devices,
        case.mode,
        tensor_parallel=case.tensor,
        max_sequences=3,
        num_pages=13 if case.model == "mistral" else 20,
        look_ahead=False if case.waits else None,
        speculate=case.drafts,
        prefix_cache=False,
    ).engine
    assert without.scheduler._window == (8 if case.model == "mistral" else None)
    return without, like(without, look_ahead=without.look_ahead, speculate=without.speculate)


def tree_load(seed: int, *, content: bool) -> Load:
    """A random load whose prompts begin like earlier ones, some of them from load to load."""
    rng = np.random.default_rng(seed)
    load = random_load(rng, content=content)
    roots = np.random.default_rng(seed // 4).integers(0, VOCABULARY, (3, 24)).tolist()
    prompts: list[list[int]] = []
    for prompt in load.prompts:
        begun = roots[rng.integers(3)] if rng.random() < 0.6 or not prompts else prompts[-1]
        kept = begun[: rng.integers(1, len(begun) + 1)]
        prompts.append([*kept, *prompt[: rng.integers(0, 8)]])
    return replace(load, prompts=prompts)


# In this load the two best tokens of a greedy request are 2.4e-7 apart, and steps of other shapes
# round otherwise.
TIED = 1045


def check_loads(engines: tuple[Engine, Engine], seeds: Iterable[int]) -> None:
    without, with_cache = engines
    for seed in seeds:
        load = tree_load(seed, content=seed % 2 == 1)
        expected, found = run(without, load), run(with_cache, load)
        if not load.abort_after:
            assert found == expected
        for index, (ours, theirs) in enumerate(zip(found.events, expected.events, strict=True)):
            if index in load.abort_after:  # requests come and go at other steps
                theirs = theirs[: len(ours)]
            assert ours[: len(theirs)] == theirs


def test_the_same_tokens_and_text_as_without(engines, compilations):
    """Greedy and drawn, in chunks and queues, preempted, ended in all ways."""
    check_loads(engines, range(12))
    without, with_cache = (engine.scheduler.statistics for engine in engines)
    assert with_cache.cached_tokens > 150 and without.cached_tokens == without.evictions == 0
    assert with_cache.evictions > 20 or engines[0].runner.mesh.size > 1
    assert with_cache.prefill_tokens < 0.85 * without.prefill_tokens
    assert compilations() == 0


@pytest.mark.slow
def test_the_same_tokens_and_text_as_without_many_times(engines):
    check_loads(engines, [seed for seed in range(1000, 1100) if seed != TIED])
    assert engines[1].scheduler.statistics.preemptions > 5
    assert engines[1].scheduler.statistics.evictions > 300


def crowd(count: int) -> Load:
    wanted = SamplingParams(max_new_tokens=32, ignore_eos=True)
    prompts = [[*GOLDEN.prompts[2][:8], number] for number in range(count)]
    return Load(prompts, [wanted] * count, [0] * count)


def test_those_that_are_preempted_find_their_own_pages(engines):
    without, with_cache = engines
    load = crowd(4 * without.runner.mesh.size)
    before = [replace(engine.scheduler.statistics) for engine in engines]
    assert run(with_cache, load) == run(without, load)
    spent = [
        engine.scheduler.statistics.prefill_tokens - was.prefill_tokens
        for engine, was in zip(engines, before, strict=True)
    ]
    assert without.scheduler.statistics.preemptions > before[0].preemptions
    assert spent[1] < spent[0]


def test_a_step_that_fails_leaves_no_page_to_be_found(engines, monkeypatch):
    _, with_cache = engines
    load = crowd(1)
    expected = run(with_cache, load)
    step = with_cache.runner.run

    def failing(*args):
        step(*args)  # has taken the donated buffers
        raise RuntimeError("no more")

    monkeypatch.setattr(with_cache.runner, "run", failing)
    with pytest.raises(RuntimeError, match="no more"):
        run(with_cache, load)
    monkeypatch.undo()
    with_cache.abort(with_cache._next_id - 1)
    with_cache.pop(with_cache._next_id - 1)
    cached = with_cache.scheduler.statistics.cached_tokens
    assert run(with_cache, load) == expected
    assert with_cache.scheduler.statistics.cached_tokens == cached


def test_what_is_not_finite_is_not_found_again(engines):
    _, with_cache = engines
    load = crowd(1)
    with poisoned(with_cache, EMBEDDING, load.prompts[0][2]):
        assert run(with_cache, load).events == [[ERROR]]
    cached = with_cache.scheduler.statistics.cached_tokens
    assert run(with_cache, load) == run(engines[0], load)
    assert with_cache.scheduler.statistics.cached_tokens == cached


# What a caller sees


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = with_tokenizer(NAME, tmp_path_factory.mktemp("model"))
    return small_llm(folder, max_sequences=2, num_pages=48)


def test_the_second_turn_of_a_chat_computes_what_is_new(llm):
    wanted = SamplingParams(max_new_tokens=16, ignore_eos=True)
    llm.engine.clear_prefix_cache()
    statistics = llm.engine.scheduler.statistics
    prompt = [*GOLDEN.prompts[2], *GOLDEN.prompts[1]]
    (first,) = llm.generate([prompt], wanted)
    turn = [*prompt, *first.token_ids, 5, 6, 7]
    computed = statistics.prefill_tokens
    (second,) = llm.generate([turn], wanted)
    # All full pages of the first turn, but for its last token, which was never computed.
    there = (len(prompt) + 15) // 4 * 4
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, there)
    assert statistics.prefill_tokens - computed == len(turn) - there
    llm.engine.clear_prefix_cache()
    (anew,) = llm.generate([turn], wanted)
    assert anew == replace(second, num_cached_tokens=0)


def test_the_same_prompt_again_and_with_a_salt(llm):
    wanted = SamplingParams(max_new_tokens=16, ignore_eos=True)
    llm.engine.clear_prefix_cache()
    salts = ["", "", "mine", "mine", "yours"]
    found = [llm.generate(GOLDEN.prompts[2:], wanted, cache_salt=salt)[0] for salt in salts]
    most = (len(GOLDEN.prompts[2]) - 1) // 4 * 4
    assert [done.num_cached_tokens for done in found] == [0, most, 0, most, 0] and most > 0
    assert [done.token_ids for done in found] == GOLDEN.greedy[2:] * 5
    with pytest.raises(ValueError, match="cache_salt is 7: expected a text"):
        llm.generate(GOLDEN.prompts[2:], wanted, cache_salt=7)


def test_requests_that_begin_alike_at_once(llm):
    wanted = SamplingParams(max_new_tokens=4, ignore_eos=True)
    llm.engine.clear_prefix_cache()
    before = llm.statistics
    prompts = [[*GOLDEN.prompts[2][:8], number] for number in range(6)]
    found = llm.generate(prompts, wanted)
    assert [done.num_cached_tokens for done in found] == [0] + [8] * 5
    after = llm.statistics
    assert after["cached_tokens"] - before["cached_tokens"] == 40
    assert after["evictions"] == before["evictions"]


def test_a_warm_up_forgets_what_its_steps_may_overwrite(llm):
    wanted = SamplingParams(max_new_tokens=1)
    llm.generate(GOLDEN.prompts[2:], wanted)
    assert llm.generate(GOLDEN.prompts[2:], wanted)[0].num_cached_tokens > 0
    llm.engine.warm_up()
    assert llm.generate(GOLDEN.prompts[2:], wanted)[0].num_cached_tokens == 0


def test_pages_in_use_cannot_be_forgotten(llm):
    def clear(index, event):
        llm.engine.clear_prefix_cache()

    with pytest.raises(RuntimeError, match="1 requests are unfinished, and use their pages"):
        llm.generate(GOLDEN.prompts[2:], SamplingParams(max_new_tokens=4), clear)
    llm.engine.clear_prefix_cache()


def test_a_page_that_is_shared_is_not_written(llm):
    """Bit by bit: whatever is computed beside them, and after them, leaves kept pages alone."""
    wanted = SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine = llm.engine
    engine.clear_prefix_cache()
    llm.generate(GOLDEN.prompts[2:], wanted)
    rank = engine.scheduler._ranks[0]
    kept = [page for page in range(1, 48) if rank.pages.is_kept(page)]

    def content() -> list[np.ndarray]:
        leaves = jax.tree.leaves(engine._dispatcher._allocated)
        return [np.array(leaf)[kept] for leaf in leaves if leaf.shape[0] == 48]

    before = content()
    prompts = [[*GOLDEN.prompts[2], *extra] for extra in ([], [3], [4, 5])]
    found = llm.generate(prompts * 2, wanted)
    assert all(done.num_cached_tokens > 0 for done in found)
    assert len(before) > 0 and before[0].any()
    for was, is_now in zip(before, content(), strict=True):
        np.testing.assert_array_equal(was, is_now)
