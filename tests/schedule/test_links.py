from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbo_jax.schedule.links import Groups, NodeLinks, TorusLinks
from tbo_jax.schedule.targets import find_target


def groups(*each: object) -> Groups:
    return tuple(tuple(one) for one in each)  # type: ignore[arg-type]


ALL8, ALL16 = groups(range(8)), groups(range(16))
NODES = NodeLinks(
    bandwidth=400.0, start_seconds=1.0, node_bandwidth=50.0, node_start_seconds=6.0,
    devices_per_node=8,
)  # fmt: skip


# --- GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, sent, over, seconds",
    [
        ("all-to-all", 700, ALL8, 700 / 400),
        ("all-to-all", 1500, ALL16, 800 / 50),  # 8 of 15 parts leave the node, the others beside
        ("ragged-all-to-all", 1500, ALL16, 800 / 50),
        ("all-to-all", 100, groups([3, 11]), 100 / 50),
        ("all-gather", 700, ALL8, 700 / 400),
        # Eight rings, each with an eighth and an adapter of its own; inside all of them share.
        ("all-reduce", 8000, ALL16, 8000 / 400),
        ("all-reduce", 8000, groups([0, 8], [1, 9]), 8000 / 50),  # one device a node: no rails
        ("reduce-scatter", 8000, groups([0, 1, 8, 9]), 8000 / 100),
        ("collective-permute", 100, groups([0, 1]), 100 / 400),
        ("collective-permute", 100, groups([0, 1], [7, 8]), 100 / 50),  # the slowest pair
        ("collective-permute", 100, groups([5, 5]), 0),
        ("all-reduce", 0, groups([0], [1]), 0),
    ],
)
def test_nodes(kind: str, sent: float, over: Groups, seconds: float) -> None:
    assert NODES.seconds(kind, sent, over) == pytest.approx(seconds)


def test_a_start_costs_more_between_nodes() -> None:
    assert NODES.start(ALL8) == NODES.start(groups(range(8), range(8, 16))) == 1
    assert NODES.start(ALL16) == NODES.start(groups([0, 1], [7, 8])) == 6
    assert NODES.start(groups([0], [1])) == NODES.start(groups([4, 4])) == 0


def test_one_node_has_no_slower_links() -> None:
    links = NodeLinks(bandwidth=400.0, start_seconds=1.0)
    assert links.seconds("all-to-all", 1500, ALL16) == 1500 / 400
    assert links.start(ALL16) == 1


def test_an_all_reduce_over_two_nodes_beside_what_nccl_needed() -> None:
    """64 MiB over 2 x 8 H100: 468 us, where a device that sent to all alike would need 1,350."""
    links = find_target("h100x8", nodes=2).rates.links
    sent = 2 * 64 * 2**20 * 15 / 16
    assert 0.75 * 468e-6 < links.seconds("all-reduce", sent, ALL16) + links.start(ALL16) < 468e-6


# --- TPU ----------------------------------------------------------------------------------------

MESH = TorusLinks(dims=(2, 4), wraps=(False, False), bandwidth=45.0, start_seconds=1.0)
RING = TorusLinks(dims=(4,), wraps=(True,), bandwidth=45.0, start_seconds=1.0)
LINE = TorusLinks(dims=(4,), wraps=(False,), bandwidth=45.0, start_seconds=1.0)


@pytest.mark.parametrize(
    "links, kind, over, busiest",
    [
        # Chips 0 to 3 send an eighth each to chips 4 to 7, over two links.
        (MESH, "all-to-all", ALL8, 16 / 7 / 2),
        (MESH, "all-gather", ALL8, 1 / 2),  # a corner has two links
        (MESH, "all-reduce", groups([0, 1], [2, 3], [4, 5], [6, 7]), 1),
        (MESH, "all-reduce", groups([0, 2, 4, 6], [1, 3, 5, 7]), 1),  # lines: their ends have one
        (MESH, "collective-permute", groups([0, 1], [1, 0], [2, 3]), 1),  # each a link of its own
        (MESH, "collective-permute", groups([0, 6]), 1),
        (MESH, "collective-permute", groups([0, 4], [2, 6]), 2),  # both from row 1 to row 2
        (MESH, "all-gather", groups([0, 4], [2, 6]), 2),  # no neighbours: over the chips between
        (RING, "all-gather", groups(range(4)), 1 / 2),
        (RING, "all-to-all", groups(range(4)), (1 + 2 * 1 / 2) / 3),  # half of the longest each way
        (RING, "collective-permute", groups([3, 0]), 1),
        (LINE, "collective-permute", groups([3, 0], [1, 0]), 2),  # back through all
        (LINE, "all-gather", groups(range(4)), 1),
        (LINE, "all-to-all", groups([0]), 0),
    ],
)  # fmt: skip
def test_the_busiest_link(links: TorusLinks, kind: str, over: Groups, busiest: float) -> None:
    assert links.seconds(kind, 90.0, over) == pytest.approx(2 * busiest)


