"""Random ragged batches with a paged cache, and their attention in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tbo_jax import ForwardBatch
from tbo_jax.attention.cache import LayerCache
from tbo_jax.attention.kernel import AttentionShape


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of a batch and its cache; with `value_dim` its pages are latent ones."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: Any = np.float32
    page_size: int = 16
    pages_per_row: int = 20
    tokens: int = 24
    rows: int = 4
    value_dim: int | None = None

    @property
    def pages(self) -> int:
        """Pages of a layer."""
        return self.rows * self.pages_per_row + 1

    @property
    def longest(self) -> int:
        """Tokens that a row has room for."""
        return self.page_size * self.pages_per_row

    @property
    def attention(self) -> AttentionShape:
        """As the kernels want it."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.dtype, self.value_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch, the cache before it, and its queries, keys and values; whatever is unused is NaN."""

    shape: Shape
    batch: ForwardBatch
    cache: LayerCache
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    rows: list[tuple[int, int, np.ndarray, np.ndarray]]  # context, length, all keys, all values
    slots: list[tuple[int, int]]  # page and slot in it, for each token


def separate_pages(keys: np.ndarray, values: np.ndarray, first_page: int) -> LayerCache:
    """The cache with keys and values [N, S, G, H] in arrays of their own."""
    flat = (pages.reshape(*pages.shape[:2], -1) for pages in (keys, values))
    return LayerCache(tuple(flat), np.int32(first_page))


