"""Profiles of real machines, hand-written in the form of each platform, and one of this CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.parallel.sharding import RANKS, make_mesh
from tbo_jax.schedule import __main__ as command
from tbo_jax.schedule.hlo import Module, parse
from tbo_jax.schedule.measured import (
    MeasuredReport,
    known_instructions,
    measure,
    text_path,
    union,
    without,
)
from tbo_jax.schedule.measured_table import print_measured, timelines_of
from tbo_jax.schedule.plot import plot
from tbo_jax.schedule.profile import read_profile
from tbo_jax.schedule.report import scope_of
from tbo_jax.schedule.trace import write_trace
from tests.schedule.hlo_texts import GROUPS, module
from tests.schedule.profile_texts import Lines, Ran, kernel, nccl, write_profile
from tests.schedule.test_fixtures import TARGETS, everywhere, text, timeline
from tests.schedule.test_fixtures import module as fixture
from tests.schedule.test_report import of_fixture

US = 1e-6
GPU0, GPU1, TPU0 = "/device:GPU:0", "/device:GPU:1", "/device:TPU:0"


def metadata(layer: int, micro_batch: int, rest: str) -> str:
    return f'metadata={{op_name="jit(step)/layer_{layer}/micro_batch_{micro_batch}/{rest}"}}'


# Two micro-batches: the first dispatch runs beside the second attention, the second one waits.
STEP = module(
    "  %p = f32[8]{0} parameter(0)\n"
    f"  %gemm = f32[8]{{0}} copy(%p), {metadata(0, 0, 'attend/dot')}\n"
    f"  %a2a-start = ((f32[8]{{0}}), f32[8]{{0}}) all-to-all-start(%gemm), {GROUPS}, {metadata(0, 0, 'dispatch/all_to_all')}\n"
    f"  %gemm.1 = f32[8]{{0}} copy(%p), {metadata(0, 1, 'attend/dot')}\n"
    "  %a2a-done = f32[8]{0} all-to-all-done(%a2a-start)\n"
    f"  %a2a-start.1 = ((f32[8]{{0}}), f32[8]{{0}}) all-to-all-start(%gemm.1), {GROUPS}, {metadata(0, 1, 'dispatch/all_to_all')}\n"
    f"  %gemm.2 = f32[8]{{0}} copy(%a2a-done), {metadata(0, 0, 'experts/dot')}\n"
    "  %a2a-done.1 = f32[8]{0} all-to-all-done(%a2a-start.1)\n"
    f"  ROOT %gemm.3 = f32[8]{{0}} copy(%a2a-done.1), {metadata(0, 1, 'experts/dot')}"
)
# A plain step: one collective that everything waits for.
WHOLE = module(
    "  %p = f32[8]{0} parameter(0)\n"
    f"  %gemm = f32[8]{{0}} copy(%p), {metadata(0, 0, 'attend/dot')}\n"
    f"  %a2a = f32[8]{{0}} all-to-all(%gemm), {GROUPS}, {metadata(0, 0, 'dispatch/all_to_all')}\n"
    f"  ROOT %gemm.7 = f32[8]{{0}} copy(%a2a), {metadata(0, 0, 'experts/dot')}"
)


def gpu_step(at: float, longer: float = 0.0, **stats: Any) -> dict[str, list[Ran]]:
    """An execution of STEP: 42 us, 12 of communication, of which 3 are exposed; 1 us is idle."""
    return {
        "Stream #13(Kernel)": [
            kernel("gemm", at, at + 10, **stats),
            kernel("gemm.1", at + 10, at + 22, **stats),
            kernel("gemm.2", at + 23, at + 26, **stats),
            kernel("gemm.3", at + 29 + longer, at + 42 + longer, **stats),
        ],
        "Stream #20(Kernel)": [
            nccl("a2a-start", at + 11, at + 17, **stats),
            nccl("a2a-start.1", at + 23, at + 29 + longer, **stats),
        ],
    }  # fmt: skip


def joined(*runs: Lines) -> dict[str, list[Ran]]:
    """The lines of several executions as one."""
    lines: dict[str, list[Ran]] = {}
    for run in runs:
        for name, events in run.items():
            lines.setdefault(name, []).extend(events)
    return lines


def measured(
    folder: Path, texts: str | Mapping[int, str], planes: Mapping[str, Lines]
) -> dict[int, MeasuredReport]:
    texts = {2: texts} if isinstance(texts, str) else texts
    modules = {count: parse(text) for count, text in texts.items()}
    return measure(read_profile(write_profile(folder, planes)), modules)


def us(seconds: float) -> float:
    return round(seconds / US, 3)


def check_sums(report: MeasuredReport) -> None:
    """What is true of every report and of its timeline."""
    assert report.hidden + report.exposed == pytest.approx(report.communication)
    assert all(d.step >= max(d.compute, d.communication) for d in report.devices)
    low, high = report.spread("step")
    assert low <= report.step <= high
    lanes = report.timeline
    for lane in ("compute", "link"):
        events = [event for event in lanes.events if event.lane == lane]
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(events))
        assert all(0 <= event.start < event.end <= lanes.step + 1e-12 for event in events)
    for transfer in lanes.transfers:
        assert transfer.computed == pytest.approx(transfer.hidden, abs=1e-12)
    json.dumps(report.to_json())


def test_intervals() -> None:
    assert union([(4, 6), (0, 1), (1, 2), (5, 5.5), (9, 9)]) == [(0, 2), (4, 6)]
    assert without([(0, 10)], [(1, 2), (3, 4), (9, 12)]) == [(0, 1), (2, 3), (4, 9)]
    assert without([(0, 2), (5, 9)], [(1, 6), (7, 8)]) == [(0, 1), (6, 7), (8, 9)]
    assert without([(0, 2)], [(0, 2)]) == []


def test_a_step_on_gpus(tmp_path: Path) -> None:
    planes = {
        GPU0: joined(gpu_step(100), gpu_step(200), gpu_step(300, longer=2)),
        GPU1: joined(gpu_step(101, longer=8), gpu_step(202, longer=8), gpu_step(300)),
    }
    (report,) = measured(tmp_path, STEP, planes).values()
    check_sums(report)
    assert (report.micro_batches, report.module, report.executions) == (2, "jit_step", 3)
    assert [us(d.step) for d in report.devices] == [42, 50]
    assert [us(d.exposed) for d in report.devices] == [3, 11]
    assert us(report.step) == 46 and [us(s) for s in report.spread("step")] == [42, 50]
    assert us(report.compute) == 38
    assert us(report.communication) == 16 and us(report.exposed) == 7 and us(report.hidden) == 9
    assert report.hidden_share == pytest.approx(9 / 16)
    assert us(report.idle) == 1 and report.matched == 1
    first, second = report.collectives
    assert (first.name, first.kind, first.scope) == (
        "a2a-start",
        "all-to-all",
        "layer_0/micro_batch_0/dispatch",
    )
    assert [us(s) for s in (first.seconds, first.hidden, first.exposed)] == [6, 6, 0]
    assert second.scope == "layer_0/micro_batch_1/dispatch"
    assert [us(s) for s in (second.seconds, second.hidden, second.exposed)] == [10, 3, 7]
    stages = {s.scope.removeprefix("layer_0/"): s for s in report.stages}
    assert us(stages["micro_batch_1/attend"].compute) == 12
    assert us(stages["micro_batch_1/dispatch"].communication) == 10
    assert us(stages["micro_batch_1/dispatch"].exposed) == 7
    assert stages["micro_batch_1/dispatch"].compute == 0


def test_the_timeline_is_that_of_an_execution_near_the_median(tmp_path: Path) -> None:
    runs = joined(gpu_step(100), gpu_step(200), gpu_step(300, longer=9))
    (report,) = measured(tmp_path, STEP, {GPU0: runs}).values()
    lanes = report.timeline
    assert us(lanes.step) == 42 and us(lanes.compute) == 38
    assert us(lanes.communication) == 12 and us(lanes.exposed) == 3
    assert [us(t.computed) for t in lanes.transfers] == [6, 3]
    assert lanes.transfers[1].beside[0][0] == "gemm.2" and not lanes.transfers[0].synchronous
    assert [e.name for e in lanes.events][:3] == ["gemm", "gemm.1", "a2a-start"]


def test_transfers_beside_each_other_count_once_in_the_sums(tmp_path: Path) -> None:
    lines = {
        "Stream #1(Kernel)": [kernel("gemm", 0, 4), kernel("gemm.1", 4, 6), kernel("gemm.2", 20, 21),
                              kernel("gemm.3", 21, 22)],
        "Stream #2(Kernel)": [nccl("a2a-start", 5, 15)],
        "Stream #3(Kernel)": [nccl("a2a-start.1", 10, 18)],
    }  # fmt: skip
    (report,) = measured(tmp_path, STEP, {GPU0: lines}).values()
    check_sums(report)
    assert us(report.communication) == 13 and us(report.exposed) == 12 and us(report.idle) == 2
    assert [us(c.exposed) for c in report.collectives] == [9, 8]
    assert [us(t.event.seconds) for t in report.timeline.transfers] == [10, 3]
    assert us(report.timeline.exposed) == 12


def test_what_is_cut_off_at_the_ends_is_left_out(tmp_path: Path) -> None:
    def part(lines: Lines, low: float, high: float) -> Lines:
        return {
            n: [e for e in events if low <= e.start and e.end <= high]
            for n, events in lines.items()
        }

    head, tail = part(gpu_step(0), 22, 100), part(gpu_step(300), 0, 324)
    runs = joined(head, gpu_step(100), gpu_step(200, longer=4), tail)
    (report,) = measured(tmp_path, STEP, {GPU0: runs}).values()
    assert report.executions == 2 and us(report.step) == 44
    shuffled = {name: sorted(events, key=lambda e: e.name) for name, events in runs.items()}
    (same,) = measured(tmp_path / "b", STEP, {GPU0: shuffled}).values()
    assert same == report
    with pytest.raises(
        ValueError, match="jit_step: the profile holds no execution from start to end"
    ):
        measured(tmp_path / "c", STEP, {GPU0: joined(head, tail)})


def test_an_execution_begins_after_the_longest_pause(tmp_path: Path) -> None:
    """Several kernels of the first instruction, and of the last one, are of the right execution."""

    def run(at: float) -> Lines:
        lines = gpu_step(at)
        stream = lines["Stream #13(Kernel)"]
        first, last = stream[0], stream[-1]
        more = [
            kernel("gemm", at - 4, at - 2),
            kernel("gemm", at - 2, at),
            kernel("gemm.3", last.end + 1, last.end + 3),
        ]
        return joined({"Stream #13(Kernel)": [*more[:2], first, *stream[1:], more[2]]}, {"Stream #20(Kernel)": lines["Stream #20(Kernel)"]})  # fmt: skip

    (report,) = measured(tmp_path, STEP, {GPU0: joined(run(100), run(160), run(220))}).values()
    check_sums(report)
    assert report.executions == 3 and us(report.step) == 49 and us(report.compute) == 44


def test_programs_of_one_name_are_told_apart_by_their_instructions(tmp_path: Path) -> None:
    whole = {
        "Stream #13(Kernel)": [
            e for at in (1000, 1100) for e in (
                kernel("gemm", at, at + 10, program_id=4), nccl("a2a", at + 10, at + 18, program_id=4),
                kernel("gemm.7", at + 18, at + 30, program_id=4),
            )
        ]
    }  # fmt: skip
    other = {"Stream #13(Kernel)": [kernel("add", 900, 950, hlo_module="jit_sum", program_id=5)]}
    lines = joined(gpu_step(0), gpu_step(100), other, whole)
    found = measured(tmp_path, {1: WHOLE, 2: STEP}, {GPU0: lines})
    assert list(found) == [1, 2]
    assert us(found[1].step) == 30 and us(found[1].exposed) == 8 and found[1].hidden == 0
    assert us(found[2].step) == 42 and us(found[2].exposed) == 3
    assert found[1].timeline.transfers[0].synchronous


def test_kernels_that_tell_nothing_of_themselves(tmp_path: Path) -> None:
    """Within an execution NCCL's are communication, copies of the host nobody's, others compute."""
    lines = gpu_step(0) | {
        "Stream #30(Kernel)": [
            Ran("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 26, 27),
            Ran("fill", 28, 28.5),
            Ran("ncclDevKernel_Broadcast", 500, 900),
        ],
        "Stream #31(MemcpyH2D)": [Ran("MemcpyH2D", 27, 28, {"memcpy_details": "size:4"})],
        "Stream #32(Kernel)": [
            kernel("command_buffer.1", 22, 23),
            kernel("all-gather.5", 22, 23, name="gather"),
        ],
    }
    (report,) = measured(tmp_path, STEP, {GPU0: lines}).values()
    check_sums(report)
    assert us(report.step) == 42 and us(report.compute) == 39.5
    assert us(report.communication) == 13 and us(report.exposed) == 2.5
    # Of 50 busy microseconds, the four of NCCL, fill, the command buffer and the gather.
    assert report.matched == pytest.approx(50 / 53.5)
    assert {c.kind for c in report.collectives} == {"all-to-all", "all-gather", "unknown"}


def test_a_profile_that_tells_no_module(tmp_path: Path) -> None:
    lines = joined(
        gpu_step(0, hlo_module="", program_id=""), gpu_step(100, hlo_module="", program_id="")
    )
    (report,) = measured(tmp_path, STEP, {GPU0: lines}).values()
    assert report.module == "" and us(report.step) == 42 and us(report.exposed) == 3


def test_lines_that_the_viewer_derives_count_once(tmp_path: Path) -> None:
    derived = {"XLA Ops": [kernel("gemm", 0, 42)], "XLA Modules": [Ran("jit_step(3)", 0, 42)]}
    (report,) = measured(tmp_path, STEP, {GPU0: gpu_step(0) | derived}).values()
    assert us(report.compute) == 38


def on_tpu(op: str, start: float, end: float) -> Ran:
    """On the line of operations: named by its text, without stats that tell more."""
    return Ran(f"%{op} = f32[8]{{0:T(256)}} something(f32[8]{{0:T(256)}} %p)", start, end)


def in_flight(op: str, done: str, start: float, end: float) -> Ran:
    return Ran(f"%{op} = (f32[8]) something(%p)", start, end, {"hlo_op": done, "flow": 5})


def tpu_step(at: float, run: int, flights: bool = True) -> dict[str, list[Ran]]:
    """As `gpu_step`; what starts a transfer takes 1 us of nobody, waits are those for arrivals."""
    lines = {
        "XLA Modules": [Ran("jit_step(123456789)", at, at + 42, {"run_id": run})],
        "XLA Ops": [
            on_tpu("gemm", at, at + 10),
            on_tpu("a2a-start", at + 10, at + 11),
            on_tpu("gemm.1", at + 11, at + 22),
            on_tpu("a2a-done", at + 22, at + 22.5),
            on_tpu("a2a-start.1", at + 22.5, at + 23),
            on_tpu("gemm.2", at + 23, at + 26),
            on_tpu("a2a-done.1", at + 26, at + 29),
            on_tpu("gemm.3", at + 29, at + 42),
        ],
    }
    if flights:
        lines["Async XLA Ops"] = [
            in_flight("a2a-start", "a2a-done", at + 11, at + 17),
            in_flight("a2a-start.1", "a2a-done.1", at + 23, at + 29),
            in_flight("copy-start", "copy-done", at + 26, at + 29),
        ]
    return lines


def test_a_step_on_tpus(tmp_path: Path) -> None:
    planes = {
        TPU0: joined(tpu_step(0, 1), tpu_step(42, 2), tpu_step(100, 3)),
        "/device:TPU:0 SparseCore 0": {"XLA Ops": [on_tpu("gemm", 0, 900)]},
        "/host:CPU": {"python": [Ran("dispatch", 0, 900)]},
    }
    (report,) = measured(tmp_path, STEP, planes).values()
    check_sums(report)
    assert report.executions == 3 and us(report.step) == 42 and us(report.compute) == 37
    assert us(report.communication) == 12 and us(report.exposed) == 3 and us(report.idle) == 2
    assert [us(c.seconds) for c in report.collectives] == [6, 6]


def test_a_flight_may_be_named_by_its_done_alone(tmp_path: Path) -> None:
    lines = tpu_step(0, 1)
    lines["Async XLA Ops"] = [replace(e, name="async-collective") for e in lines["Async XLA Ops"]]
    (report,) = measured(tmp_path, STEP, {TPU0: lines}).values()
    assert us(report.communication) == 12 and us(report.exposed) == 3
    assert [c.name for c in report.collectives] == ["a2a-start", "a2a-start.1"]


def test_a_step_on_tpus_without_flights(tmp_path: Path) -> None:
    """A transfer is in flight from its start to its done, as far as one can tell."""
    (report,) = measured(tmp_path, STEP, {TPU0: tpu_step(0, 1, flights=False)}).values()
    check_sums(report)
    assert [us(c.seconds) for c in report.collectives] == [12.5, 6.5]
    # Until the first is over, its start and its done wait for it; and so with the second.
    assert [us(c.exposed) for c in report.collectives] == [1.5, 3.5]


def test_loops_are_no_work_of_their_own(tmp_path: Path) -> None:
    body = (
        "%body (q: (s32[])) -> (s32[]) {\n  %q = (s32[]) parameter(0)\n"
        f"  %inner = f32[8]{{0}} copy(%q), {metadata(0, 0, 'attend/dot')}\n  ROOT %r = (s32[]) tuple(%q)\n}}\n\n"
        "%cond (c: (s32[])) -> pred[] {\n  %c = (s32[]) parameter(0)\n  ROOT %less = pred[] compare(%c, %c)\n}\n\n"
    )
    entry = "  %p = (s32[]) parameter(0)\n  ROOT %while.1 = (s32[]) while(%p), condition=%cond, body=%body"
    text = module(entry, body)
    assert {n: k.role for n, k in known_instructions(parse(text)).items()} == {
        "while.1": "container", "inner": "compute", "less": "compute",
    }  # fmt: skip
    lines = {
        "XLA Modules": [Ran("jit_step(1)", 0, 20), Ran("jit_step(1)", 30, 50)],
        "XLA Ops": [
            e for at in (0, 30) for e in (
                on_tpu("while.1", at, at + 20), on_tpu("less", at, at + 1), on_tpu("inner", at + 1, at + 8),
                on_tpu("less", at + 8, at + 9), on_tpu("inner", at + 10, at + 18),
            )
        ],
    }  # fmt: skip
    (report,) = measured(tmp_path, text, {TPU0: lines}).values()
    assert us(report.step) == 20 and us(report.compute) == 17 and us(report.idle) == 3


def modelled_as_profile(name: str) -> dict[str, list[Ran]]:
    """Two executions of a fixture, exactly as the model has them.

    A loop without collectives is one event of the model; on a device something in it runs.
    """
    held = fixture(name)
    known = known_instructions(held)
    of_loop = {
        i.name: next(
            j.name
            for c in held.called(i)
            for j in held.walk(c)
            if known.get(j.name, known[i.name]).role == "compute"
        )
        for computation in held.computations.values()
        for i in computation.instructions
        if i.name in known and known[i.name].role == "container"
    }
    tpu = TARGETS[name].startswith("v")
    lanes = ("XLA Ops", "Async XLA Ops") if tpu else ("Stream #1(Kernel)", "Stream #2(Kernel)")
    lines: dict[str, list[Ran]] = {lane: [] for lane in lanes}
    step = timeline(name).step / US
    for at in (0.0, step + 50):
        if tpu:
            lines.setdefault("XLA Modules", []).append(Ran("jit_step(9)", at, at + step))
        for event in timeline(name).events:
            start, end = at + event.start / US, at + event.end / US
            op = of_loop.get(event.name, event.name)
            if not tpu:
                ran = (kernel if event.lane == "compute" else nccl)(op, start, end)
            elif event.lane == "compute":
                ran = on_tpu(op, start, end)
            else:
                ran = in_flight(op, op, start, end)
            lines[lanes[event.lane == "link"]].append(ran)
    return lines


@everywhere
def test_a_machine_that_does_what_the_model_says_measures_what_it_says(
    name: str, tmp_path: Path
) -> None:
    """The runner's own step, compiled for real machines."""
    plane = TPU0 if TARGETS[name].startswith("v") else GPU0
    profile = read_profile(write_profile(tmp_path, {plane: modelled_as_profile(name)}))
    (report,) = measure(profile, {2: fixture(name)}).values()
    check_sums(report)
    model = timeline(name)
    rounding = 2e-9 * len(model.events)  # a profile has whole nanoseconds
    assert report.executions == 2 and report.matched == 1
    for quantity in ("step", "compute", "communication", "hidden", "exposed"):
        assert getattr(report, quantity) == pytest.approx(getattr(model, quantity), abs=rounding)
    scopes = {scope_of(t.event.op_name) for t in model.transfers}
    assert {c.scope for c in report.collectives} == scopes
    for scope in scopes:
        sent = sum(t.event.seconds for t in model.transfers if scope_of(t.event.op_name) == scope)
        found = sum(c.seconds for c in report.collectives if c.scope == scope)
        assert found == pytest.approx(sent, abs=rounding)


