"""Images in the batch: embeddings given, places in time, height and width, runs that stay whole."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbo_jax import Bucket, ForwardBatch, Inputs, ModelRunner, OverlapConfig
from tbo_jax.checkpoint.load import load_model
from tbo_jax.engine.engine import Engine
from tbo_jax.layers.rotary import RotaryConfig, rotary_table
from tbo_jax.overlap.batch import stack_batches
from tbo_jax.overlap.split import split_batch_decoder_layers
from tbo_jax.parallel.sharding import make_mesh
from tests.golden_cases import Golden
from tests.models.parity import CACHE, COLUMNS, fill_with_nan, shuffled_pages

NAME = "qwen2_vl"
ARRAYS = np.load(Golden(NAME).folder / "golden.npz")
SEQUENCES = range(sum(key.startswith("image_tokens_") for key in ARRAYS))
TOKENS, POSITIONS, EMBEDS, LOGITS = (
    [ARRAYS[f"image_{kind}_{i}"] for i in SEQUENCES]
    for kind in ("tokens", "positions", "embeds", "logits")
)
IMAGE = 3
BOTH = Inputs(mrope=True, embeds=True)
PREFILL, DECODE = Bucket(128, 4), Bucket(4, 4, decode=True)


def make_runner(*, devices=1, micro_batches=1, inputs=BOTH, name=NAME):
    mesh = make_mesh(devices)
    model = load_model(Golden(name).folder, mesh=mesh, dtype=jnp.float32)
    overlap = OverlapConfig("on" if micro_batches > 1 else "off", max(2, micro_batches))
    return ModelRunner(model, CACHE, mesh=mesh, overlap=overlap, logits="all", inputs=inputs)


def batch_of(bucket, chunks, pages, *, embeds=True):
    """Of one rank; `chunks` has a (sequence, start, stop) for each row."""
    tokens = [TOKENS[i][start:stop].tolist() for i, start, stop in chunks]
    count = sum(map(len, tokens))
    places = np.zeros((3, bucket.tokens), np.int32)
    places[:, :count] = np.concatenate([POSITIONS[i][:, a:b] for i, a, b in chunks], axis=1)
    given = np.full((bucket.tokens, EMBEDS[0].shape[1]), np.nan, np.float32)  # padding
    given[:count] = np.concatenate([EMBEDS[i][a:b] for i, a, b in chunks])
    return ForwardBatch.pack(
        tokens,
        [start for _, start, _ in chunks],
        [pages[i] for i, _, _ in chunks],
        token_capacity=bucket.tokens,
        sequence_capacity=bucket.sequences,
        pages_per_sequence=COLUMNS,
        positions=places,
        inputs_embeds=given if embeds else None,
    )


def last_image(i):
    return int(np.flatnonzero(TOKENS[i] == IMAGE)[-1])


@pytest.mark.parametrize(
    ("devices", "micro_batches"),
    [
        (1, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
)
def test_logits_of_images_and_text(devices, micro_batches, compilations):
    """Prefill in two chunks, the second of which begins within an image; then token by token."""
    runner = make_runner(devices=devices, micro_batches=micro_batches)
    runner.compile_all([PREFILL, DECODE])
    buffers = fill_with_nan(runner.allocate())
    pages = shuffled_pages(0, TOKENS)
    cuts = [(0, last_image(i) - 3, last_image(i) + 1) for i in SEQUENCES]
    steps = [[(i, *cuts[i][n : n + 2]) for i in SEQUENCES] for n in range(2)]
    longest = max(len(TOKENS[i]) - cuts[i][-1] for i in SEQUENCES)
    for n in range(longest):
        at = [(i, cuts[i][-1] + n) for i in SEQUENCES]
        steps.append([(i, place, place + 1) for i, place in at if place < len(TOKENS[i])])
    before = compilations()
    for number, chunks in enumerate(steps):
        bucket = PREFILL if number < 2 else DECODE
        batch = stack_batches([batch_of(bucket, chunks, pages)] * devices)
        logits, buffers = runner.step(bucket, buffers, batch)
        for of_rank in np.asarray(logits):
            start = 0
            for i, first, stop in chunks:
                found = of_rank[start : start + stop - first]
                np.testing.assert_allclose(found, LOGITS[i][first:stop], atol=1e-4, rtol=0)
                start += stop - first
    assert compilations() == before


def test_micro_batches_cut_no_image(monkeypatch):
    """The cut of this batch would lie in an image; where the runner cuts, it lies beside it."""
    pages = shuffled_pages(0, TOKENS)
    batch = batch_of(PREFILL, [(i, 0, len(TOKENS[i])) for i in SEQUENCES], pages)
    ids, count = batch.token_ids, int(batch.num_tokens)

    def inside(cut):
        return ids[cut - 1] == ids[cut] == IMAGE

    split = jax.jit(split_batch_decoder_layers, static_argnums=(1, 2))
    first, second = split(batch, 2)
    assert inside(int(first.num_tokens))
    first, second = split(batch, 2, IMAGE)
    assert not inside(int(first.num_tokens))
    assert int(first.num_tokens) + int(second.num_tokens) == count
    images = []

    def spy(batch, micro_batches, image_token_id, **options):
        images.append(image_token_id)
        return split_batch_decoder_layers(batch, micro_batches, image_token_id, **options)

    monkeypatch.setattr("tbo_jax.step.forward.split_batch_decoder_layers", spy)
    runner = make_runner(micro_batches=2)
    for bucket in PREFILL, DECODE:
        runner.lower(bucket)
    assert images == [IMAGE, None]


def test_text_alone_needs_no_places_and_no_embeddings():
    """Positions [T] are three equal ones."""
    config = make_runner(inputs=Inputs()).config.rotary
    at = jnp.arange(5, dtype=jnp.int32)
    for flat, wide in zip(
        rotary_table(config, at), rotary_table(config, jnp.stack([at] * 3)), strict=True
    ):
        np.testing.assert_array_equal(flat, wide)


def test_each_section_turns_with_its_own_position():
    config = RotaryConfig(dim=16, theta=100.0, sections=(2, 3, 3))
    at = np.array([[1, 5], [2, 6], [3, 7]], np.int32)
    cos, sin = rotary_table(config, jnp.asarray(at))
    frequency = 1.0 / 100.0 ** (np.arange(8) / 8)
    axis = [0, 0, 1, 1, 1, 2, 2, 2]
    angle = np.array([[at[axis[j], t] * frequency[j] for j in range(8)] for t in range(2)])
    np.testing.assert_allclose(cos, np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angle), atol=1e-6)


def test_other_fields_than_those_the_runner_is_for_are_refused():
    pages = shuffled_pages(0, TOKENS)
    runner = make_runner()
    full = stack_batches([batch_of(PREFILL, [(0, 0, 4)], pages)])
    buffers = runner.allocate()

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            runner.step(PREFILL, buffers, dataclasses.replace(full, **changes))

    refused("got no inputs_embeds with Inputs", inputs_embeds=None)
    refused(r"positions must be \[R, 3, T\] with Inputs", positions=full.positions[:, 0])
    refused("got some mask_offsets with Inputs", mask_offsets=full.token_ids)
    refused("got some rotary_tables with Inputs", rotary_tables=full.page_table)
    runner = make_runner(inputs=Inputs())
    refused("got some inputs_embeds with Inputs", positions=full.positions[:, 0])
    refused(r"positions must be \[R, T\] with Inputs", inputs_embeds=None)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffers))
    assert runner.num_compiled == 0


def test_an_engine_makes_no_such_batches():
    with pytest.raises(ValueError, match="an engine makes batches of tokens"):
        Engine(make_runner(), None, frozenset(), max_sequences=1, max_context=8)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (Inputs(mrope=True), "llama has no M-RoPE sections"),
        (Inputs(embeds=True), "llama has no image_token_id"),
    ],
)
def test_a_model_that_does_not_read_them_refuses_inputs(inputs, message):
    with pytest.raises(ValueError, match=message):
        make_runner(inputs=inputs, name="llama")
