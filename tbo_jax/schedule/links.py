"""The links of a machine: how long a collective takes on them.

A device is named by its number in the machine: GPUs node after node; TPU chips with the first
coordinate counting fastest, the devices of a chip one after another. All times are modelled.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

Groups = tuple[tuple[int, ...], ...]
# What each device of a group sends to each other one, and what is handed from one to the next.
_TO_EACH = frozenset(["all-to-all", "ragged-all-to-all"])
_IN_PAIRS = frozenset(["collective-permute", "send"])  # a group is a pair: from, to


class Links(Protocol):
    """What joins the devices of a machine."""

    def seconds(self, kind: str, sent: float, groups: Groups) -> float:
        """Time in which every device of these groups sends `sent` bytes, once it is started.

        Args:
            kind: of the collective, as HLO names it (all-to-all, all-reduce, ...). One that is not
                known is taken for a ring.
            sent: bytes that a device sends.
            groups: of devices, all at once; pairs of a collective-permute.
        """
        ...

    def start(self, groups: Groups) -> float:
        """Seconds that a collective takes beside those."""
        ...

    def describe(self) -> str:
        """A few words with the rates."""
        ...


@dataclass(frozen=True)
class NodeLinks:
    """GPUs: every device reaches all of its node at one rate, those of others by an adapter."""

    bandwidth: float  # bytes per second that a device sends to others of its node
    start_seconds: float  # of a collective in a node
    node_bandwidth: float = math.inf  # bytes per second that a device sends to other nodes
    node_start_seconds: float = 0.0  # of a collective over nodes
    devices_per_node: int = 0  # 0: all are in one

    def seconds(self, kind: str, sent: float, groups: Groups) -> float:
        """See `Links`. The slowest group counts.

        To each: what leaves the node takes the adapter, the rest the faster links beside it. Rings
        (all-reduce, all-gather, reduce-scatter) over nodes: one for each device that a node has in
        the group, each with a part of the array and crossing by an adapter of its own, as NCCL lays
        them (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4).
        """
        return max(self._group_seconds(kind, sent, group) for group in groups)

    def _group_seconds(self, kind: str, sent: float, group: tuple[int, ...]) -> float:
        if len(set(group)) == 1:
            return 0.0
        nodes = Counter(self._node(device) for device in group)
        if kind in _TO_EACH:
            # Of the device that has the most of the others elsewhere.
            away = sent * (len(group) - min(nodes.values())) / (len(group) - 1)
            away = away if len(nodes) > 1 else 0.0
            inside = sent * (max(nodes.values()) - 1) / (len(group) - 1)
            return max(inside / self.bandwidth, away / self.node_bandwidth)
        if len(nodes) == 1:
            return sent / self.bandwidth
        rails = min(nodes.values())
        inside = sent if max(nodes.values()) > 1 else 0.0
        return max(inside / self.bandwidth, sent / (rails * self.node_bandwidth))

    def start(self, groups: Groups) -> float:
        """See `Links`."""
        if all(len(set(group)) == 1 for group in groups):
            return 0.0
        crosses = any(len({self._node(device) for device in group}) > 1 for group in groups)
        return self.node_start_seconds if crosses else self.start_seconds

    def _node(self, device: int) -> int:
        return device // self.devices_per_node if self.devices_per_node else 0

    def describe(self) -> str:
        """See `Links`."""
        words = f"{self.bandwidth / 1e9:.0f} GB/s of link a device"
        if math.isfinite(self.node_bandwidth):
            words += f" in a node, {self.node_bandwidth / 1e9:.0f} between nodes"
        return words


@dataclass(frozen=True)
class TorusLinks:
    """TPU: a chip has a link to each neighbour along each axis, that wraps around or does not.

    Messages go along one axis after the other, the shorter way around. This gives what the
    bisection allows: on a 2x4 mesh of v5e an all-to-all sends 39 GB/s a chip over links of 45.
    """

    dims: tuple[int, ...]  # chips along each axis
    wraps: tuple[bool, ...]  # of each axis
    bandwidth: float  # bytes per second that a link carries in one direction
    start_seconds: float  # of a collective
    devices_per_chip: int = 1
    chip_bandwidth: float = math.inf  # bytes per second between the devices of a chip

    def seconds(self, kind: str, sent: float, groups: Groups) -> float:
        """See `Links`. The busiest link counts.

        Rings (all-reduce, all-gather, reduce-scatter) use all links that a chip has to others of
        its group; the chip with the fewest counts, such as one in the corner of a mesh.
        """
        link, between = _busiest(self, kind, groups)
        return sent * max(link / self.bandwidth, between / self.chip_bandwidth)

    def start(self, groups: Groups) -> float:
        """See `Links`."""
        return 0.0 if all(len(set(group)) == 1 for group in groups) else self.start_seconds

    def describe(self) -> str:
        """See `Links`."""
        axes = "x".join(
            f"{size}{' (ring)' if wrap else ''}"
            for size, wrap in zip(self.dims, self.wraps, strict=True)
        )
        return f"{self.bandwidth / 1e9:.0f} GB/s a link and direction, {axes} chips"

    def busiest(self, kind: str, groups: Groups) -> tuple[float, float]:
        """Bytes on the busiest link, and on that within a chip, if a device sends one byte."""
        if kind not in _TO_EACH | _IN_PAIRS:
            neighbours = [self._neighbours(group) for group in groups if len(group) > 1]
            if all(neighbours):
                return max((1 / n for n in neighbours), default=0.0), self._inside(groups)
        loads: dict[tuple[tuple[int, ...], int, int], float] = {}
        inside: dict[int, float] = {}
        for group in groups:
            for source, goal, share in _messages(kind, group):
                chip, other = source // self.devices_per_chip, goal // self.devices_per_chip
                if chip == other:
                    moved = share if source != goal else 0.0
                    inside[source] = inside.get(source, 0.0) + moved
                    continue
                for link, part in self._route(chip, other):
                    loads[link] = loads.get(link, 0.0) + part * share
        return max(loads.values(), default=0.0), max(inside.values(), default=0.0)

    def _inside(self, groups: Groups) -> float:
        """Whether a ring goes through several devices of a chip: 1 if it does."""
        chips = [[device // self.devices_per_chip for device in group] for group in groups]
        return float(any(len(set(chip)) < len(chip) for chip in chips))

    def _neighbours(self, group: tuple[int, ...]) -> float:
        """The fewest links that a chip of a group has to others of it; inf if it is one chip."""
        places = {self._place(device // self.devices_per_chip) for device in group}
        if len(places) == 1:
            return math.inf
        return min(
            sum(self._step(place, axis, way) in places - {place} for axis, way in self._ways())
            for place in places
        )

    def _ways(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(len(self.dims)), (1, -1))

    def _place(self, chip: int) -> tuple[int, ...]:
        place = []
        for size in self.dims:
            place.append(chip % size)
            chip //= size
        return tuple(place)

    def _step(self, place: tuple[int, ...], axis: int, way: int) -> tuple[int, ...] | None:
        """The place at the other end of a link; None at the edge of a mesh."""
        size, to = self.dims[axis], place[axis] + way
        if not 0 <= to < size and not self.wraps[axis]:
            return None
        return (*place[:axis], to % size, *place[axis + 1 :])

    def _route(
        self, chip: int, goal: int
    ) -> Iterator[tuple[tuple[tuple[int, ...], int, int], float]]:
        """The links from a chip to another one, and which part of a message takes each."""
        start, end = self._place(chip), self._place(goal)
        for axis, size in enumerate(self.dims):
            ahead = (end[axis] - start[axis]) % size
            ways = {1: ahead, -1: size - ahead}
            if not self.wraps[axis]:
                ways = {1: ahead} if end[axis] >= start[axis] else {-1: size - ahead}
            shortest = min(ways.values())
            chosen = [way for way, hops in ways.items() if hops == shortest] if ahead else []
            for way in chosen:
                place = start
                for _ in range(shortest):
                    yield (place, axis, way), 1 / len(chosen)
                    place = self._step(place, axis, way) or place
            start = (*start[:axis], end[axis], *start[axis + 1 :])


# The collectives of a program run in few different groups.
@lru_cache(maxsize=256)
def _busiest(links: TorusLinks, kind: str, groups: Groups) -> tuple[float, float]:
    return links.busiest(kind, groups)


def _messages(kind: str, group: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """From, to, and the share of what a device sends, of each message in a group."""
    if kind in _TO_EACH:
        others = max(1, len(group) - 1)
        for source, goal in itertools.permutations(group, 2):
            yield source, goal, 1 / others
    elif kind in _IN_PAIRS:
        yield group[0], group[-1], 1.0
    else:  # a ring
        for source, goal in zip(group, (*group[1:], group[0]), strict=True):
            yield source, goal, 1.0
