"""Steps that verify drafts: logits of every token against transformers, cut between drafts too."""

from __future__ import annotations

import numpy as np
import pytest

from tbo_jax import Bucket
from tbo_jax.overlap.split import split_batch_decoder_layers
from tests.golden_cases import Golden
from tests.models.parity import PREFILL, ROWS, feed, fill_with_nan, make_runner, shuffled_pages

VERIFY = Bucket(4 * ROWS, ROWS, decode=True, drafts=3)


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches"),
    [
        ("llama", 1, 2),
        pytest.param("llama", 1, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, 2, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_logits_of_known_tokens_and_drafts(name, devices, micro_batches, monkeypatch):
    golden = Golden(name)
    runner = make_runner(name, devices=devices, micro_batches=micro_batches)
    runner.logits = "last"  # verify steps give those of all tokens all the same
    buffers = fill_with_nan(runner.allocate())
    sequences = [(i, s) for i, s in enumerate(golden.tokens) if len(s) > 2]
    counts = [1 + i % 4 for i in range(len(sequences))]  # with none to three drafts
    starts = [len(s) - count for (_, s), count in zip(sequences, counts)]
    pages = shuffled_pages(0, [s for _, s in sequences])
    prompts = [(0, s[:start]) for (_, s), start in zip(sequences, starts)]
    _, buffers = feed(runner, buffers, PREFILL, prompts, pages)
    steps = [(start, s[start:]) for (_, s), start in zip(sequences, starts)]
    batches = []
    step = runner.step
    monkeypatch.setattr(runner, "step", lambda *args: (batches.append(args[2]), step(*args))[1])
    found, _ = feed(runner, buffers, VERIFY, steps, pages)
    for (number, _), start, of_ranks in zip(sequences, starts, found.values()):
        for logits in of_ranks:
            np.testing.assert_allclose(logits, golden.logits[number][start:], atol=1e-4, rtol=0)
    one = type(batches[0])(**{k: v if v is None else v[0] for k, v in vars(batches[0]).items()})
    parts = split_batch_decoder_layers(one, micro_batches)
    rows = sum(int(part.num_sequences) for part in parts)
    assert (rows > len(sequences)) == (micro_batches > 1)  # a cut lies between two drafts


@pytest.mark.parametrize("decode", [True, False])
def test_impossible_buckets_are_refused(decode):
    with pytest.raises(ValueError, match="drafts must be at least 0, got -1"):
        Bucket(8, 2, decode, -1)


@pytest.mark.parametrize(("drafts", "block"), [(0, 1), (1, 2), (2, 4), (3, 4), (4, 8), (7, 8)])
def test_a_sequence_is_one_block_of_queries(drafts, block):
    assert Bucket(4 * (drafts + 1), 4, True, drafts).query_block == block
