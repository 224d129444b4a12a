"""Which programs are compared, and the table of all ways to overlap."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from tbo_jax.overlap.config import OFF, Strategy
from tbo_jax.schedule import __main__ as command
from tbo_jax.schedule.compare import compare
from tbo_jax.schedule.model_step import StepShape, expected_costs, read_shape
from tbo_jax.schedule.report import ScheduleReport
from tbo_jax.schedule.strategies import best_of, strategies_table
from tbo_jax.schedule.timeline import Timeline

Arguments = command.Arguments


@pytest.mark.parametrize(
    ("options", "experts", "names"),
    [
        ({}, 16, "off, micro_batches 2"),
        ({"expert_chunks": "2,4"}, 16, "off, micro_batches 2, expert_chunks 2, expert_chunks 4"),
        ({"strategies": True}, 16, "off, micro_batches 2, expert_chunks 2, expert_chunks 4"),
        ({"strategies": True}, 3, "off, micro_batches 2, expert_chunks 2"),
        ({"strategies": True}, 1, "off, micro_batches 2"),
        ({"strategies": True}, 0, "off, micro_batches 2"),
        ({"strategies": True, "phase": "train"}, 16, "off, micro_batches 2"),
        ({"strategies": True, "micro_batches": "1"}, 2, "off, expert_chunks 2"),
    ],
)
def test_what_is_compared(options: dict[str, Any], experts: int, names: str) -> None:
    found = command.strategies_of(Arguments(**options), experts)
    assert ", ".join(str(one) for one in found) == names


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="--expert-chunks 2,8: expected 4 at most, the experts of"):
        command.strategies_of(Arguments(expert_chunks="2,8"), 4)
    with pytest.raises(ValueError, match="--expert-chunks 'x': expected numbers from 1"):
        command.strategies_of(Arguments(expert_chunks="x"), 4)
    with pytest.raises(ValueError, match="--buckets decode:8 needs --strategies"):
        command.steps_of(Arguments(buckets="decode:8"))
    for wrong in ("decode", "decode:", "verify:8", "decode:8,"):
        with pytest.raises(
            ValueError, match="expected a phase .decode, prefill, train. and tokens"
        ):
            command.steps_of(Arguments(strategies=True, buckets=wrong))
    several = Arguments(strategies=True, buckets="decode:8,decode:16")
    with pytest.raises(ValueError, match="--plot is for one step, --buckets has 2"):
        command.steps_of(dataclasses.replace(several, plot=command.Path("x.png")))
    assert command.steps_of(several) == [StepShape("decode", n, 2048) for n in (8, 16)]


def report(step: float, strategy: Strategy, needed: int = 10) -> ScheduleReport:
    zeros = dict.fromkeys((f.name for f in dataclasses.fields(ScheduleReport)), 0)
    return ScheduleReport(
        **zeros
        | {
            "target": "h100x8", "micro_batches": strategy.micro_batches, "step": step,
            "expert_chunks": strategy.expert_chunks, "needed_bytes": needed, "memory": 100,
            "timeline": Timeline(), "communication": 1.0, "collectives": (), "findings": (),
            "assumed_loops": (), "run_time": (), "hlo": "", "not_priced": {},
        }
    )  # fmt: skip


SPLIT, CHUNKS = Strategy(2), Strategy(expert_chunks=2)


@pytest.mark.parametrize(
    ("steps", "needed", "best"),
    [
        ((3.0, 2.0, 1.0), (10, 10, 10), 2),
        ((3.0, 1.0, 2.0), (10, 10, 10), 1),
        ((1.0, 1.0, 1.0), (10, 10, 10), 0),  # a tie keeps off
        ((3.0, 2.0, 1.0), (10, 10, 200), 1),  # does not fit
        ((3.0, 2.0, 1.0), (200, 200, 200), 2),
    ],
)
def test_the_best_is_marked(steps: tuple[float, ...], needed: tuple[int, ...], best: int) -> None:
    reports = [report(*of) for of in zip(steps, (OFF, SPLIT, CHUNKS), needed, strict=True)]
    assert best_of(reports) is reports[best]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(strategies_table([(StepShape("decode", 8, 64), reports)]))
    lines = console.export_text().splitlines()
    assert [("best" in line) for line in lines[1:4]] == [n == best for n in range(3)]
    assert "2 expert chunks" in lines[3] and "decode 8" in lines[1]
    assert [("(!)" in line) for line in lines[1:4]] == [n > 100 for n in needed]


def test_programs_with_chunks_are_compared_with_their_like() -> None:
    before = {"reports": [report(1.0, one).to_json() for one in (OFF, CHUNKS)]}
    now = {"reports": [report(1.0, OFF).to_json(), report(2.0, CHUNKS).to_json()]}
    worse = [change for change in compare(before, now) if change.worse]
    assert {(change.micro_batches, change.expert_chunks) for change in worse} == {(1, 2)}
    old = {"reports": [{k: v for k, v in before["reports"][0].items() if k != "expert_chunks"}]}
    assert not [change for change in compare(old, before) if change.worse]
    with pytest.raises(ValueError, match="no program in common: off before, expert_chunks 2 now"):
        compare(old, {"reports": now["reports"][1:]})


def test_a_chunk_is_priced_with_its_own_experts() -> None:
    config, shape = read_shape("qwen3-30b-a3b", 2), StepShape("decode", 256, 2048)

    def work(strategy: Strategy, transport: Any) -> dict[str, Any]:
        return expected_costs(config, 8, shape, strategy, 1, transport)

    for transport in ("all_to_all", "ragged_all_to_all"):
        whole, chunk, split = (work(one, transport) for one in (OFF, CHUNKS, SPLIT))
        for name in ("tbo_experts_gate_up", "tbo_experts_down"):
            of = [costs["kernels"][name].bytes for costs in (whole, chunk, split)]
            assert of[1] == pytest.approx(of[0] / 2)
            assert of[2] > 0.9 * of[0]  # a micro-batch reads all experts
    # Rows that a chunk sends: a token may go to a device for both groups.
    assert whole["ragged_rows"] / 2 < chunk["ragged_rows"] < whole["ragged_rows"]