def test_every_start_and_done_of_a_compiled_step_is_known() -> None:
    known = known_instructions(fixture("tpu_scanned"))
    dones = {k.name for k in known.values() if k.role == "done"}
    starts = {name for name, k in known.items() if k.asynchronous and k.name == name}
    assert dones == starts and len(starts) >= 4
    assert all(known[name].scope for name in starts)


# The command


def of_step(texts: Mapping[int, str], monkeypatch: Any) -> None:
    """Let the command compile nothing, and take these texts."""
    reports = {count: of_fixture("gpu_unrolled") for count in texts}
    for count, report in reports.items():
        vars(report).update(micro_batches=count, hlo=texts[count])
    monkeypatch.setattr(
        command, "inspect_model", lambda *_, micro_batches, **__: reports[micro_batches]
    )


def test_the_command_puts_measured_beside_modelled(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    of_step({1: WHOLE, 2: text("gpu_unrolled")}, monkeypatch)
    write_profile(tmp_path, {GPU0: modelled_as_profile("gpu_unrolled")})
    files = {name: tmp_path / f"r.{name}" for name in ("json", "svg", "trace")}
    args = command.Arguments(
        profile=tmp_path, layers=2, quiet=True, json=files["json"], plot=files["svg"], trace=files["trace"],
    )  # fmt: skip
    assert command.run(args) == []
    out = capsys.readouterr().out
    assert "Measured: medians of 2 executions on 1 device(s)" in out
    assert "No program of the profile is the step with 1 micro-batch." in out
    step = f"{timeline('gpu_unrolled').step * 1e3:.3f} ms"
    assert [line.split() for line in out.splitlines() if line.startswith("step")][-1] == [
        "step",
        *step.split() * 2,
    ]
    dispatch = [line for line in out.splitlines() if line.startswith("dispatch")]
    assert len(dispatch) == 4  # of each micro-batch: as a stage, and its collective
    for line in dispatch:
        numbers = [float(n) for n in re.findall(r"([\d.]+) us", line)]
        assert len(numbers) == 6 and max(numbers) > 1
        assert numbers[::2] == pytest.approx(numbers[1::2], abs=0.11)
    (one,) = json.loads(files["json"].read_text())["measured"]
    assert one["micro_batches"] == 2 and one["times"] == "measured" and "timeline" not in one
    picture = files["svg"].read_text()
    assert "2 micro-batches, measured" in picture and "modelled and measured time" in picture
    names = {e["args"]["name"] for e in json.loads(files["trace"].read_text())["traceEvents"] if e["name"] == "process_name"}  # fmt: skip
    assert "2 micro-batches, measured" in names


def test_a_text_beside_the_profile_counts(tmp_path: Path, monkeypatch: Any) -> None:
    other = STEP.replace("gemm", "fusion").replace("a2a", "x")
    of_step({2: other}, monkeypatch)
    write_profile(tmp_path, {GPU0: gpu_step(0)})
    args = command.Arguments(profile=tmp_path, micro_batches="2", layers=2, quiet=True)
    with pytest.raises(ValueError, match="Found jit_step .*gemm.*; expected jit_step .*fusion"):
        command.run(args)
    text_path(tmp_path, 2).write_text(STEP)
    assert command.run(args) == []


def test_pictures_and_tables_of_what_was_measured_alone(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    lines = joined(gpu_step(0), gpu_step(100)) | {"Stream #9": [kernel("command_buffer.0", 25, 29)]}
    found = measured(tmp_path, STEP, {GPU0: lines, GPU1: gpu_step(5, longer=3)})
    print_measured(found, {}, "a note")
    out = capsys.readouterr().out
    assert "a note" in out and "modelled" not in out
    assert "kernels that name no instruction" in out
    assert "to 0.045)" in out  # the slowest device, in milliseconds
    timelines = timelines_of(found.values())
    write_trace(tmp_path / "t.json", timelines)
    plot(tmp_path / "p.svg", timelines, title="measured", window="step")


# What goes wrong


def test_without_a_profile(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="no profile in .*: expected plugins/profile/RUN/HOST.xplane.pb"
    ):
        read_profile(tmp_path)


def test_the_newest_run_counts(tmp_path: Path) -> None:
    write_profile(tmp_path, {GPU0: gpu_step(0)}, run="2026_01_02_03_04_05")
    write_profile(tmp_path, {GPU0: gpu_step(0, longer=7)}, run="2026_01_02_03_04_06")
    profile = read_profile(tmp_path)
    assert "2 runs in " in profile.note and profile.note.endswith(
        "took the newest, 2026_01_02_03_04_06"
    )
    assert us(measure(profile, {2: parse(STEP)})[2].step) == 49
    alone = read_profile(profile.folder)
    assert alone.note == "" and alone.events == profile.events


def test_files_of_several_hosts_are_one_profile(tmp_path: Path) -> None:
    write_profile(tmp_path, {GPU0: gpu_step(0)}, host="a")
    write_profile(tmp_path, {GPU0: gpu_step(7, longer=4)}, host="b")
    (report,) = measure(read_profile(tmp_path), {2: parse(STEP)}).values()
    assert [d.name for d in report.devices] == [f"0:{GPU0}", f"1:{GPU0}"]
    assert [us(d.step) for d in report.devices] == [42, 46]


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    file = write_profile(tmp_path, {}) / "plugins/profile/2026_01_02_03_04_05/host.xplane.pb"
    with pytest.raises(ValueError, match="no event names an instruction.*found nothing"):
        read_profile(tmp_path)
    file.write_bytes(b"\xff\xff not a profile")
    with pytest.raises(ValueError, match="host.xplane.pb: not a profile that this jaxlib reads"):
        read_profile(tmp_path)
    write_profile(tmp_path, {"/host:CPU": {"python": [Ran("f", 0, 1)]}, "Task Environment": {}})
    with pytest.raises(ValueError, match="no event names .* found /host:CPU, Task Environment"):
        read_profile(tmp_path)


def test_a_profile_of_another_program_names_both(tmp_path: Path) -> None:
    other = {
        "Stream #1": [kernel(f"fusion.{n}", n, n + 1, hlo_module="jit_train") for n in range(9)]
    }
    message = (
        r"no program .* Found jit_train \(3\) with fusion.0, fusion.1, fusion.2 and 6 more; expected "
        r"jit_step \(micro-batches: 2\) with gemm, gemm.1, gemm.2 and 1 more\. .*step's text"
    )
    with pytest.raises(ValueError, match=message):
        measured(tmp_path, STEP, {GPU0: other})


def test_where_no_kernel_tells_when_a_step_ends(tmp_path: Path) -> None:
    lines = {"Stream #2": [nccl("a2a-start", 0, 5), nccl("a2a-start.1", 5, 9)]}
    with pytest.raises(
        ValueError, match="nothing tells where a step ends.*xla_gpu_enable_command_buffer="
    ):
        measured(tmp_path, STEP, {GPU0: lines})


# This machine's CPU


def exchange_and_multiply(devices: int) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    mesh = make_mesh(devices=jax.devices()[:devices])

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("layer_0/micro_batch_0/attend"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("layer_0/micro_batch_0/dispatch"):
            parts = jax.lax.all_to_all(x.reshape(devices, -1, x.shape[-1]), RANKS, 0, 0)
        with jax.named_scope("layer_0/micro_batch_0/experts"):
            return jnp.sin(parts.reshape(x.shape) @ w)

    ranks = PartitionSpec(RANKS)
    whole = PartitionSpec()
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(ranks, whole), out_specs=ranks))
    x = jax.device_put(jnp.ones((devices * 64, 64)), NamedSharding(mesh, ranks))
    w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, whole))
    return sharded.lower(x, w).compile(), (x, w)


def test_a_profile_of_this_cpu(tmp_path: Path) -> None:
    compiled, arguments = exchange_and_multiply(2)
    jax.block_until_ready(compiled(*arguments))
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            jax.block_until_ready(compiled(*arguments))
    held: Module = parse(compiled.as_text())
    (report,) = measure(read_profile(tmp_path), {1: held}).values()
    check_sums(report)
    assert report.executions == 3 and report.matched == 1
    assert [d.name for d in report.devices] == ["/host:CPU:0", "/host:CPU:1"]
    assert report.communication > 0 and 0 < report.compute < report.step
    (collective,) = report.collectives
    assert (collective.kind, collective.scope) == ("all-to-all", "layer_0/micro_batch_0/dispatch")
    assert {s.scope.rpartition("/")[2] for s in report.stages} >= {"attend", "dispatch", "experts"}
