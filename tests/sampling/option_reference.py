"""The options of a request on one row of logits, written out token by token in float64.

Repetition as in transformers' `RepetitionPenaltyLogitsProcessor`, the rest and the order as in
vLLM's sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tbo_jax.sampling.params import SamplingParams


def reference_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    ends: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """[V] -> [V]. `ends` are end-of-sequence tokens, `words` the ids of `bad_words`."""
    changed = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        for token in range(len(changed)):
            if token not in params.allowed_token_ids:
                changed[token] = -np.inf
    for *start, last in words:
        if len(generated) >= len(start) and list(generated[len(generated) - len(start) :]) == start:
            changed[last] = -np.inf
    if len(generated) < params.min_tokens:
        for token in {*ends, *params.stop_token_ids}:
            changed[token] = -np.inf
    for token, bias in params.logit_bias:
        changed[token] += bias
    for token in {*prompt, *generated}:
        if changed[token] > 0:
            changed[token] /= params.repetition_penalty
        else:
            changed[token] *= params.repetition_penalty
    for token in set(generated):
        times = list(generated).count(token)
        changed[token] -= params.frequency_penalty * times + params.presence_penalty
    return changed


def reference_logprobs(logits: np.ndarray) -> np.ndarray:
    """log_softmax: [V] -> [V]."""
    logits = logits.astype(np.float64)
    high = logits.max()
    logprobs: np.ndarray = logits - high - np.log(np.exp(logits - high).sum())
    return logprobs


def agree(found: np.ndarray, expected: np.ndarray) -> bool:
    """To 1e-4, with -inf in the same places."""
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-4))