def test_the_bisection_bounds_an_all_to_all_on_v5e() -> None:
    """39 GB/s a chip over four links of 45 GB/s, two of them at a corner."""
    links = find_target("v5e:2x4", rates="line").rates.links
    assert 1e9 / links.seconds("all-to-all", 1e9, ALL8) == pytest.approx(39.4e9, rel=1e-3)
    assert 1e9 / links.seconds("collective-permute", 1e9, groups([0, 1])) == pytest.approx(45e9)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_an_all_to_all_is_never_faster_than_any_bisection(
    sizes: list[int], data: st.DataObject
) -> None:
    wraps = tuple(data.draw(st.booleans()) if size > 2 else False for size in sizes)
    links = TorusLinks(dims=tuple(sizes), wraps=wraps, bandwidth=1.0, start_seconds=0.0)
    places = list(itertools.product(*(range(size) for size in reversed(sizes))))
    count = len(places)
    seconds = links.seconds("all-to-all", count - 1.0, groups(range(count)))
    for axis, size in enumerate(sizes):
        for cut in range(1, size):
            below = sum(place[::-1][axis] < cut for place in places)
            across = (count // size) * (2 if wraps[axis] else 1)
            assert seconds >= below * (count - below) / across - 1e-9


@given(st.sampled_from([(4, 4), (2, 4), (8,), (4, 4, 4)]), st.data())
def test_a_permutation_takes_whole_routes(dims: tuple[int, ...], data: st.DataObject) -> None:
    """All that is sent is carried: the busiest link has no less than the mean of those in use."""
    links = TorusLinks(dims, tuple(size == 4 for size in dims), bandwidth=1.0, start_seconds=0.0)
    count = len(list(itertools.product(*map(range, dims))))
    goals = data.draw(st.permutations(range(count)))
    over = groups(*zip(range(count), goals, strict=True))

    def hops(source: int, goal: int) -> int:
        total = 0
        for size in dims:
            ahead = abs(source % size - goal % size)
            total += min(ahead, size - ahead) if size == 4 else ahead
            source, goal = source // size, goal // size
        return total

    work = sum(hops(*pair) for pair in over)
    ways = 2 * len(dims) * count
    assert links.seconds("collective-permute", 1.0, over) >= work / ways
    assert (links.seconds("collective-permute", 1.0, over) == 0) == (work == 0)


def test_the_devices_of_a_chip_share_its_links() -> None:
    links = TorusLinks(
        dims=(2, 2), wraps=(False, False), bandwidth=100.0, start_seconds=0.0, devices_per_chip=2,
        chip_bandwidth=600.0,
    )  # fmt: skip
    # Each device to each other one: over a link 2 x 2 chips' messages, 2 x 2 devices each.
    assert links.seconds("all-to-all", 700.0, ALL8) == pytest.approx(100 * 8 / 100)
    assert links.seconds("all-to-all", 600.0, groups([0, 1])) == pytest.approx(1)
    assert links.seconds("all-gather", 600.0, ALL8) == pytest.approx(600 / 2 / 100)
    assert links.seconds("all-gather", 600.0, groups([0, 1], [2, 3])) == pytest.approx(1)
    assert links.seconds("collective-permute", 600.0, groups([0, 1])) == pytest.approx(1)
    assert links.seconds("collective-permute", 600.0, groups([0, 2])) == pytest.approx(6)


@pytest.mark.parametrize(
    "name, wraps",
    [
        ("v5e:2x4", (False, False)),
        ("v5e:16x16", (True, True)),
        ("v6e:8x16", (False, True)),
        ("v5p:2x2x2", (False, False, False)),
        ("v5p:4x4x8", (True, True, True)),
        ("tpu7x:2x2x4", (False, False, True)),
    ],
)
def test_which_axes_are_rings(name: str, wraps: tuple[bool, ...]) -> None:
    links = find_target(name).rates.links
    assert isinstance(links, TorusLinks) and links.wraps == wraps


def test_every_device_of_a_group_sends_the_same() -> None:
    """So the load of all links together is what is sent, times the hops."""
    loads = Counter(link for link, _ in LINE._route(0, 3))
    assert sum(loads.values()) == 3
