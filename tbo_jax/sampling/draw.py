"""From logits to tokens: greedy, or temperature, top-k, top-p and min-p, one stream a request.

Nothing here sorts the vocabulary. A filter keeps the tokens from some logit upwards, and that logit
is found by bisection over the bit patterns of float32, mapped to integers of the same order: 32
passes find it exactly, in a fraction of the time that XLA:CPU needs for a sort.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from tbo_jax.sampling.params import SamplingParams

_TINY = float(np.finfo(np.float32).tiny)  # the smallest float32 that no backend flushes to zero
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1
_LOWEST = -(2**31)
_HIGHEST = 2**31 - 1
NOT_FINITE = -1  # in place of a token, where the logits give none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """Per row of a step's logits, how to pick its token. B: rows, padding rows included.

    A row's token is a function of its logits and of these values alone.
    """

    temperature: jax.Array | np.ndarray  # [B] float32; below the smallest normal float32: greedy
    top_k: jax.Array | np.ndarray  # [B] int32; 0: off
    top_p: jax.Array | np.ndarray  # [B] float32; 1: off
    min_p: jax.Array | np.ndarray  # [B] float32; 0: off
    seed: jax.Array | np.ndarray  # [B, 2] uint32, high and low word
    step: jax.Array | np.ndarray  # [B] int32, index of the new token among its request's generated

    @staticmethod
    def from_rows(
        params: Sequence[SamplingParams], seeds: Sequence[int], steps: Sequence[int], num_rows: int
    ) -> SamplingInputs:
        """Fresh numpy arrays of `num_rows` rows on the host; rows after the given ones are greedy.

        `seeds` are given apart from `params`, because a request that leaves its seed open has one
        drawn for it. Raises ValueError if the three differ in length or do not fit in `num_rows`.
        """
        if not len(params) == len(seeds) == len(steps) <= num_rows:
            raise ValueError(
                f"{len(params)} params, {len(seeds)} seeds and {len(steps)} steps for {num_rows} "
                "rows; expected as many of each, and no more than the rows"
            )
        padding = num_rows - len(params)
        largest = float(np.finfo(np.float32).max)
        temperature = [min(p.temperature, largest) for p in params] + [0.0] * padding
        words = [divmod(seed, 2**32) for seed in seeds] + [(0, 0)] * padding
        return SamplingInputs(
            temperature=np.array(temperature, np.float32),
            top_k=np.array([min(p.top_k, _HIGHEST) for p in params] + [0] * padding, np.int32),
            top_p=np.array([p.top_p for p in params] + [1.0] * padding, np.float32),
            min_p=np.array([p.min_p for p in params] + [0.0] * padding, np.float32),
            seed=np.array(words, np.uint32).reshape(num_rows, 2),
            step=np.array([*steps, *[0] * padding], np.int32),
        )

    def packed(self) -> np.ndarray:
        """The bits of all fields as one array [B, 7] int32, for a program that takes it."""
        fields = [np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)]
        return np.concatenate([f.reshape(len(f), -1).view(np.int32) for f in fields], axis=1)

    @staticmethod
    def unpack(packed: jax.Array) -> SamplingInputs:
        """The fields of what `packed` gave."""

        def of(column: int | slice, dtype: Any) -> jax.Array:
            return lax.bitcast_convert_type(packed[:, column], dtype)

        return SamplingInputs(
            temperature=of(0, jnp.float32),
            top_k=packed[:, 1],
            top_p=of(2, jnp.float32),
            min_p=of(3, jnp.float32),
            seed=of(slice(4, 6), jnp.uint32),
            step=packed[:, 6],
        )


def greedy(logits: jax.Array) -> jax.Array:
    """The most probable token of each row, the first of equals: logits [B, V] -> [B] int32."""
    return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Draw one token a row: logits [B, V], any float type, computed on in float32 -> [B] int32.

    Temperature, then top-k, then top-p over the renormalised rest, then min-p. Tokens that tie with
    the last one kept by top-k or top-p are all kept. The draw is Gumbel-max with a threefry key of
    the row's seed and step only, so that the same logits give a request the same token in any row
    of any batch.

    Logits may be -inf (a token ruled out). A row with NaN or +inf, or with nothing finite, gets
    `NOT_FINITE`, which is no token. Rows are independent; with rows over several devices call it
    inside `jax.shard_map`, or the tests that skip unused filters become all-reduces.
    """
    best = greedy(logits)
    draw = jnp.any(inputs.temperature >= _TINY)
    tokens = lax.cond(draw, _draw, lambda logits, inputs, best: best, logits, inputs, best)
    # argmax takes a NaN before any number, so that the best logit tells of the whole row.
    highest = jnp.take_along_axis(logits, best[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isfinite(highest), tokens, NOT_FINITE)


def kept_tokens(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Which tokens the filters leave to draw from, all of a greedy row: [B, V] -> [B, V] bool."""
    return _weigh(logits, inputs)[0]


def _draw(logits: jax.Array, inputs: SamplingInputs, best: jax.Array) -> jax.Array:
    keep, weight = _weigh(logits, inputs)

    def random_bits(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), step)
        # jax.random.bits would hash twice as often, and depend on a process-wide flag.
        counter = lax.iota(jnp.uint32, weight.shape[-1])
        hashed: jax.Array = threefry_2x32(jax.random.key_data(key), counter)
        return hashed

    bits = jax.vmap(random_bits)(jnp.asarray(inputs.seed), jnp.asarray(inputs.step))
    # Gumbel-max, argmax(log w + G) with G = -log E and E exponential, written as argmax(w / E). A
    # token wins by a small E; log1p keeps those fine (to 2^-32), where -log(uniform) has steps of
    # 2^-24, which are coarse against the tail of a vocabulary.
    uniform = jnp.minimum(((bits >> 1).astype(jnp.float32) + 0.5) * 2.0**-31, _BELOW_ONE)
    score = jnp.where(keep, weight, 0.0) / -jnp.log1p(-uniform)
    # jnp.argmax would be one loop of scalar code on XLA:CPU, with the random numbers inside it.
    index = lax.broadcasted_iota(jnp.int32, score.shape, 1)
    last = score.shape[-1] - 1
    winner = jnp.where(score == jnp.max(score, axis=-1, keepdims=True), index, last)
    drawn = jnp.min(_fold(winner, jnp.minimum, last), axis=-1)
    return jnp.where(inputs.temperature >= _TINY, drawn, best)


def _weigh(logits: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, jax.Array]:
    """The kept set, and every token's probability relative to the best one's; both [B, V]."""
    logits = logits.astype(jnp.float32)
    num_rows, vocabulary = logits.shape
    drawn = inputs.temperature >= _TINY
    use_k = drawn & (inputs.top_k > 0) & (inputs.top_k < vocabulary)
    use_p = drawn & (inputs.top_p < 1.0)
    use_min = drawn & (inputs.min_p > 0.0)
    # The best logit is taken off before dividing: no temperature then overflows into inf - inf.
    temperature = jnp.where(drawn, inputs.temperature, 1.0)[:, None]
    weight = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    order = _ordered_integers(logits)
    everything = jnp.full(num_rows, _LOWEST, jnp.int32)

    def best_k() -> jax.Array:
        def enough(least: jax.Array) -> jax.Array:
            return _sum((order >= least[:, None]).astype(jnp.int32)) >= inputs.top_k

        return jnp.where(use_k, _greatest(enough, everything), everything)

    least_k = lax.cond(jnp.any(use_k), best_k, lambda: everything)

    def nucleus() -> jax.Array:
        mass = _integer_mass(jnp.where(order >= least_k[:, None], weight, 0.0))
        # top_p may round to 0. The best token's mass is at least 1, so that it is kept even then.
        target = jnp.maximum(inputs.top_p * _sum(mass).astype(jnp.float32), 1.0)

        def enough(least: jax.Array) -> jax.Array:
            kept = _sum(jnp.where(order >= least[:, None], mass, 0))
            return kept.astype(jnp.float32) >= target

        return jnp.where(use_p, _greatest(enough, least_k), least_k)

    least = lax.cond(jnp.any(use_p), nucleus, lambda: least_k)
    likely = weight >= jnp.where(use_min, inputs.min_p, 0.0)[:, None]
    return (order >= least[:, None]) & likely, weight


def _ordered_integers(values: jax.Array) -> jax.Array:
    """float32 -> int32 of the same order; both zeros give 0."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, _LOWEST - bits, bits)


def _greatest(enough: Callable[[jax.Array], jax.Array], low: jax.Array) -> jax.Array:
    """Per row the greatest int32 from `low` up that is `enough`: [B] -> [B].

    `enough` must be true of `low` and must not become true again once it is false.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and without overflow
        more = enough(middle)
        return jnp.where(more, middle, low), jnp.where(more, high, middle - 1)

    # A fixed number of passes: one that ends when every row is done would make rows on other
    # devices wait in each.
    greatest: jax.Array = lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, _HIGHEST)))[0]
    return greatest


def _integer_mass(weight: jax.Array) -> jax.Array:
    """Weights [B, V] in [0, 1], the best being 1, as int32 parts of a total of nearly 2^30.

    Integers add to the same sum in any order. XLA orders a float sum by its shape, and with it a
    row's top-p limit could move with the size of the batch.
    """
    size = weight.shape[1]

    def integers(scale: jax.Array) -> jax.Array:
        return jnp.round(weight * scale[:, None]).astype(jnp.int32)

    # The first scale fits however flat the weights are; where they are peaked and V is large it is
    # coarse, so it only serves to find a better one. `size` is more than the rounding can lose.
    scale = jnp.full(weight.shape[0], 2.0 ** (30 - size.bit_length()), jnp.float32)
    for _ in range(2):
        scale = scale * 2.0**30 / (_sum(integers(scale)) + size).astype(jnp.float32)
    return integers(scale)


def _sum(values: jax.Array) -> jax.Array:
    """Sum of each row of integers: [B, V] -> [B]."""
    return jnp.sum(_fold(values, jnp.add, 0), axis=-1, dtype=values.dtype)


def _fold(values: jax.Array, combine: Callable[..., jax.Array], neutral: int) -> jax.Array:
    """The eighths of each row combined into one: [B, V] -> [B, ceil(V / 8)].

    XLA:CPU reduces integers slowly and elementwise programs fast (a pass over [16, 49152]: 0.27 ms
    without this, 0.08 ms with it). More ways, or a second fold, no longer fuse and are slower.
    """
    values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % 8)), constant_values=neutral)
    return functools.reduce(combine, jnp.split(values, 8, axis=1))
