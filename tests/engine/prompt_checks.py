"""Log-probabilities of prompts, and scores of texts, beside the logits of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tbo_jax import LLM, SamplingParams, Score, TokenLogprobs
from tests.golden_cases import Golden

GOLDEN = Golden("qwen3_moe")
MOST = 4


def wanting(most: int = MOST, new: int = 3, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, prompt_logprobs=most, **options)


def check(
    known: list[TokenLogprobs | None] | None,
    tokens: list[int],
    logits: np.ndarray,
    most: int = MOST,
) -> None:
    """Assert that they are log_softmax of the logits [len, V] of transformers."""
    assert known is not None and len(known) == len(tokens) and known[0] is None
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for of_token, token, row in zip(known[1:], tokens[1:], exact, strict=False):
        assert of_token is not None and of_token.token_id == token
        assert abs(of_token.logprob - row[token]) < 1e-4
        below, above = (int((row > row[token] + by).sum()) for by in (2e-4, -2e-4))
        assert below + 1 <= of_token.rank <= max(above, 1)
        best = np.sort(row)[::-1][:most]
        assert np.allclose(list(of_token.top.values()), best, atol=1e-4)
        assert np.allclose(row[list(of_token.top)], best, atol=1e-4)


def check_all(llm: LLM, count: int = 1) -> list[Any]:
    """All golden sequences at once, some wanting, some not, amid queues and chunks."""
    texts = [*GOLDEN.tokens, *GOLDEN.prompts] * count
    params = [wanting()] * len(GOLDEN.tokens)
    params += [SamplingParams(max_new_tokens=16, ignore_eos=True)] * len(GOLDEN.prompts)
    done = llm.generate(texts, params * count)
    for number, completion in enumerate(done):
        place = number % len(params)
        if place < len(GOLDEN.tokens):
            check(completion.prompt_logprobs, GOLDEN.tokens[place], GOLDEN.logits[place])
        else:
            assert completion.prompt_logprobs is None
            assert completion.token_ids == GOLDEN.greedy[place - len(GOLDEN.tokens)]
    return done


def check_score(score: Score, tokens: list[int], logits: np.ndarray) -> None:
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = exact[np.arange(len(tokens) - 1), tokens[1:]]
    assert score.token_ids == tokens and score.count == len(tokens) - 1
    assert np.allclose(score.logprobs, expected, atol=1e-4)
    assert math.isclose(score.total, expected.sum(), abs_tol=1e-4 * len(tokens))
