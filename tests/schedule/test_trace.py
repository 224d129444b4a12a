from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tbo_jax.schedule.scopes import Scope, find_scope
from tbo_jax.schedule.timeline import Event, Lane, Timeline, Transfer
from tbo_jax.schedule.trace import middle_layers, short_name, stage_spans, write_trace

US = 1e-6


def event(lane: Lane, start: float, end: float, op_name: str = "", name: str = "fusion") -> Event:
    kind = "all-to-all" if lane == "link" else ""
    return Event(lane, name, op_name, "model.py:12", start * US, end * US, kind)


def scoped(layer: int | str, micro_batch: int, rest: str) -> str:
    name = layer if isinstance(layer, str) else f"layer_{layer}"
    return f"jit(step)/shard_map/{name}/micro_batch_{micro_batch}/{rest}"


def two_micro_batches() -> Timeline:
    """A dispatch under the other micro-batch's attention, then one that is exposed for 3 of 5 us."""
    first = event("link", 10, 16, scoped(0, 0, "dispatch/all_to_all"), "all-to-all-start")
    second = event("link", 20, 25, scoped(0, 1, "dispatch/all_to_all"), "all-to-all-start.1")
    events = [
        event("compute", 0, 10, scoped(0, 0, "attend/dot_general"), "gemm"),
        event("compute", 10, 20, scoped(0, 1, "attend/dot_general"), "gemm.1"),
        first,
        event("compute", 20, 21, scoped(0, 0, "experts/dot_general"), "gemm.2"),
        event("compute", 21, 22, "", "copy.3"),
        second,
        event("compute", 25, 30, scoped(0, 1, "experts/dot_general"), "gemm.4"),
    ]
    transfers = [
        Transfer(first, 4e6, 0.0, 10 * US, (), False, 0.0),
        Transfer(second, 4e6, 3 * US, 2 * US, (), False, 0.0),
    ]
    return Timeline(events, transfers, 30 * US)


