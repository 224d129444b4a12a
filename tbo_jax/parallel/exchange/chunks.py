"""The expert exchange in chunks: one message for each group of a device's experts.

One batch then has several messages on their way, one after another: those for the second group of
experts travel while the first group computes, and the sums of the first group travel back while the
second computes. No weight is read twice, which is what two micro-batches cost.

A chunk is one group of every device's experts. It is used as a whole exchange is, once a chunk:

    messages, places = pack(...)                            in the stage that routes
    received = dispatch(message)                            communication, of each message
    rows, experts, weights, kept = take_in(received, places, kept)    in the stage of the experts
    message, kept = give_back(results, received, places, kept)
    returned = combine(message)                             communication, of each message
    unpack_results(all returned, places)                    at the head of the next stage

What one chunk leaves for the next goes along as `kept`.

**Blocks** (`all_to_all`, `two_level`, `all_gather`). If each chunk had blocks for all T tokens, C
chunks would send C times as much, and nothing would be won: the first message and the last one are
exposed. So all chunks together have T places for a destination. A token travels once, with the
first group that needs it, stays there for the others, and its sum returns once, after the last of
them. Chunk i has a fixed number of places: what an even routing needs, and three standard
deviations. Nothing is dropped. Tokens that find no place in their message take a later one, and
those groups compute once more for them; on the way back they take an earlier one, and later groups
compute beforehand for them.

What a row chose, and in which place it returns, is told ahead for all chunks, in a small message of
its own. Then rows are hidden states alone, which kernels read where they arrived, and experts can
be sorted while they travel.

For that to work out for T tokens to one destination, what is not sent by the end of chunk i must
find places on the way back after it: the first i + 1 messages and the first C - 1 - i have T places
together. So with two chunks half of the exchange stays exposed at least, with four a quarter.

**Ragged.** A message has as many rows as are routed to the chunk's experts, so that a token that
chose experts of two groups of a device travels twice. The sizes of all chunks are told at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, comb, sqrt
from typing import Any

import jax
import jax.numpy as jnp

from tbo_jax.parallel.exchange.base import Exchange, ShardedExchange
from tbo_jax.parallel.exchange.message import rows_at, sum_returned, take
from tbo_jax.parallel.exchange.ragged import RaggedAllToAll

SPARE = 3.0  # standard deviations of places beyond what an even routing takes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Message:
    """What is sent, or was received, for a chunk, with how the places are shared out."""

    rows: jax.Array  # [senders or destinations, places of the chunk, W or D]
    chunk: int = field(metadata={"static": True})
    ends: tuple[int, ...] = field(metadata={"static": True})  # see `BlockChunks.ends`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Choices:
    """What is told of the rows of all chunks, before they come. K choices a row."""

    experts: jax.Array  # [S, P, K] int32, global
    weights: jax.Array  # [S, P, K]
    slot: jax.Array  # [S, P] int32, where a row returns to; -1 for no token

    def join(self) -> jax.Array:
        """One differentiable array, [S, P, 2 K + 1]; float32 holds integers up to 2**24."""
        parts = self.experts, self.slot[..., None], self.weights
        return jnp.concatenate([part.astype(jnp.float32) for part in parts], -1)

    @classmethod
    def part(cls, told: jax.Array, dtype: Any) -> _Choices:
        """The inverse, with weights of `dtype`."""
        top_k = told.shape[-1] // 2
        whole = jax.lax.stop_gradient(told[..., : top_k + 1]).astype(jnp.int32)
        return cls(whole[..., :top_k], told[..., top_k + 1 :].astype(dtype), whole[..., top_k])


@dataclass(frozen=True)
class BlockChunks(Exchange):
    """A transport of blocks in chunks. See `Exchange`, and this module."""

    base: ShardedExchange  # whose rows tell of no choices
    num_experts: int  # E, of all devices
    top_k: int  # K
    chunks: int

    def ends(self, tokens: int) -> tuple[int, ...]:
        """How many places the first message has on the way out, the first two, ..."""
        count, total = self.chunks, max(tokens, self.chunks)
        per_destination = self.num_experts // self.base.destinations
        ends = []
        for chunk in range(1, count):
            here = per_destination * chunk // count
            share = 1 - comb(self.num_experts - here, self.top_k) / comb(
                self.num_experts, self.top_k
            )
            wanted = ceil(tokens * share + SPARE * sqrt(tokens * share * (1 - share)))
            # An equal share at least, see above; and a place for each message.
            wanted = max(wanted, ceil(tokens * chunk / count), chunk)
            ends.append(min(wanted, total - (count - chunk)))
        return (*ends, total)

    def pack(self, hidden, experts, weights, arrived=None):
        ends = self.ends(hidden.shape[0])
        total, destinations = ends[-1], self.base.destinations
        out, back = self._assign(experts, ends)
        first = total * jnp.arange(destinations, dtype=jnp.int32)
        nowhere = destinations * total
        index = rows_at(jnp.where(out >= 0, first + out, nowhere), nowhere)
        index = index.reshape(destinations, total)
        slot = jnp.take_along_axis(back.T, jnp.minimum(index, hidden.shape[0] - 1), axis=1)
        slot = jnp.where(index < hidden.shape[0], slot, -1)
        choices = _Choices(take(experts, index, -1), take(weights, index), slot)
        told = self.base.dispatch(_after(choices.join(), arrived))
        starts = (0, *ends[:-1])
        messages = [
            self._rows(take(hidden, index[:, start:end]))
            for start, end in zip(starts, ends, strict=True)
        ]
        messages[0] = _after(messages[0], told)  # XLA:GPU would send this first
        places = jnp.where(back >= 0, first + back, nowhere)
        known = _Choices.part(told, hidden.dtype)
        return tuple(_Message(part, n, ends) for n, part in enumerate(messages)), (places, known)

    def _assign(self, experts: jax.Array, ends: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """[T, K] global ids -> places [T, destinations] on the way out and back, -1 for none."""
        count, total = self.chunks, ends[-1]
        per_destination = self.num_experts // self.base.destinations
        owner = jnp.where(experts >= 0, experts // per_destination, -1)
        here = owner[:, :, None] == jnp.arange(self.base.destinations, dtype=jnp.int32)
        group = self._group(experts)[:, :, None]
        first = jnp.where(here, group, count).min(1)
        last = jnp.where(here, group, -1).max(1)
        wanted = first < count
        number = wanted.sum(0, dtype=jnp.int32)
        out = _rank(first, count)
        sent = _number(out, ends[:-1])  # in which message
        # Rows stand at the end of the places on the way back: what is free is free early.
        spare = total - number
        in_time = spare + _rank(jnp.where(wanted, jnp.maximum(last, sent), count), count)
        # If a row would so return before it was sent, all do in the order in which they were sent.
        safe = (_number(in_time, _starts_back(ends)) >= sent) | ~wanted
        back = jnp.where(safe.all(0), in_time, spare + out)
        return jnp.where(wanted, out, -1), jnp.where(wanted, back, -1)

    def _rows(self, hidden: jax.Array) -> jax.Array:
        """Hidden states as they travel, perhaps rounded."""
        none = jnp.zeros((*hidden.shape[:-1], 0), jnp.int32)
        return self.base.form.join(hidden, none, none.astype(hidden.dtype))

    def _group(self, experts: jax.Array) -> jax.Array:
        return _group(experts, self.base.experts_per_device, self.chunks)

    def dispatch(self, message):
        return replace(message, rows=self.base.dispatch(message.rows))

    def unpack(self, received):
        raise TypeError("an exchange in chunks is not unpacked: expected take_in")

    def pack_results(self, results, received):
        raise TypeError("an exchange in chunks has no one message back: expected give_back")

    def take_in(self, received, places, kept):
        chunk, ends = received.chunk, received.ends
        known = jax.tree.map(lambda a: a[:, : ends[chunk]], places[1])
        rows = self.base.form.part(received.rows)[0]
        if kept is not None:
            rows = jnp.concatenate([kept[0], rows], 1)
        experts = self.base.local(known.experts)
        sent = _number(jnp.arange(ends[chunk], dtype=jnp.int32), ends[:-1])
        returns = _number(known.slot, _starts_back(ends))
        # Each choice is computed with its group, but not before it arrived or after it returned.
        turn = jnp.clip(self._group(experts), sent[:, None], returns[..., None])
        inside = (experts >= 0) & (experts < self.base.experts_per_device)
        chosen = jnp.where(inside & (turn == chunk), experts, -1)
        flat = (x.reshape(-1, x.shape[-1]) for x in (rows, chosen, known.weights))
        return *flat, (rows, None if kept is None else kept[1])

    def give_back(self, results, received, places, kept):
        chunk, ends = received.chunk, received.ends
        total, (rows, earlier) = ends[-1], kept
        sums = results.reshape(rows.shape)
        if earlier is not None:
            more = sums.shape[1] - earlier.shape[1]
            sums = sums + jnp.pad(earlier, ((0, 0), (0, more), (0, 0)))
        slots = places[1].slot
        sender = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
        slot = jnp.where(slots < 0, total, slots)
        position = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), slot.shape)
        index = jnp.full(slot.shape, total, jnp.int32).at[sender, slot].set(position, mode="drop")
        borders = (0, *_starts_back(ends), total)
        index = index[:, borders[chunk] : borders[chunk + 1]]
        back = sums.at[sender, index].get(mode="fill", fill_value=0)
        kept = None if chunk == self.chunks - 1 else (rows, sums)
        return replace(received, rows=back), kept

    def combine(self, message):
        return replace(message, rows=self.base.combine(message.rows))

    def unpack_results(self, returned, places):
        whole = jnp.concatenate([message.rows for message in returned], axis=1)
        return sum_returned(whole.reshape(-1, whole.shape[-1]), places[0])

    def link_bytes(self, tokens, hidden_size, dtype):
        places = self.ends(tokens)[-1]
        row = self.base.form.round_trip_bytes(hidden_size, dtype)
        told = 4 * (2 * self.top_k + 1)  # of each row
        return self.base.link_bytes(places, hidden_size, dtype) * (row + told) // row


@dataclass(frozen=True)
class RaggedChunks(Exchange):
    """The ragged transport in chunks: one message for each, whose sizes are told together.

    Each is unpacked as a whole exchange is, and leaves nothing for the next.
    """

    sizes_are_data = True

    base: RaggedAllToAll
    chunks: int

    def pack(self, hidden, experts, weights, arrived=None):
        group = _group(experts, self.base.experts_per_device, self.chunks)
        group = jnp.where(experts >= 0, group, -1)
        chosen = [jnp.where(group == chunk, experts, -1) for chunk in range(self.chunks)]
        placements = [self.base.placement(ids) for ids in chosen]
        told = self.base.tell(placements, arrived)
        packed = [
            self.base.packed(hidden, ids, weights, placement, told[chunk])
            for chunk, (ids, placement) in enumerate(zip(chosen, placements, strict=True))
        ]
        return tuple(message for message, _ in packed), tuple(places for _, places in packed)

    def dispatch(self, message):
        return self.base.dispatch(message)

    def unpack(self, received):
        return self.base.unpack(received)

    def pack_results(self, results, received):
        return self.base.pack_results(results, received)

    def combine(self, message):
        return self.base.combine(message)

    def unpack_results(self, returned, places):
        sums = [self.base.unpack_results(*of) for of in zip(returned, places, strict=True)]
        return sum(sums[1:], sums[0])

    def link_bytes(self, tokens, hidden_size, dtype):
        return self.chunks * self.base.link_bytes(tokens, hidden_size, dtype)


def _group(experts: jax.Array, here: int, chunks: int) -> jax.Array:
    """The chunk of experts, numbered on their device or over all; a device has `here` of them."""
    return experts % here * chunks // here


def _starts_back(ends: tuple[int, ...]) -> tuple[int, ...]:
    """Where the places of the second message begin on the way back, of the third, ..."""
    return tuple(ends[-1] - end for end in reversed(ends[:-1]))


def _number(place: jax.Array, starts: tuple[int, ...]) -> jax.Array:
    """Of the message in which a place is; `starts` of the second one, the third, ..."""
    return sum((place >= start).astype(jnp.int32) for start in starts)  # type: ignore[return-value]


def _rank(key: jax.Array, count: int) -> jax.Array:
    """[T, R] keys -> each one's number in the order of keys, then of rows, for keys < `count`."""
    mine = key[:, :, None] == jnp.arange(count, dtype=jnp.int32)
    end = jnp.cumsum(mine, axis=0, dtype=jnp.int32)
    before = jnp.cumsum(end[-1], axis=-1) - end[-1]
    return jnp.where(mine, before + end - 1, 0).sum(-1, dtype=jnp.int32)


def _after(message: jax.Array, arrived: Any) -> jax.Array:
    """A message that is sent while routing, behind what has `arrived` (`Exchange.pack`)."""
    if arrived is None:
        return message
    return jax.lax.optimization_barrier((message, jax.lax.stop_gradient(arrived)))[0]


def in_chunks(exchange: Exchange, chunks: int, num_experts: int, top_k: int) -> Exchange:
    """The exchange in so many chunks; itself for one, or where nothing travels.

    Raises:
        ValueError: a device has fewer experts than `chunks`.
    """
    if chunks == 1 or not isinstance(exchange, ShardedExchange):
        return exchange
    here = exchange.experts_per_device
    if here < chunks:
        raise ValueError(
            f"expert_chunks is {chunks}: expected {here} at most, the experts of a device"
        )
    if isinstance(exchange, RaggedAllToAll):
        return RaggedChunks(exchange, chunks)
    form = replace(exchange.form, top_k=0)  # what is told ahead need not be in the rows
    return BlockChunks(replace(exchange, form=form), num_experts, top_k, chunks)
