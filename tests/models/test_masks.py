"""What a token may see, and a rotary table of its own for each sequence, through whole models."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tbo_jax import Bucket, ForwardBatch, Inputs, ModelRunner, OverlapConfig
from tbo_jax.checkpoint.load import load_model
from tbo_jax.layers.rotary import look_up_rotary
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import Golden
from tests.models.parity import CACHE, COLUMNS, fill_with_nan, shuffled_pages

PREFILL, DECODE = Bucket(64, 4), Bucket(4, 4, decode=True)
LENGTH = 40  # positions of a rotary table
BOTH = Inputs(mask_offsets=2, rotary_tables=LENGTH)


def make_runner(name, inputs, *, devices=1, micro_batches=1):
    mesh = make_mesh(devices)
    model = load_model(Golden(name).folder, mesh=mesh, dtype=jnp.float32)
    overlap = OverlapConfig("on" if micro_batches > 1 else "off", max(2, micro_batches))
    return ModelRunner(model, CACHE, mesh=mesh, overlap=overlap, logits="all", inputs=inputs)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Tokens, the first and last key that each may see, and cosine and sine of each position."""

    tokens: np.ndarray  # [n]
    spans: np.ndarray  # [n, 2]
    table: np.ndarray  # [2, LENGTH, F] float32

    @property
    def seen(self) -> np.ndarray:
        """[n, n] bool: what the token of each row may see."""
        key = np.arange(len(self.tokens))
        return (key >= self.spans[:, :1]) & (key <= self.spans[:, 1:])


