"""Random options of requests, and what they make of the logits of a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from tbo_jax.engine.scheduling.plan import SampledSequence, ScheduledSequence, StepPlan
from tests.engine.loads import VOCABULARY
from tests.sampling.option_reference import agree, reference_logits

WORDS = {"w7": (7,), "w7 w8": (7, 8), "w9 w9 w8": (9, 9, 8)}  # token i reads "w<i>"


@dataclass(frozen=True)
class Step:
    """What of a `StepPlan` options ask for, of any sequences."""

    ranks: tuple[tuple[ScheduledSequence, ...], ...]

    def sampled_of(self, request_ids: Collection[int]) -> list[SampledSequence]:
        found = []
        for rank, sequences in enumerate(self.ranks):
            for place, one in enumerate(sequences):
                if one.samples and one.request.request_id in request_ids:
                    found.append(SampledSequence(one.request, rank, place, one.drafts))
        return found


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of `SamplingParams`, each with a chance of its own."""
    drawn = {
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "logit_bias": {int(i): float(rng.normal()) for i in rng.integers(0, VOCABULARY, 5)},
        "allowed_token_ids": [7, 8, 9, 13, *rng.integers(20, VOCABULARY, 40).tolist()],
        "bad_words": tuple(WORDS),
        "min_tokens": int(rng.integers(1, 9)),
        "stop_token_ids": [int(rng.integers(0, 8))],
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.35}


def check_changed(
    plan: StepPlan | Step,
    logits: np.ndarray,
    found: np.ndarray,
    ends: Collection[int],
    width: int = 1,
) -> int:
    """Assert that logits [R, L, V] became those of the reference; the number of rows compared.

    Each sequence has `width` rows, of which those beyond its drafts stay as they are.
    """
    compared = 0
    for rank, sequences in enumerate(plan.ranks):
        unchanged = np.ones(len(found[rank]), bool)
        for place, sequence in enumerate(sequences):
            request = sequence.request
            for index in range(len(sequence.drafts) + 1):
                row = place * width + index
                expected = logits[rank, row]
                if sequence.samples:
                    expected = reference_logits(
                        logits[rank, row],
                        request.params,
                        request.prompt_token_ids,
                        [*request.generated_token_ids, *sequence.drafts[:index]],
                        tuple(ends),
                        [WORDS[word] for word in request.params.bad_words],
                    )
                assert agree(found[rank, row], expected), (request, index)
                compared += 1
                unchanged[row] = False
        assert np.array_equal(found[rank, unchanged], logits[rank, unchanged])
    return compared
