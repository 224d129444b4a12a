"""The report beside a reader that shares nothing with it but the price of a kernel (proto.py)."""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from tbo_jax.parallel.sharding import DEVICES, make_mesh
from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.links import NodeLinks
from tbo_jax.schedule.targets import find_target
from tbo_jax.schedule.timeline import simulate
from tests.schedule import proto

FIXTURES = Path(__file__).parent / "fixtures"
LINKS = NodeLinks(bandwidth=300e9, start_seconds=8e-6)
SENT = {  # of the result of n bytes, by one of so many devices
    "all-to-all": lambda size, devices: size * (devices - 1) / devices,
    "all-reduce": lambda size, devices: 2 * size * (devices - 1) / devices,
    "all-gather": lambda size, devices: size * (devices - 1) / devices,
    "reduce-scatter": lambda size, devices: size * (devices - 1),
    "collective-permute": lambda size, devices: size,
}


class Reader:
    """Runs a program second by second in its head: when is the link busy, when does compute wait?"""

    def __init__(self, program: proto.Program, kernels: Mapping[str, float]):
        self.program, self.kernels = program, kernels
        self.now = self.free = self.sent = self.busy = 0.0
        self.ends: dict[int, float] = {}  # of what is on the link
        self.computed = 0.0

    def run(self, computation: int) -> None:
        for number in self.program.order[computation]:
            node = self.program.nodes[number]
            inner = [
                self.program.nodes[i] for c in node.called for i in self.program.order.get(c, ())
            ]
            moved = [i for i in (node, *inner) if i.opcode in SENT]
            if node.opcode.endswith("-done"):
                if (start := node.operands[0]) in self.ends:
                    self.now = max(self.now, self.ends.pop(start))
            elif node.opcode == "while" and any(self._sends(c) for c in node.called):
                assert node.turns is not None
                for _ in range(node.turns):
                    for called in node.called:
                        if self._sends(called):
                            self.run(called)
            elif moved:
                sent = sum(SENT[i.opcode](i.bytes, i.groups) for i in moved)
                seconds = sent / LINKS.bandwidth + LINKS.start_seconds
                self.sent, self.busy = self.sent + sent, self.busy + seconds
                self.free = max(self.free, self.now) + seconds
                if node.opcode.endswith("-start") and not node.is_sync:
                    self.ends[number] = self.free
                else:
                    self.now = self.free
            else:
                spent = self.kernels.get(node.name, 0.0)
                self.now, self.computed = self.now + spent, self.computed + spent

    def _sends(self, computation: int) -> bool:
        nodes = [self.program.nodes[i] for i in self.program.order.get(computation, ())]
        return any(
            node.opcode in SENT or any(self._sends(c) for c in node.called) for node in nodes
        )


def compare(text: str) -> None:
    rates = replace(
        find_target("h100x8").rates, links=LINKS, collective_cores=0, collective_traffic=0.0
    )
    timeline = simulate(parse(text), rates, {})
    # A kernel in a loop runs as often as the loop turns, and is as dear each time.
    kernels = {event.name: event.seconds for event in timeline.events if event.lane == "compute"}
    reader = Reader(proto.read(text), kernels)
    reader.run(reader.program.entry)
    step = max(reader.now, reader.free)
    assert reader.sent == sum(transfer.bytes for transfer in timeline.transfers) > 0
    assert reader.busy == pytest.approx(timeline.communication)
    assert reader.computed == pytest.approx(timeline.compute)
    assert step == pytest.approx(timeline.step)
    hidden = reader.busy - (step - reader.computed)
    assert hidden == pytest.approx(timeline.hidden, abs=1e-12)


@pytest.mark.parametrize("name", ["gpu_unrolled", "gpu_scanned"])
def test_the_runner_s_step(name: str) -> None:
    compare(lzma.decompress((FIXTURES / f"{name}.hlo.xz").read_bytes()).decode())


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: jax.lax.psum(x, DEVICES),
        lambda x: jax.lax.all_to_all(x, DEVICES, 0, 0, tiled=True),
        lambda x: jax.lax.all_gather(x, DEVICES, axis=0, tiled=True),
        lambda x: jax.lax.psum_scatter(x, DEVICES, scatter_dimension=0, tiled=True),
        lambda x: jax.lax.ppermute(x, DEVICES, [(i, (i + 1) % 8) for i in range(8)]),
    ],
)
def test_programs_of_this_machine(collective) -> None:
    """As this jaxlib writes them, whichever it is."""
    spec = PartitionSpec(DEVICES)
    body = partial(jax.shard_map, mesh=make_mesh(8), in_specs=spec, out_specs=spec, check_vma=False)

    def step(x: jax.Array) -> jax.Array:
        sent = collective(x)
        return jnp.tanh(sent) @ jnp.ones((32, 32)) + jax.lax.psum(x.sum(), DEVICES)

    x = jax.ShapeDtypeStruct((64 * 8, 32), jnp.float32)
    compare(jax.jit(body(step)).lower(x).compile().as_text())