def sequence_of(rng: np.random.Generator, length: int, features: int) -> Sequence:
    """With a run that attends both ways, tokens that forgot the start, and some frequencies."""
    place = np.arange(length)
    spans = np.stack([np.where(rng.random(length) < 0.3, place // 2, 0), place], 1)
    start = int(rng.integers(0, length - 4))
    stop = int(rng.integers(start + 2, min(length - 1, start + 9)))
    spans[start:stop] = 0, stop - 1
    frequency = rng.uniform(0.01, 1.5, features)
    angle = (np.arange(LENGTH)[:, None] + rng.integers(0, 9)) * frequency
    table = np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)
    return Sequence(rng.integers(3, 150, length), spans, table)


def batch_of(bucket, chunks, pages, inputs=BOTH):
    """Of one rank; `chunks` has (number, sequence, start, stop) for each row."""
    slots = bucket.tokens
    spans = np.full((slots, 2), 77, np.int32)  # of padding: rubbish
    tables = np.full((bucket.sequences, *chunks[0][1].table.shape), np.nan, np.float32)
    token = 0
    for row, (_, sequence, start, stop) in enumerate(chunks):
        spans[token : token + stop - start] = sequence.spans[start:stop]
        tables[row] = sequence.table
        token += stop - start
    return ForwardBatch.pack(
        [sequence.tokens[start:stop].tolist() for _, sequence, start, stop in chunks],
        [start for *_, start, _ in chunks],
        [pages[number] for number, *_ in chunks],
        token_capacity=slots,
        sequence_capacity=bucket.sequences,
        pages_per_sequence=COLUMNS,
        page_size=CACHE.page_size,
        mask_offsets=spans[:, : inputs.mask_offsets].reshape(-1) if inputs.mask_offsets else None,
        rotary_tables=tables if inputs.rotary_tables else None,
    )


def run(runner, buffers, sequences, *, decoded, devices):
    """[n, V] logits of each sequence from each rank: two chunks, then `decoded` tokens one by one.

    The buffers come back too. The first chunk ends where no token of it sees a later one. Rank r has the rows turned by r.
    """
    pages = shuffled_pages(0, [range(LENGTH)] * 4)
    found = [[[] for _ in sequences] for _ in range(devices)]
    borders = []
    for sequence in sequences:
        whole = [
            cut for cut in range(1, len(sequence.tokens)) if sequence.spans[:cut, 1].max() < cut
        ]
        last = len(sequence.tokens) - decoded
        middle = min(whole, key=lambda cut: abs(cut - last // 2))
        borders.append([0, middle, *range(last, len(sequence.tokens) + 1)])
    for number in range(2 + decoded):
        chunks = [
            (i, sequence, *borders[i][number : number + 2]) for i, sequence in enumerate(sequences)
        ]
        bucket = PREFILL if number < 2 else DECODE
        orders = [chunks[rank:] + chunks[:rank] for rank in range(devices)]
        batches = [batch_of(bucket, order, pages, runner.inputs) for order in orders]
        logits, buffers = runner.step(bucket, buffers, stack_batches(batches))
        logits = np.asarray(logits)
        for rank, order in enumerate(orders):
            token = 0
            for i, _, start, stop in order:
                found[rank][i].append(logits[rank, token : token + stop - start])
                token += stop - start
    return [[np.concatenate(parts) for parts in of_rank] for of_rank in found], buffers


def dense_llama(name: str, sequence: Sequence) -> np.ndarray:
    """[n, V] logits in float64: all keys at once, no pages, nothing of this library."""
    stored = load_file(Golden(name).folder / "model.safetensors")
    w = {key: value.astype(np.float64) for key, value in stored.items()}
    heads, kv_heads, size = 4, 2, 16

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def turn(x):
        cos, sin = (t[: len(x), None].astype(np.float64) for t in sequence.table)
        one, two = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    x = w["model.embed_tokens.weight"][sequence.tokens]
    for layer in range(2):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(len(x), -1, size) for n in "qkv"
        )
        q, k = turn(q), np.repeat(turn(k), heads // kv_heads, 1)
        scores = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(size)
        weights = np.exp(np.where(sequence.seen, scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("nqk,knh->qnh", weights, np.repeat(v, heads // kv_heads, 1))
        x = x + mixed.reshape(len(x), -1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    ("devices", "micro_batches"),
    [
        (2, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.slow),
    ],
)
def test_logits_equal_a_dense_model(devices, micro_batches, compilations):
    """In chunks and token by token, on every rank, with every batch of the two programs."""
    runner = make_runner("llama", BOTH, devices=devices, micro_batches=micro_batches)
    runner.compile_all([PREFILL, DECODE])
    buffers = fill_with_nan(runner.allocate())
    before = compilations()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(10, 28, 3)
        sequences = [sequence_of(rng, int(length), 8) for length in lengths]
        expected = [dense_llama("llama", sequence) for sequence in sequences]
        results, buffers = run(runner, buffers, sequences, decoded=2, devices=devices)
        for of_rank in results:
            for found, logits in zip(of_rank, expected, strict=True):
                np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)
    assert compilations() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_micro_batches_and_devices_equal_the_whole(name):
    """Prompts in two chunks: latent attention; and layers with a window, and sinks."""
    whole = make_runner(name, BOTH)
    rng = np.random.default_rng(7)
    features = whole.config.rotary.dim // 2
    sequences = [sequence_of(rng, length, features) for length in (20, 13, 17)]
    (expected,), buffers = run(
        whole, fill_with_nan(whole.allocate()), sequences, decoded=0, devices=1
    )
    split = make_runner(name, BOTH, devices=2, micro_batches=2)
    results, _ = run(split, fill_with_nan(split.allocate()), sequences, decoded=0, devices=2)
    for of_rank in results:
        for found, logits in zip(of_rank, expected, strict=True):
            np.testing.assert_allclose(found, logits, atol=2e-5, rtol=0)
    # The spans count: without them the first of the run would not see the last.
    causal = [
        dataclasses.replace(s, spans=np.minimum(s.spans, np.arange(len(s.tokens))[:, None]))
        for s in sequences
    ]
    (other,), _ = run(whole, buffers, causal, decoded=0, devices=1)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(other, expected, strict=True))


@pytest.mark.slow
def test_two_documents_in_one_sequence_do_not_see_each_other():
    """The logits of transformers for each, since only the difference of positions counts."""
    golden = Golden("qwen3_moe")
    inputs = Inputs(mask_offsets=1)
    runner = make_runner("qwen3_moe", inputs, devices=2, micro_batches=2)
    one, two = [i for i, tokens in enumerate(golden.tokens) if 4 < len(tokens) < 30][:2]
    tokens = [*golden.tokens[one], *golden.tokens[two]]
    border = len(golden.tokens[one])
    spans = np.zeros((len(tokens), 2), np.int64)
    spans[border:, 0] = border
    nothing = np.zeros((2, LENGTH, 1), np.float32)
    sequence = Sequence(np.array(tokens), spans, nothing)
    pages = shuffled_pages(0, [tokens])
    batch = batch_of(PREFILL, [(0, sequence, 0, len(tokens))], pages, inputs)
    logits, _ = runner.step(PREFILL, fill_with_nan(runner.allocate()), stack_batches([batch] * 2))
    expected = np.concatenate([golden.logits[one], golden.logits[two]])
    for of_rank in np.asarray(logits):
        np.testing.assert_allclose(of_rank[: len(tokens)], expected, atol=1e-4, rtol=0)


def test_a_position_beyond_the_table_is_no_number():
    tables = jnp.arange(2 * 2 * 4 * 3, dtype=jnp.float32).reshape(2, 2, 4, 3)
    cos, sin = look_up_rotary(tables, jnp.array([1, 0, 1]), jnp.array([3, 0, 4]))
    np.testing.assert_array_equal(cos[:2], [tables[1, 0, 3], tables[0, 0, 0]])
    np.testing.assert_array_equal(sin[:2], [tables[1, 1, 3], tables[0, 1, 0]])
    assert np.isnan(cos[2]).all() and np.isnan(sin[2]).all()


def test_batches_that_do_not_fit_the_inputs_are_refused():
    runner = make_runner("llama", BOTH)
    rng = np.random.default_rng(0)
    chunk = (0, sequence_of(rng, 12, 8), 0, 12)
    full = stack_batches([batch_of(PREFILL, [chunk], shuffled_pages(0, [range(12)]))])
    buffers = runner.allocate()

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            runner.step(PREFILL, buffers, dataclasses.replace(full, **changes))

    refused("got no mask_offsets with Inputs", mask_offsets=None)
    refused("got no rotary_tables with Inputs", rotary_tables=None)
    refused(r"mask_offsets must have shape \(1, 128\)", mask_offsets=full.mask_offsets[:, :64])
    refused(r"rotary_tables must have shape \(1, 4, 2, 40, 8\) .* got \(1, 4, 2, 39, 8\)",
            rotary_tables=full.rotary_tables[..., :39, :])  # fmt: skip
    refused("position 40 is beyond the 40 positions", positions=full.positions + 29)
    runner = make_runner("llama", Inputs())
    refused("got some mask_offsets with Inputs", rotary_tables=None)
    refused("got some rotary_tables with Inputs", mask_offsets=None)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffers))
    assert runner.num_compiled == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(mask_offsets=3), "mask_offsets must be 0, 1 or 2 entries for each token, got 3"),
        (dict(mask_offsets=True), "mask_offsets must be an integer from 0, got True"),
        (dict(rotary_tables=-1), "rotary_tables must be at least 0, got -1"),
        (dict(rotary_tables=9, mrope=True), "mrope and rotary_tables exclude each other"),
    ],
)
def test_inputs_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Inputs(**given)
