"""The logits of a step whose requests have structures: masked row by row, draft by draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tbo_jax.engine.scheduling.plan import ScheduledSequence
from tbo_jax.engine.scheduling.request import Request
from tbo_jax.engine.structured.grammars import Grammars
from tbo_jax.engine.structured.masks import TokenMasks
from tbo_jax.engine.structured.structure import Structure
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.sampling.masks import mask_logits
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import Tokenizer
from tests.engine.option_checks import Step
from tests.engine.structured.letters import end_ids, letters_tokenizer

VOCABULARY, RANKS, SEQUENCES, DRAFTS = 153, 2, 4, 2  # no multiple of 32
ROWS = SEQUENCES * (1 + DRAFTS)
TOKENIZER = Tokenizer(letters_tokenizer())
ENDS = end_ids(TOKENIZER)
OPTIONS: list[dict[str, Any]] = [
    dict(regex="[a-e]{1,4}( and [a-e]+)?"),
    dict(choice=["yes", "no", "null"]),
    dict(json_schema={"type": "array", "items": {"type": "boolean"}}, min_tokens=4),
    dict(regex="(ab)*c"),
    {},
]


def allowed(structure: Structure) -> np.ndarray:
    """The same by itself: [VOCABULARY] bool."""
    mask = np.frombuffer(structure.matcher.compute_bitmask(), np.int32)[None]
    bits = np.unpackbits(structure.masks(mask)[0].view(np.uint8), bitorder="little")
    return bits[:VOCABULARY].astype(bool)


@pytest.fixture(scope="module")
def masks() -> TokenMasks:
    return TokenMasks(make_mesh(RANKS), VOCABULARY)


class Row:
    """A sequence of a step, and what each of its rows of logits may become, found one by one."""

    def __init__(self, rng: np.random.Generator, request_id: int, structure: Any):
        self.structure: Structure | None = structure
        request = Request(request_id, (1, 2), SamplingParams())
        if rng.random() < 0.1:
            request.finish_reason = "abort"
        self.samples = bool(rng.random() < 0.85) and not request.is_finished
        self.expected: list[np.ndarray] = []  # of each row, up to one that nothing follows
        drafts = self._walk(rng) if structure is not None else []
        self.sequence = ScheduledSequence(request, 1 + len(drafts), self.samples, tuple(drafts))

    def _walk(self, rng: np.random.Generator) -> list[int]:
        """Be somewhere in the text; find the masks there and after each draft, and go back."""
        assert self.structure is not None
        begun = self._follow(rng, int(rng.integers(0, 3)), 1.0)
        self.structure.restart(begun)
        drafts = self._follow(rng, DRAFTS, 0.8) if begun else []
        self.structure.restart(begun)
        for draft in [*drafts, None]:
            self.expected.append(allowed(self.structure))
            ends = draft is None or not self.expected[-1][draft] or draft in ENDS
            if ends or self.structure.push(draft):
                break
        self.structure.restart(begun)
        return drafts

    def _follow(self, rng: np.random.Generator, count: int, right: float) -> list[int]:
        """Tokens that go on, or with some chance any; fewer where the text is complete."""
        assert self.structure is not None
        tokens: list[int] = []
        while len(tokens) < count:
            may = np.setdiff1d(np.flatnonzero(allowed(self.structure)), ENDS)
            if not len(may) or rng.random() >= right:
                tokens.append(int(rng.integers(VOCABULARY)))
                break
            tokens.append(int(rng.choice(may)))
            if self.structure.push(tokens[-1]):
                if right == 1.0:  # the text is over, and nobody would ask for more
                    tokens.pop()
                break
        return tokens


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_masks_one_by_one(masks: TokenMasks, seed: int) -> None:
    """With drafts that are right up to some place, chunks of prompts, and requests that ended."""
    rng = np.random.default_rng(seed)
    compiled = Grammars(TOKENIZER, ENDS, VOCABULARY)
    compared = drafted = 0
    for _ in range(10):
        ranks: list[list[Row]] = [[] for _ in range(RANKS)]
        structures: dict[int, Structure] = {}
        for rank, rows in enumerate(ranks):
            for place in range(SEQUENCES):
                request_id = rank * SEQUENCES + place
                options: Any = OPTIONS[rng.integers(len(OPTIONS))]
                structure = compiled.structure(SamplingParams(**options))
                if structure is not None:
                    structures[request_id] = structure
                rows.append(Row(rng, request_id, structure))
        plan = Step(tuple(tuple(row.sequence for row in rows) for rows in ranks))
        logits = rng.normal(0, 4, (RANKS, ROWS, VOCABULARY)).astype(np.float32)
        found = np.asarray(masks.change(plan, structures, logits, 1 + DRAFTS))
        for rank, rows in enumerate(ranks):
            for place, row in enumerate(rows):
                at = place * (1 + DRAFTS)
                for index in range(row.sequence.num_tokens):
                    given, mine = logits[rank, at + index], found[rank, at + index]
                    if row.structure is None or not row.samples:
                        assert np.array_equal(mine, given)
                    elif index < len(row.expected):
                        assert np.array_equal(mine, np.where(row.expected[index], given, -np.inf))
                        compared += 1
                        drafted += index > 0
    assert compared > 40 and drafted > 8


def test_a_step_without_structures_runs_nothing(
    masks: TokenMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "compile", None)
    structure = Grammars(TOKENIZER, ENDS, VOCABULARY).structure(SamplingParams(regex="a"))
    assert structure is not None
    chunk = ScheduledSequence(Request(0, (1, 2), SamplingParams(regex="a")), 1, False)
    plain = ScheduledSequence(Request(1, (1,), SamplingParams()), 1, True)
    logits = np.zeros((RANKS, ROWS, VOCABULARY), np.float32)
    assert masks.change(Step(((chunk, plain), ())), {0: structure}, logits) is logits


def test_a_text_that_cannot_go_on_says_so_and_harms_no_other(masks: TokenMasks) -> None:
    compiled = Grammars(TOKENIZER, ENDS, VOCABULARY)
    params = SamplingParams(choice=["a\U0001f600"]), SamplingParams(choice=["ab"])
    structures = dict(enumerate(filter(None, map(compiled.structure, params))))
    for structure in structures.values():
        structure.push(TOKENIZER.encode("a")[0])
    plan = Step(
        (tuple(ScheduledSequence(Request(i, (1,), p), 1, True) for i, p in enumerate(params)), ())
    )
    logits = np.zeros((RANKS, ROWS, VOCABULARY), np.float32)
    found = np.asarray(masks.change(plan, structures, logits))
    assert np.flatnonzero(np.isfinite(found[0, 1])).tolist() == TOKENIZER.encode("b")
    assert structures[1].error is None
    assert str(structures[0].error).startswith(
        "SamplingParams.choice cannot be followed at generated token 1: no token has the text"
    )


def test_what_is_not_finite_stays_so() -> None:
    logits = np.array([[np.nan, 0, 1], [np.inf, 2, 3], [4, -np.inf, -0.0]], np.float32)
    found = np.asarray(mask_logits(logits, np.array([[0b110], [0b110], [0b111]], np.int32)))
    assert np.isnan(found[:2, 0]).all()
    assert np.array_equal(found[:2, 1:], logits[:2, 1:])
    assert np.array_equal(found[2].view(np.int32), logits[2].view(np.int32))
