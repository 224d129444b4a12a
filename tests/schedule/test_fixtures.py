"""The runner's own step, as XLA compiled it for machines that are not here (make_fixtures.py)."""

from __future__ import annotations

import lzma
import re
from functools import cache
from pathlib import Path

import pytest

from tbo_jax.schedule import cost
from tbo_jax.schedule.hlo import Module, parse
from tbo_jax.schedule.loops import trip_count
from tbo_jax.schedule.targets import find_target
from tbo_jax.schedule.timeline import Timeline, simulate

FIXTURES = Path(__file__).parent / "fixtures"
TARGETS = {"gpu_unrolled": "h100x8", "gpu_scanned": "h100x8", "tpu_scanned": "v5e:2x4"}
LAYERS = {"gpu_unrolled": 2, "gpu_scanned": 3, "tpu_scanned": 3}
everywhere = pytest.mark.parametrize("name", list(TARGETS))
scanned = pytest.mark.parametrize("name", ["gpu_scanned", "tpu_scanned"])


@cache
def text(name: str) -> str:
    return lzma.decompress((FIXTURES / f"{name}.hlo.xz").read_bytes()).decode()


@cache
def module(name: str) -> Module:
    return parse(text(name))


@cache
def timeline(name: str) -> Timeline:
    return simulate(module(name), find_target(TARGETS[name]).rates, {})


def scope(op_name: str) -> str:
    match = re.search(r"(layers|layer_\d+)/micro_batch_\d+/(dispatch|combine)", op_name)
    return match[0] if match else ""


def layer_loop(name: str) -> tuple[Module, str, int | None]:
    """Its body, and its turns: the one loop with collectives in it."""
    held = module(name)
    (loop,) = [
        i
        for i in held.entry.instructions
        if i.opcode == "while"
        and any(cost.collective_kind(held, j) for c in held.called(i) for j in held.walk(c))
    ]
    return held, loop.attribute("body") or "", trip_count(held, held.entry, loop)


@everywhere
def test_names_no_folder_of_the_machine_that_compiled(name: str) -> None:
    assert not re.search(r'"/\w[^"\s]*/[^"\s]*"', text(name))
    sources = {i.source.rpartition(":")[0] for c in module(name).computations.values()
               for i in c.instructions}  # fmt: skip
    assert "tbo_jax/stages.py" in sources
    assert all(s == "" or s.startswith(("tbo_jax/", "models/", "site-packages/")) for s in sources)


@everywhere
def test_every_instruction_is_understood(name: str) -> None:
    held = module(name)
    assert held.is_scheduled and held.num_devices == 8
    assert held.aliased_parameters
    lines = [line for line in text(name).splitlines() if line.startswith("  ")]
    assert sum(len(c.instructions) for c in held.computations.values()) == len(lines)
    for computation in held.computations.values():
        for instruction in computation.instructions:
            assert re.fullmatch(r"[a-z][a-z0-9-]*", instruction.opcode), instruction.opcode
            assert set(instruction.operands) <= computation.by_name.keys(), instruction.name
            assert set(instruction.called) <= held.computations.keys(), instruction.name


@everywhere
def test_every_collective_of_every_layer_is_found(name: str) -> None:
    found = sorted(scope(t.event.op_name) for t in timeline(name).transfers)
    hops = [f"micro_batch_{b}/{hop}" for b in (0, 1) for hop in ("dispatch", "combine")]
    if name == "gpu_unrolled":
        assert found == sorted(f"layer_{layer}/{hop}" for layer in range(2) for hop in hops)
    else:  # the loop's transfers are there once for each turn
        assert len(found) == LAYERS[name] * len(hops)
        assert {s.partition("/")[2] for s in found} == set(hops)
    assert {t.event.kind for t in timeline(name).transfers} == {"all-to-all"}


@everywhere
def test_every_start_has_its_done(name: str) -> None:
    computations = module(name).computations.values()
    starts = [(c.name, i.name) for c in computations for i in c.instructions
              if i.opcode == "all-to-all-start"]  # fmt: skip
    dones = [(c.name, i.operands[0]) for c in computations for i in c.instructions
             if i.opcode == "all-to-all-done"]  # fmt: skip
    assert sorted(starts) == sorted(dones)
    assert len(starts) >= 8


@everywhere
def test_transfers_weigh_what_seven_of_eight_devices_get(name: str) -> None:
    """128 tokens in two micro-batches, bfloat16 [8, 64, >= 1024]."""
    for transfer in timeline(name).transfers:
        rows = transfer.bytes * 8 / 7 / (8 * 64 * 2)
        assert 1024 <= rows < 1100


@scanned
def test_the_loop_of_the_layers_turns_once_less_than_there_are_layers(name: str) -> None:
    _, _, turns = layer_loop(name)
    assert turns == LAYERS[name] - 1


@scanned
def test_the_loop_is_replayed_for_every_layer(name: str) -> None:
    held, body, turns = layer_loop(name)
    inside = [i.name for i in held.computations[body].instructions if i.opcode.endswith("-start")]
    replayed = [t.event.name for t in timeline(name).transfers if t.event.name in inside]
    assert len(replayed) == 4 * (turns or 0)


def test_only_the_last_combine_is_exposed() -> None:
    held = timeline("gpu_unrolled")
    exposed = [scope(t.event.op_name) for t in held.transfers if t.waited > 1e-9]
    assert exposed == ["layer_1/micro_batch_1/combine"]
    assert held.hidden > 0.8 * held.communication


@everywhere
def test_times_add_up(name: str) -> None:
    held = timeline(name)
    assert held.hidden + held.exposed == pytest.approx(held.communication)
    assert held.step == pytest.approx(held.compute + held.exposed)
    assert held.step >= max(held.compute, held.communication)
    assert 0 < held.communication < held.compute


@everywhere
def test_products_are_those_of_the_model(name: str) -> None:
    """At least the attention's projections and the last layer, for 128 tokens."""
    layer = 1024 * (2 * 8 * 128 + 2 * 2 * 128)
    least = 2 * 128 * (LAYERS[name] * layer + 1024 * 8192)
    assert least <= timeline(name).flops < 20 * least


@everywhere
def test_no_kernel_reads_more_than_it_is_given(name: str) -> None:
    """The cache and stacked weights are operands of many kernels: most of them take a part."""
    held = module(name)
    for computation in held.computations.values():
        for i in computation.instructions:
            if i.opcode == "fusion" and cost.collective_kind(held, i) is None:
                given = i.bytes + sum(o.bytes for o in computation.operands(i))
                assert cost.work(held, computation, i).bytes <= given