def case_of(
    shape: Shape, lengths: list[int], contexts: list[int], seed: int, layer: int = 0
) -> Case:
    """Shuffled pages, in the second of two stacked layers if `layer` is 1; padding is rubbish."""
    rng = np.random.default_rng(seed)
    free = rng.permutation(np.arange(1, shape.pages)).tolist()
    size = shape.page_size
    owned = [
        [free.pop() for _ in range(-(-(context + n) // size))]
        for context, n in zip(contexts, lengths, strict=True)
    ]
    batch = ForwardBatch.pack(
        [[1] * n for n in lengths], contexts, owned,
        token_capacity=shape.tokens, sequence_capacity=shape.rows,
        pages_per_sequence=shape.pages_per_row,
    )  # fmt: skip
    count, used = sum(lengths), len(lengths)
    token_padding = np.arange(shape.tokens) >= count
    row_padding = np.arange(shape.rows) >= used
    row_ends = np.append(False, row_padding)
    batch = dataclasses.replace(
        batch,
        sequence_ids=np.where(token_padding, 77, batch.sequence_ids).astype(np.int32),
        query_lens=np.where(row_padding, 5, batch.query_lens).astype(np.int32),
        context_lens=np.where(row_padding, 99, batch.context_lens).astype(np.int32),
        cu_query_lens=np.where(row_ends, -33, batch.cu_query_lens).astype(np.int32),
        page_table=np.where(row_padding[:, None], 55, batch.page_table).astype(np.int32),
    )

    def nan(*axes: int) -> np.ndarray:
        return np.full(axes, np.nan, shape.dtype)

    queries = nan(shape.tokens, shape.heads, shape.head_dim)
    keys = nan(shape.tokens, shape.kv_heads, shape.head_dim)
    values = nan(shape.tokens, shape.kv_heads, shape.value_dim or shape.head_dim)
    queries[:count] = rng.normal(size=queries[:count].shape)
    stored = [nan(2 * shape.pages, size, shape.kv_heads, shape.head_dim) for _ in range(2)]
    rows, slots, start = [], [], 0
    for length, context, pages in zip(lengths, contexts, owned, strict=True):
        whole = rng.normal(size=(2, context + length, *keys.shape[1:])).astype(shape.dtype)
        all_keys, all_values = whole
        if shape.value_dim is not None:
            all_values = all_keys[..., : shape.value_dim]
        keys[start : start + length] = all_keys[context:]
        values[start : start + length] = all_values[context:]
        places = [
            (layer * shape.pages + pages[position // size], position % size)
            for position in range(context + length)
        ]
        for position, (page, slot) in enumerate(places[:context]):
            stored[0][page, slot], stored[1][page, slot] = whole[:, position]
        slots += places[context:]
        rows.append((context, length, all_keys, all_values))
        start += length
    if shape.value_dim is None:
        cache = separate_pages(*stored, layer * shape.pages)
    else:
        latent = stored[0].reshape(2 * shape.pages, size, shape.head_dim)
        cache = LayerCache((latent,), np.int32(layer * shape.pages))
    return Case(shape, batch, cache, queries, keys, values, rows, slots)


@dataclasses.dataclass(frozen=True)
class Options:
    """Of attention, for every implementation of it."""

    window: int | None = None
    with_sinks: bool = False

    def sinks(self, heads: int) -> np.ndarray | None:
        """From one that hardly matters to one that outweighs a few keys."""
        return np.linspace(-2, 4, heads, dtype=np.float32) if self.with_sinks else None

    def arguments(self, heads: int) -> dict[str, Any]:
        """As the implementations take them."""
        return dict(sliding_window=self.window, sinks=self.sinks(heads))


def with_mask(case: Case, entries: int, seed: int) -> Case:
    """The case with `entries` mask offsets for each token; those of padding are rubbish.

    First keys lie anywhere up to a token's own and sometimes behind it; last ones before it, at it,
    behind it in its row, and beyond all keys.
    """
    rng = np.random.default_rng(seed)
    offsets = rng.integers(-99, 999, (case.shape.tokens, entries))
    token = 0
    for context, length, _, _ in case.rows:
        for place in range(context, context + length):
            offsets[token, 0] = rng.integers(-2, place + 2) if rng.integers(4) else 0
            if entries == 2:
                choices = (place, place - 2, rng.integers(place, context + length), place + 99)
                offsets[token, 1] = choices[rng.integers(4)]
            token += 1
    batch = dataclasses.replace(case.batch, mask_offsets=offsets.reshape(-1).astype(np.int32))
    return dataclasses.replace(case, batch=batch)


def reference(case: Case, options: Options = Options()) -> np.ndarray:
    """[live tokens, N, V] float32: every query against all keys of its sequence at once."""
    shape, window = case.shape, options.window
    sinks = options.sinks(shape.heads)
    width = shape.value_dim or shape.head_dim
    outs, start = [], 0
    for context, length, keys, values in case.rows:
        for number in range(length):
            place = last = context + number
            first = 0 if window is None else max(0, place - window + 1)
            if case.batch.mask_offsets is not None:
                allowed = case.batch.mask_offsets.reshape(shape.tokens, -1)[start + number]
                first = max(first, int(allowed[0]))
                if len(allowed) == 2:
                    last = min(int(allowed[1]), context + length - 1)
            if last < first and sinks is None:  # sees nothing
                outs += [np.zeros(width)] * shape.heads
                continue
            for head in range(shape.heads):
                group = head // (shape.heads // shape.kv_heads)
                seen = slice(first, max(first, last + 1))
                query = case.queries[start + number, head].astype(np.float32)
                scores = keys[seen, group].astype(np.float32) @ query * np.float32(shape.scale)
                if sinks is not None:
                    scores = np.append(scores, np.float32(sinks[head]))
                weights = np.exp(scores - scores.max())
                weights = (weights / weights.sum())[: max(0, last + 1 - first)]
                outs.append(weights @ values[seen, group].astype(np.float32))
        start += length
    return np.reshape(outs, (-1, shape.heads, width)).astype(np.float32)


@st.composite
def mixes(draw: st.DrawFn, shape: Shape) -> tuple[list[int], list[int]]:
    """Lengths and contexts: prefill with and without context, decode rows, rows without tokens."""
    room, lengths, contexts = shape.tokens, [], []
    blocks = [n for n in (0, 15, 16, 63, 64, 127, 128) if n + shape.tokens <= shape.longest]
    for _ in range(draw(st.integers(0, shape.rows))):
        length = min(room, draw(st.sampled_from([0, 1, 1, 2, 7, 16, 17, shape.tokens])))
        context = st.integers(0, shape.longest - shape.tokens)
        lengths.append(length)
        contexts.append(draw(st.one_of(st.sampled_from(blocks), context)))
        room -= length
    return lengths, contexts


def without_unseen(case: Case, window: int) -> Case:
    """The same with NaN in every key and value before the windows of all queries of its row."""
    first = int(case.cache.first_page)
    pages = [np.array(array) for array in case.cache.pages]
    size = case.shape.page_size
    for row, (context, *_) in enumerate(case.rows):
        for position in range(max(0, context - window + 1)):
            page = case.batch.page_table[row, position // size]
            for array in pages:
                array[first + page, position % size] = np.nan
    return dataclasses.replace(case, cache=LayerCache(tuple(pages), case.cache.first_page))