def written(tmp_path: Path, timelines: dict[str, Timeline]) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    write_trace(path, timelines)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def slices(events: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and wanted.items() <= e.items()]


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        (scoped(3, 1, "attend/dot_general"), Scope("layer_3", 1, "attend")),
        ("jit(step)/while/body/layers/micro_batch_0/combine/all_to_all", Scope("layers", 0, "combine")),
        ("layer_12/micro_batch_0/attend", Scope("layer_12", 0, "attend")),
        ("jit(f)/jvp(layer_1/micro_batch_0/attend)/sin", Scope("layer_1", 0, "attend")),
        ("jit(f)/transpose(jvp(layer_1/micro_batch_0/attend))/mul", Scope("layer_1", 0, "attend", True)),
        ("jit(f)/transpose(jvp(jvp()))/checkpoint/layer_1/micro_batch_0/attend/mul", Scope("layer_1", 0, "attend", True)),
        ("jit(f)/layer_1/micro_batch_0/attend/transpose", Scope("layer_1", 0, "attend")),
        ("jit(step)/my_layer_1/micro_batch_0/attend/add", None),
        ("jit(step)/layer_1/attend/add", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_scope_is_read_from_the_op_name(op_name: str, scope: Scope | None) -> None:
    assert find_scope(op_name) == scope


@pytest.mark.parametrize(
    ("op_name", "name"),
    [
        (scoped(3, 1, "attend/key_blocks/while"), "attend/while"),
        ("jit(f)/transpose(jvp(layer_1/micro_batch_0/attend))/mul", "attend (backward)/mul"),
        (scoped(3, 1, "attend"), "attend"),
        ("jit(step)/shard_map/scatter", "fusion"),
    ],
)
def test_a_name_is_stage_and_operation_or_the_instruction(op_name: str, name: str) -> None:
    assert short_name(event("compute", 0, 1, op_name)) == name


def test_what_has_no_scope_does_not_break_a_stage_but_a_wait_does() -> None:
    attend = scoped(0, 0, "attend/dot")
    timeline = Timeline(
        [
            event("compute", 0, 1, "", "copy"),
            event("compute", 1, 2, attend, "a"),
            event("compute", 2, 3, "", "copy.1"),
            event("compute", 3, 4, attend, "b"),
            event("compute", 7, 8, attend, "c"),
            event("compute", 8, 9, "", "copy.2"),
        ]
    )
    spans = [(round(s.start / US), round(s.end / US)) for s in stage_spans(timeline)]
    assert spans == [(1, 4), (7, 8)]


def test_the_turns_of_a_loop_are_spans_of_their_own() -> None:
    body = [("layers", 0, "layer/dot"), ("layers", 0, "layer/add")]
    events = [event("compute", 10 * t + 5 * i, 10 * t + 5 * i + 5, scoped(*op), f"i{i}")
              for t in range(5) for i, op in enumerate(body)]  # fmt: skip
    timeline = Timeline(events)
    assert [round(s.start / US) for s in stage_spans(timeline)] == [0, 10, 20, 30, 40]
    assert middle_layers(timeline) == (
        "turns 1 and 2 of the loop",
        events[2].start,
        events[6].start,
    )


@pytest.mark.parametrize(
    ("layers", "what", "shown"),
    [
        (1, "layer 0", (0, 10)),
        (2, "layers 0 and 1", (0, 20)),
        (3, "layers 0 and 1", (0, 20)),
        (6, "layers 2 and 3", (20, 40)),
    ],
)
def test_the_middle_layers(layers: int, what: str, shown: tuple[int, int]) -> None:
    hoisted = event("compute", -1, 0, scoped(layers - 1, 0, "attend/copy"))
    events = [
        event("compute", 10 * i, 10 * i + 10, scoped(i, 0, "attend/dot")) for i in range(layers)
    ]
    backward = [
        event("compute", 100 - 10 * i, 120 - 10 * i, f"transpose(jvp(layer_{i}/micro_batch_0/attend))/dot")
        for i in range(layers)
    ]  # fmt: skip
    found = middle_layers(Timeline([hoisted, *events, *reversed(backward)]))
    assert found == (what, pytest.approx(shown[0] * US), pytest.approx(shown[1] * US))


def test_the_last_layers_last_communication_is_shown() -> None:
    events = [
        event("compute", 0, 10, scoped(0, 0, "attend/dot")),
        event("link", 10, 17, scoped(0, 0, "combine/all_to_all")),
        event("compute", 17, 30, "jit(step)/logits"),
    ]
    assert middle_layers(Timeline(events)) == ("layer 0", 0.0, 17 * US)


def test_without_scopes_there_are_no_middle_layers() -> None:
    assert middle_layers(Timeline([event("compute", 0, 1, "jit(step)/add")])) is None


def test_each_timeline_is_a_process_with_two_named_threads(tmp_path: Path) -> None:
    names = ["1 micro-batch (modelled)", "2 micro-batches (modelled)"]
    events = written(tmp_path, dict.fromkeys(names, two_micro_batches()))
    metadata = [e for e in events if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert list(processes.values()) == names
    for process in processes:
        of_process = [e for e in metadata if e["pid"] == process and "tid" in e]
        threads = {e["args"]["name"]: e["tid"] for e in of_process if e["name"] == "thread_name"}
        order = {
            e["tid"]: e["args"]["sort_index"]
            for e in of_process
            if e["name"] == "thread_sort_index"
        }
        assert set(threads) == {"compute", "link"}
        assert order[threads["compute"]] < order[threads["link"]]
        assert {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == process} == set(order)


def test_times_are_microseconds_and_arguments_are_complete(tmp_path: Path) -> None:
    events = written(tmp_path, {"one": two_micro_batches()})
    (link,) = slices(events, ts=20.0, cat="all-to-all")
    assert link["name"] == "dispatch/all_to_all" and link["dur"] == 5.0
    assert link["args"] == {
        "instruction": "all-to-all-start.1",
        "op_name": scoped(0, 1, "dispatch/all_to_all"),
        "source": "model.py:12",
        "layer": "layer_0",
        "micro_batch": 1,
        "bytes": 4e6,
        "hidden": 2.0,
        "exposed": 3.0,
        "queued": 0.0,
        "synchronous": False,
    }
    (copy,) = slices(events, name="copy.3")
    assert copy["cat"] == "compute" and "layer" not in copy["args"]


def test_a_stage_encloses_its_instructions(tmp_path: Path) -> None:
    events = written(tmp_path, {"one": two_micro_batches()})
    stages = slices(events, cat="stage")
    assert [stage["name"] for stage in stages] == ["attend", "attend", "experts", "experts"]
    first, inner = [e for e in slices(events, ts=0.0) if e["tid"] == stages[0]["tid"]]
    assert first["cat"] == "stage" and inner["name"] == "attend/dot_general"


def test_neighbours_do_not_overlap_after_rounding(tmp_path: Path) -> None:
    edges = [0.0, 1 / 3, 2 / 3, 1.0004, 1.0006, 7 / 3, 2.5]
    timeline = Timeline([event("compute", a, b) for a, b in pairwise(edges)])
    nanoseconds = [
        (round(e["ts"] * 1000), round(e["dur"] * 1000))
        for e in slices(written(tmp_path, {"one": timeline}))
    ]
    assert len(nanoseconds) == len(edges) - 1
    for (start, length), (following, _) in pairwise(nanoseconds):
        assert start + length == following


def test_arrows_lead_from_start_to_done(tmp_path: Path) -> None:
    events = written(tmp_path, {"one": two_micro_batches()})
    arrows: dict[str, list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] in "stf":
            arrows.setdefault(e["id"], []).append(e)

    def holder(arrow: dict[str, Any]) -> str:
        on = [e for e in slices(events, tid=arrow["tid"]) if e["cat"] != "stage"]
        (found,) = [e for e in on if e["ts"] < arrow["ts"] < e["ts"] + e["dur"]]
        return found["args"]["instruction"]

    assert [[(a["ph"], holder(a)) for a in arrow] for arrow in arrows.values()] == [
        [("s", "gemm"), ("t", "all-to-all-start"), ("f", "gemm.2")],
        [("s", "gemm.1"), ("t", "all-to-all-start.1"), ("f", "gemm.4")],
    ]
    assert all(arrow[-1]["bp"] == "e" for arrow in arrows.values())


def test_a_queued_collective_has_its_arrow_from_where_it_was_started(tmp_path: Path) -> None:
    link = event("link", 5, 8, name="all-to-all-start")
    compute = [event("compute", i, i + 1, name=f"gemm.{i}") for i in range(8)]
    timeline = Timeline([*compute, link], [Transfer(link, 1.0, 0.0, 5 * US, (), False, 3 * US)])
    arrows = [e for e in written(tmp_path, {"one": timeline}) if e["ph"] in "stf"]
    assert [(e["ph"], e["ts"]) for e in arrows] == [("s", 1.5), ("f", 6.5)]


def test_no_timelines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no timelines"):
        write_trace(tmp_path / "trace.json", {})
    assert not list(tmp_path.iterdir())
