"""The key/value cache leaves room for the steps, where devices tell how much memory they have."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from tbo_jax import (
    LLM,
    Bucket,
    CacheConfig,
    EngineConfig,
    ModelRunner,
    OverlapConfig,
    SamplingParams,
)
from tbo_jax.attention.buffers import kv_bytes_per_page
from tbo_jax.checkpoint.load import load_model
from tbo_jax.engine import cache_size, devices
from tbo_jax.engine.cache_size import bytes_beside_cache, default_num_pages, pages_that_fit
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.step import kernels
from tests.golden_cases import Golden, with_tokenizer

GOLDEN = Golden("qwen3_moe")
PAGES, ROWS = 300, 2


@pytest.fixture(autouse=True, scope="module")
def attention_of_other_platforms() -> Iterator[None]:
    """XLA:CPU joins loops over little memory, so that larger steps of CPU's own take less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BY_XLA", {})
        yield


@functools.cache
def runner() -> ModelRunner:
    mesh = make_mesh(1)
    model = load_model(GOLDEN.folder, mesh=mesh, dtype=np.float32)
    return ModelRunner(model, CacheConfig(PAGES, 4, 6, 16), mesh=mesh, overlap=OverlapConfig())


def page_bytes() -> int:
    return kv_bytes_per_page(runner().config, 4)


def set_free(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(cache_size, "free_memory", lambda mesh: free)


def test_what_a_step_takes_beside_the_cache() -> None:
    taken = bytes_beside_cache(runner(), ROWS)
    temporary = runner().compile(Bucket(16, ROWS)).memory_analysis().temp_size_in_bytes
    logits = 4 * ROWS * runner().config.vocab_size
    assert temporary > 0
    assert taken > temporary + logits + runner().largest_weight
    cache = PAGES * page_bytes()
    assert taken < cache  # which is passed through, and does not count
    assert runner().largest_weight == max(leaf.nbytes for leaf in runner()._weights)


def test_verifying_drafts_has_more_logits() -> None:
    """Of every draft: 8 rows of 160 in place of 2."""
    plain, drafting = (bytes_beside_cache(runner(), ROWS, drafts) for drafts in (0, 3))
    verify = runner().compile(Bucket(8, ROWS, True, 3)).memory_analysis()
    assert drafting >= plain
    assert drafting >= runner().largest_weight + verify.temp_size_in_bytes + 4 * 8 * 160


def test_options_of_requests_have_tables_and_programs() -> None:
    """Of a bias and a mark for each token of the vocabulary and row, and of the changed logits."""
    plain, with_options = (bytes_beside_cache(runner(), ROWS, 0, most) for most in (None, 5))
    vocabulary = runner().config.vocab_size
    assert with_options > plain + 8 * ROWS * vocabulary + 4 * ROWS * vocabulary


@pytest.mark.slow
def test_prompts_have_a_program_of_their_own() -> None:
    """Which gives more where more of the best tokens are told."""
    none, five, all_of_them = (
        bytes_beside_cache(runner(), ROWS, 0, None, most) for most in (None, 5, 160)
    )
    assert none < five < all_of_them


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        (None, PAGES),  # not told
        (PAGES + 1000, PAGES),
        (PAGES, PAGES),
        (PAGES - 1, 296),  # 299 without its last bits
        (63, 63),
        (2, 2),
    ],
)
def test_pages_that_a_step_leaves_room_for(
    monkeypatch: pytest.MonkeyPatch, spare: int | None, expected: int
) -> None:
    """`spare` pages are free beside the largest step."""
    taken = bytes_beside_cache(runner(), ROWS)
    set_free(monkeypatch, None if spare is None else taken + spare * page_bytes())
    assert pages_that_fit(runner(), ROWS) == expected


def test_no_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, bytes_beside_cache(runner(), ROWS) + 2 * page_bytes() - 1)
    with pytest.raises(ValueError, match=r"MiB are free, and a step of 16 tokens takes .* MiB"):
        pages_that_fit(runner(), ROWS)
    set_free(monkeypatch, 1)
    with pytest.raises(ValueError, match="0 MiB are free, and a step"):
        pages_that_fit(runner(), ROWS)


def test_what_is_free_may_differ_a_little_from_start_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another number of pages would have all programs compiled anew."""
    found = set()
    for free in range(10_000_000, 10_100_000, 7_001):
        set_free(monkeypatch, free)
        found.add(default_num_pages(runner().config, runner().mesh, 1, 10**6, 10**6))
    assert len(found) <= 2
    affordable = 10_000_000 * 0.9 / kv_bytes_per_page(runner().config, 1)
    assert 0.96 * affordable < min(found) <= affordable


def test_an_engine_in_little_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It starts with fewer pages than 90 % of what is free would be, and a shorter context."""
    folder = with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))
    most = EngineConfig.max_logprobs
    free = bytes_beside_cache(runner(), ROWS, 0, most) + 4 * page_bytes()
    set_free(monkeypatch, free)
    options = dict(max_sequences=ROWS, max_batched_tokens=16, page_size=4, compilation_cache=False)
    llm = LLM(folder, overlap=OverlapConfig(), devices=1, **options)
    pages = llm.engine.runner.cache.num_pages
    assert 2 < pages < 0.9 * free / page_bytes()
    assert pages * page_bytes() + bytes_beside_cache(llm.engine.runner, ROWS, 0, most) <= free
    assert llm.engine.max_context == (pages - 1) * 4
    (done,) = llm.generate([GOLDEN.prompts[0]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert done.token_ids == GOLDEN.greedy[0][:4]
    with pytest.raises(ValueError, match=r"max_context \d+ does not fit: the cache"):
        LLM(folder, overlap=OverlapConfig(), devices=1, max_context=4 * pages, **options)


def test_devices_that_do_not_tell_are_named(caplog: pytest.LogCaptureFixture) -> None:
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_in_use": 5})
    mesh = SimpleNamespace(devices=np.array([device]), local_devices=[device], size=1)
    with caplog.at_level(logging.WARNING):
        default_num_pages(runner().config, mesh, 4, 1, 100)
    assert "platform gpu do not tell how much memory" in caplog.text


def test_free_memory_is_that_of_the_fullest() -> None:
    stats = ({"bytes_limit": 100, "bytes_in_use": 30}, {"bytes_limit": 100, "bytes_in_use": 80})
    local = [SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
    assert devices.free_memory(SimpleNamespace(local_devices=local)) == 20
    assert devices.free_memory(make_mesh(2)) is None


@pytest.mark.parametrize("given", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}])
def test_most_memory_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        monkeypatch.setenv(name, given.get(name, ""))
    devices.use_most_memory()
    assert {name: os.environ[name] for name in names if os.environ[name]} == (
        given or {names[0]: "0.9"}
    )
