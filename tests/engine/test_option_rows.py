"""The rows of requests with options on the device: what each step's logits become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tbo_jax.engine.option_rows import ENTRIES, OptionRows
from tbo_jax.engine.request_options import RequestOptions, request_options
from tbo_jax.engine.scheduling.plan import ScheduledSequence
from tbo_jax.engine.scheduling.request import Request, unread_token
from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.text import Tokenizer
from tests.engine.option_checks import Step, check_changed, random_options
from tests.golden_cases import with_tokenizer

VOCABULARY, RANKS, ROWS = 160, 2, 3
ENDS = (13, 26)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def option_rows() -> OptionRows:
    return OptionRows(make_mesh(RANKS), ROWS, VOCABULARY, 5)


def resolve(params: SamplingParams, tokenizer: Tokenizer) -> RequestOptions | None:
    return request_options(params, tokenizer, ENDS, VOCABULARY, 5)


class Traffic:
    """Requests that come, decode, are preempted and go; each step's logits against the reference.

    With `ahead`, the last token of a request is on the device when its next step is planned.
    """

    def __init__(self, rows: OptionRows, tokenizer: Tokenizer, seed: int, ahead: bool):
        self.rows, self.tokenizer, self.ahead = rows, tokenizer, ahead
        self.rng = np.random.default_rng(seed)
        self.running: list[list[Request]] = [[] for _ in range(RANKS)]
        self.preempted: list[Request] = []
        self.next_id = 0
        self.options: dict[int, RequestOptions] = {}
        self.before: tuple[Step, np.ndarray] | None = None

    def arrive(self) -> None:
        for rank in self.running:
            while len(rank) < ROWS and self.rng.random() < 0.6:
                if self.preempted and self.rng.random() < 0.8:
                    rank.append(self.preempted.pop())  # perhaps on another rank
                    continue
                prompt = tuple(self.rng.integers(5, 12, self.rng.integers(1, 9)).tolist())
                request = Request(self.next_id, prompt, SamplingParams(**random_options(self.rng)))
                of = resolve(request.params, self.tokenizer)
                if of is not None:
                    self.options[request.request_id] = of
                self.next_id += 1
                rank.append(request)

    def leave(self) -> None:
        for rank in self.running:
            for request in list(rank):
                draw = self.rng.random()
                if draw < 0.15:
                    rank.remove(request)
                    if draw < 0.1 and not request.has_unread:
                        self.preempted.append(request)

    def read(self) -> None:
        """Have the host know the tokens of the step before."""
        if self.before is not None:
            for rank, tokens in zip(self.before[0].ranks, self.before[1], strict=True):
                for row, sequence in enumerate(rank):
                    if sequence.samples:
                        sequence.request.token_ids[-1] = int(tokens[row])
        self.before = None

    def sequence(self, request: Request) -> ScheduledSequence:
        of = self.options.get(request.request_id)
        drafts: tuple[int, ...] = ()
        if not self.ahead and (of is None or not of.counts):
            drafts = tuple(self.rng.integers(5, 12, self.rng.integers(0, 3)).tolist())
        return ScheduledSequence(request, 1 + len(drafts), self.rng.random() < 0.85, drafts)

    def step(self) -> int:
        """Run one; the number of rows that were compared."""
        if self.rng.random() < 0.2:  # as before a step that preempts
            self.read()
        self.leave()
        self.arrive()
        plan = Step(tuple(tuple(map(self.sequence, rank)) for rank in self.running))
        size = 3 * ROWS
        logits = self.rng.normal(0, 4, (RANKS, size, VOCABULARY)).astype(np.float32)
        fed = None if self.before is None else self.before[1][:, :ROWS]
        found = np.asarray(self.rows.change(plan, self.options, logits, fed, 3))
        self.read()
        sampled = self.rng.integers(5, 12, (RANKS, size)).astype(np.int32)
        compared = check_changed(plan, logits, found, ENDS, 3)
        for rank, sequences in enumerate(plan.ranks):
            for row, sequence in enumerate(sequences):
                if sequence.samples:
                    token = unread_token(row) if self.ahead else int(sampled[rank, row])
                    sequence.request.known.append(token)
        if self.ahead:
            self.before = plan, sampled
        return compared


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize("seed", range(4))
def test_logits_of_random_traffic_equal_the_reference(
    option_rows: OptionRows, tokenizer: Tokenizer, seed: int, ahead: bool
) -> None:
    option_rows.forget()
    traffic = Traffic(option_rows, tokenizer, seed, ahead)
    assert sum(traffic.step() for _ in range(40)) > 100


def test_a_failed_step_forgets_the_rows(option_rows: OptionRows, tokenizer: Tokenizer) -> None:
    """What they counted is counted anew."""
    option_rows.forget()
    params = SamplingParams(frequency_penalty=1.0)
    request = Request(0, (3, 4), params)
    of = resolve(params, tokenizer)
    assert of is not None
    logits = np.zeros((RANKS, 1, VOCABULARY), np.float32)

    def changed() -> np.ndarray:
        plan = Step(((ScheduledSequence(request, 1, True),), ()))
        return np.asarray(option_rows.change(plan, {0: of}, logits, None))[0, 0]

    assert not changed().any()
    request.known += [5]
    assert changed()[5] == -1
    option_rows.forget()
    request.known += [5]
    assert changed()[5] == -2 and np.count_nonzero(changed()) == 1


def test_more_entries_than_one_call_takes(tokenizer: Tokenizer) -> None:
    vocabulary = 2 * ENTRIES + 100
    rows = OptionRows(make_mesh(1), 1, vocabulary, 0)
    allowed = range(50, vocabulary, 1)
    params = SamplingParams(allowed_token_ids=tuple(allowed), repetition_penalty=2.0)
    of = request_options(params, tokenizer, ENDS, vocabulary, 0)
    assert of is not None
    prompt = tuple(range(0, vocabulary, 2))
    plan = Step(((ScheduledSequence(Request(0, prompt, params), len(prompt), True),),))
    logits = np.ones((1, 1, vocabulary), np.float32)
    found = np.asarray(rows.change(plan, {0: of}, logits, None))[0, 0]
    expected = np.where(np.arange(vocabulary) % 2 == 0, 0.5, 1)
    assert np.array_equal(found[50:], expected[50:])
    assert np.isneginf(found[:50]).all()


def test_requests_that_ask_for_nothing_cost_nothing(
    option_rows: OptionRows, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program is run, whatever others that do not sample ask for."""
    monkeypatch.setattr(option_rows, "compile", None)
    plain, asking = SamplingParams(), SamplingParams(frequency_penalty=1.0, logprobs=2)
    of = resolve(asking, tokenizer)
    assert of is not None and resolve(plain, tokenizer) is None
    sampling = ScheduledSequence(Request(0, (1,), plain), 1, True)
    chunk = ScheduledSequence(Request(1, (1, 2), asking), 1, False)
    plan = Step(((sampling, chunk), ()))
    logits: Any = np.zeros((RANKS, 2, VOCABULARY), np.float32)
    assert option_rows.change(plan, {1: of}, logits, None) is logits
    assert option_rows.describe(plan, {1: of}, logits, logits) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stop_token_ids=[160]), "stop_token_ids has id 160: expected ids of the vocabulary"),
        (dict(allowed_token_ids=[1, 170]), "allowed_token_ids has id 170"),
        (dict(logit_bias={999: 1.0}), "logit_bias has id 999"),
        (dict(bad_words=[" "]), r"bad_words has ' ', whose ids are \[\]"),
        (
            dict(bad_words=[f"w1 w{i}" for i in range(65)]),
            "65 forms of several tokens: expected at",
        ),
        (dict(allowed_token_ids=[7], bad_words=["w7"]), "rule out every token"),
        (dict(allowed_token_ids=[13, 5], min_tokens=1, stop_token_ids=[5]), "rule out every token"),
        (dict(logprobs=6), "logprobs is 6: expected at most max_logprobs of the engine, 5"),
    ],
)
def test_what_cannot_be_had_is_named(
    tokenizer: Tokenizer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(SamplingParams(**options), tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        dict(logprobs=0), dict(repetition_penalty=1.1), dict(frequency_penalty=1),
        dict(presence_penalty=1), dict(logit_bias={1: 1}), dict(allowed_token_ids=[1]),
        dict(bad_words=["w1"]), dict(min_tokens=1), dict(json_schema={}), dict(json_object=True),
        dict(regex="a"), dict(grammar="a"), dict(choice=["a"]),
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_an_engine_without_options_refuses_each_by_name(
    tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    params = SamplingParams(**options)
    with pytest.raises(ValueError, match=rf"SamplingParams\.{next(iter(options))} was given to an"):
        request_options(params, tokenizer, ENDS, VOCABULARY, None)
    assert (resolve(params, tokenizer) is None) == (params.structure is not None)


def test_what_needs_no_program_is_no_option(tokenizer: Tokenizer) -> None:
    host_only = SamplingParams(
        stop_token_ids=[3], include_stop_str_in_output=True, skip_special_tokens=False
    )
    assert request_options(host_only, tokenizer, ENDS, VOCABULARY, None) is None
    # There is nothing that could end the request too soon.
    assert request_options(SamplingParams(min_tokens=3), tokenizer, (), VOCABULARY, None) is None
