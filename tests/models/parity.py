"""How a golden case is run: prefill in chunks and decode, on pages, on one or more devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tbo_jax import Bucket, CacheConfig, ForwardBatch, ModelRunner, OverlapConfig
from tbo_jax.checkpoint.load import load_model
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.parallel.sharding import make_mesh, num_ranks
from tests.golden_cases import Golden

PAGE, PAGES, COLUMNS, ROWS = 4, 48, 16, 8
PREFILL = Bucket(128, ROWS)
DECODE = Bucket(ROWS, ROWS, decode=True)
CACHE = CacheConfig(PAGES, PAGE, COLUMNS, PREFILL.tokens)


def make_runner(
    name: str,
    *,
    devices=1,
    tensor=1,
    nodes=1,
    micro_batches=1,
    expert_chunks=1,
    scanned=False,
    transport="all_to_all",
):
    mesh = make_mesh(devices, tensor=tensor, nodes=nodes)
    model = load_model(Golden(name).folder, mesh=mesh, dtype=jnp.float32, scanned=scanned)
    if expert_chunks > 1:
        overlap = OverlapConfig("on", strategy="expert_chunks", num_expert_chunks=expert_chunks)
    else:
        overlap = OverlapConfig("on" if micro_batches > 1 else "off", max(2, micro_batches))
    return ModelRunner(model, CACHE, mesh=mesh, overlap=overlap, transport=transport, logits="all")


def fill_with_nan(buffers):
    """As if the pages had held other programs' garbage."""
    return jax.tree.map(lambda leaf: leaf * jnp.nan if leaf.dtype == jnp.float32 else leaf, buffers)


def feed(runner, buffers, bucket, chunks, pages):
    """One step on every rank; `chunks` is a (start, tokens) per sequence, tokens may be empty.

    Rank r gets the sequences rotated by r, so that the ranks differ. Returns the logits of each
    sequence's tokens, from every rank, and the buffers.
    """
    ranks = num_ranks(runner.mesh)
    live = [i for i, (_, tokens) in enumerate(chunks) if tokens]
    orders = [live[r % len(live) :] + live[: r % len(live)] for r in range(ranks)]
    batches = [
        ForwardBatch.pack(
            [chunks[i][1] for i in order],
            [chunks[i][0] for i in order],
            [pages[i] for i in order],
            token_capacity=bucket.tokens,
            sequence_capacity=bucket.sequences,
            pages_per_sequence=COLUMNS,
        )
        for order in orders
    ]
    logits, buffers = runner.step(bucket, buffers, stack_batches(batches))
    logits = np.asarray(logits)
    found = {i: [] for i in live}
    for rank, order in enumerate(orders):
        start = 0
        for i in order:
            stop = start + len(chunks[i][1])
            found[i].append(logits[rank, start:stop])
            start = stop
    return found, buffers


def shuffled_pages(seed, sequences):
    free = list(np.random.default_rng(seed).permutation(np.arange(1, PAGES)))
    return [[free.pop() for _ in range(-(-len(s) // PAGE))] for s in sequences]


def check_against_golden(runner, name, *, decode_bucket=False, atol=1e-4):
    """Prefill in two chunks, then decode token by token; then once more on recycled pages.

    At last one step over the prompts and their greedy continuations, which must be the best tokens.
    """
    golden = Golden(name)
    buffers = fill_with_nan(runner.allocate())
    for round_number in range(2):
        pages = shuffled_pages(round_number, golden.tokens)
        steps = max(0, min(3, min(len(s) for s in golden.tokens) + 2))
        cuts = [sorted({0, len(s) // 3, max(0, len(s) - steps)}) for s in golden.tokens]
        borders = [[*c, *range(c[-1] + 1, len(s) + 1)] for c, s in zip(cuts, golden.tokens)]
        for number in range(max(len(b) for b in borders) - 1):
            chunks = []
            for border, tokens in zip(borders, golden.tokens, strict=True):
                start, stop = border[number : number + 2] if number + 1 < len(border) else (0, 0)
                chunks.append((start, tokens[start:stop]))
            single = all(len(tokens) <= 1 for _, tokens in chunks)
            bucket = DECODE if single and decode_bucket else PREFILL
            found, buffers = feed(runner, buffers, bucket, chunks, pages)
            for i, of_ranks in found.items():
                start, tokens = chunks[i]
                for logits in of_ranks:
                    expected = golden.logits[i][start : start + len(tokens)]
                    np.testing.assert_allclose(logits, expected, atol=atol, rtol=0)
    check_greedy(runner, buffers, golden)


def check_greedy(runner, buffers, golden):
    sequences = [p + g[:-1] for p, g in zip(golden.prompts, golden.greedy, strict=True)]
    chunks = [(0, tokens) for tokens in sequences]
    found, _ = feed(runner, buffers, PREFILL, chunks, shuffled_pages(2, sequences))
    for i, of_ranks in found.items():
        for logits in of_ranks:
            chosen = logits[len(golden.prompts[i]) - 1 :].argmax(-1)
            assert chosen.tolist() == golden.greedy[i]
