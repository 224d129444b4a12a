from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hlo_texts import GROUPS, RATES, Op, module, program
from hypothesis import given
from hypothesis import strategies as st

from tbo_jax.schedule.cost import Work
from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.links import NodeLinks
from tbo_jax.schedule.timeline import Timeline, simulate


def run(ops: Sequence[Op]) -> Timeline:
    return simulate(parse(program(ops)), RATES, {})


def run_text(text: str, **options: Any) -> Timeline:
    return simulate(parse(text), RATES, options.pop("trip_counts", {}), **options)


def waits(timeline: Timeline) -> dict[str, float]:
    return {t.event.name.partition(".")[0]: t.waited for t in timeline.transfers}


def test_a_transfer_under_longer_compute_is_hidden() -> None:
    timeline = run([("start", "a", 3), ("compute", 5), ("done", "a")])
    assert (timeline.step, timeline.compute, timeline.communication) == (5, 5, 3)
    assert (timeline.hidden, timeline.exposed) == (3, 0)


def test_what_compute_does_not_cover_is_exposed() -> None:
    timeline = run([("compute", 2), ("start", "a", 4), ("compute", 1), ("done", "a")])
    assert (timeline.step, timeline.compute, timeline.exposed, timeline.hidden) == (6, 3, 3, 1)
    (transfer,) = timeline.transfers
    assert (transfer.event.start, transfer.event.end) == (2, 6)
    assert (transfer.computed, transfer.queued, transfer.synchronous) == (1, 0, False)


def test_a_synchronous_collective_is_exposed() -> None:
    timeline = run([("compute", 2), ("sync", 4), ("compute", 1)])
    assert (timeline.step, timeline.exposed, timeline.hidden) == (7, 4, 0)
    assert timeline.transfers[0].synchronous


def test_the_link_serves_one_transfer_after_the_other() -> None:
    timeline = run(
        [("start", "a", 3), ("start", "b", 3), ("compute", 4), ("done", "a"), ("done", "b")]
    )
    first, second = timeline.transfers
    assert (first.event.end, second.event.start, second.event.end) == (3, 3, 6)
    assert (first.queued, second.queued) == (0, 3)
    assert waits(timeline) == {"a": 0, "b": 2}


def test_waiting_in_the_queue_is_charged_to_the_transfer_that_holds_the_link() -> None:
    """`b` is waited for first, and `a` is before it in the queue."""
    timeline = run(
        [("start", "a", 5), ("start", "b", 2), ("compute", 1), ("done", "b"), ("done", "a")]
    )
    assert waits(timeline) == {"a": 4, "b": 2}
    assert timeline.step == 7


def test_a_wait_can_be_shared_by_three_transfers() -> None:
    timeline = run(
        [("start", "a", 3), ("start", "b", 4), ("start", "c", 5), ("compute", 2)]
        + [("done", "c"), ("compute", 6), ("done", "a"), ("done", "b")]
    )
    assert waits(timeline) == {"a": 1, "b": 4, "c": 5}
    assert (timeline.step, timeline.compute, timeline.hidden) == (18, 8, 2)


def test_a_synchronous_collective_queues_behind_a_running_one() -> None:
    timeline = run([("start", "a", 3), ("compute", 1), ("sync", 4), ("compute", 2), ("done", "a")])
    assert waits(timeline) == {"a": 2, "sync": 4}
    assert timeline.step == 9


def test_a_transfer_that_nobody_waits_for_ends_before_the_step_does() -> None:
    timeline = run([("compute", 1), ("start", "a", 3), ("compute", 1)])
    assert (timeline.step, timeline.exposed) == (4, 2)


def test_what_runs_beside_a_transfer_is_named_longest_first() -> None:
    timeline = run(
        [("compute", 9), ("start", "a", 3), ("compute", 1), ("compute", 5), ("done", "a")]
    )
    assert timeline.transfers[0].beside == (("copy.main.3", 5.0), ("copy.main.2", 1.0))


def test_a_loop_with_collectives_is_replayed_turn_by_turn() -> None:
    body = [("start", "a", 4), ("compute", 3), ("done", "a")]
    timeline = run([("compute", 1), ("loop", 3, body)])
    assert [t.event.start for t in timeline.transfers] == [1, 5, 9]
    assert (timeline.step, timeline.exposed) == (13, 3)


def test_a_transfer_can_run_beside_a_loop() -> None:
    timeline = run([("start", "a", 7), ("loop", 3, [("compute", 2)]), ("done", "a")])
    assert timeline.transfers[0].beside == (("loop.main.1", 6.0),)
    assert (timeline.compute, timeline.exposed) == (6, 1)


def test_launches_and_the_start_of_a_collective_take_time() -> None:
    links = NodeLinks(bandwidth=2.0, start_seconds=0.25)
    rates = replace(RATES, launch_seconds=0.5, links=links)
    timeline = simulate(parse(program([("compute", 1), ("sync", 2)])), rates, {})
    assert (timeline.compute, timeline.communication) == (1.5, 2.25)


def contended(ops: Sequence[Op], **changes: Any) -> Timeline:
    """With a collective that takes half of the memory's rate from the kernels beside it."""
    rates = replace(RATES, collective_traffic=2.0, launch_seconds=0.0, **changes)
    return simulate(parse(program(ops)), rates, {})


def test_a_transfer_slows_what_runs_beside_it() -> None:
    timeline = contended([("compute", 1), ("start", "a", 3), ("compute", 5), ("done", "a")])
    # In the 3 seconds of the transfer 1.5 of the 5 are done.
    assert (timeline.compute, timeline.contention, timeline.step) == (7.5, 1.5, 7.5)
    assert timeline.exposed == 0


def test_several_transfers_and_the_gaps_between_them() -> None:
    timeline = contended(
        [("start", "a", 2), ("start", "b", 2), ("compute", 3), ("done", "a"), ("done", "b"),
         ("compute", 2), ("start", "c", 2), ("compute", 1), ("done", "c")]
    )  # fmt: skip
    assert timeline.contention == 2 + 1
    assert (timeline.compute, timeline.exposed) == (6 + 3, 0)


def test_starting_kernels_is_not_slowed() -> None:
    timeline = contended([("start", "a", 8), ("compute", 2), ("done", "a")])
    assert timeline.contention == 2
    rates = replace(RATES, collective_traffic=2.0, launch_seconds=3.0)
    ops = [("start", "a", 8), ("compute", 2), ("done", "a")]
    timeline = simulate(parse(program(ops)), rates, {})
    assert (timeline.contention, timeline.compute) == (2, 7)


def test_nothing_is_slower_beside_a_transfer_that_is_waited_for() -> None:
    assert (
        contended([("sync", 4), ("compute", 4), ("start", "a", 4), ("done", "a")]).contention == 0
    )


def test_a_call_with_a_collective_is_followed_into() -> None:
    called = f"""%inner (q: f32[4]) -> f32[4] {{
  %q = f32[4]{{0}} parameter(0)
  ROOT %sync = f32[4]{{0}} all-to-all(%q), {GROUPS}
}}

"""
    entry = "  %p = f32[4]{0} parameter(0)\n  ROOT %c = f32[4]{0} call(%p), to_apply=%inner"
    assert run_text(module(entry, called)).exposed == 4


BRANCHES = """%cheap (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %copy.1 = f32[4]{0} copy(%q)
}

%dear (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  %copy.2 = f32[4]{0} copy(%r)
  ROOT %copy.3 = f32[4]{0} copy(%copy.2)
}

"""


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%cheap, %dear}",
        "true_computation=%dear, false_computation=%cheap",
    ],
)
def test_of_a_conditional_the_dearest_branch_counts(branches: str) -> None:
    entry = f"""  %p = f32[4]{{0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[4]{{0}} conditional(%i, %p, %p), {branches}"""
    assert run_text(module(entry, BRANCHES)).compute == 8


def data_dependent_loops(inner_scope: str = "inner/") -> str:
    loops = f"""%inner (q: (s32[])) -> (s32[]) {{
  %x = f32[2]{{0}} parameter(1)
  %copy.1 = f32[2]{{0}} copy(%x)
  ROOT %q = (s32[]) parameter(0)
}}

%outer (r: (s32[])) -> (s32[]) {{
  %r = (s32[]) parameter(0)
  ROOT %while.1 = (s32[]) while(%r), condition=%none, body=%inner, metadata={{op_name="jit(step)/key_blocks/while/body/{inner_scope}while"}}
}}

"""
    entry = """  %p = (s32[]) parameter(0)
  ROOT %while.2 = (s32[]) while(%p), condition=%none, body=%outer, metadata={op_name="jit(step)/key_blocks/while"}"""
    return module(entry, loops)


def test_scopes_of_a_backward_pass_are_in_parentheses() -> None:
    turns = {"key_blocks": 5, "inner": 2.5}
    plain = run_text(data_dependent_loops(), trip_counts=turns)
    backward = run_text(data_dependent_loops("transpose(jvp(inner))/"), trip_counts=turns)
    assert backward.compute == plain.compute > 0
    assert not backward.assumed_loops


def test_turns_that_depend_on_data_are_given_by_scope() -> None:
    timeline = run_text(data_dependent_loops(), trip_counts={"key_blocks": 5, "inner": 2.5})
    assert timeline.step == 5 * 2.5 * 2
    assert timeline.assumed_loops == {}


def test_the_scope_of_a_loop_is_not_that_of_the_loops_in_it() -> None:
    timeline = run_text(data_dependent_loops(inner_scope=""), trip_counts={"key_blocks": 5})
    assert timeline.step == 5 * 2
    assert timeline.assumed_loops == {"while.1": 1}


def test_a_part_of_a_scope_name_is_no_scope() -> None:
    timeline = run_text(data_dependent_loops(), trip_counts={"key": 5, "inner": 2})
    assert timeline.step == 2 * 2
    assert list(timeline.assumed_loops) == ["while.2"]


def test_negative_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="'inner' must not be negative, got -1"):
        run_text(data_dependent_loops(), trip_counts={"inner": -1})


def test_a_module_without_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="jit_step is not scheduled"):
        run_text(program([]).replace("is_scheduled=true, ", ""))


def test_the_work_of_a_kernel_can_be_given() -> None:
    entry = """  %p = f32[8]{0} parameter(0)
  ROOT %k = f32[8]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/paged/pallas_call"}"""
    assert run_text(module(entry)).step == 8
    timeline = run_text(module(entry), kernels={"paged": Work(7.0, 24.0, 1.0)})
    assert (timeline.step, timeline.flops, timeline.bytes) == (3, 7, 24)


# --- What a collective looks like on each platform ----------------------------------------------


def test_gpu_marks_a_synchronous_pair() -> None:
    entry = f"""  %p = f32[4]{{0}} parameter(0)
  %s = f32[4]{{0}} all-reduce-start(%p), {GROUPS}, to_apply=%add, backend_config={{"collective_backend_config":{{"is_sync":true}}}}
  %copy = f32[4]{{0}} copy(%p)
  ROOT %d = f32[4]{{0}} all-reduce-done(%s)"""
    timeline = run_text(module(entry))
    assert (timeline.exposed, timeline.hidden) == (8, 0)
    assert timeline.transfers[0].synchronous


def test_an_async_wrapper_around_a_collective() -> None:
    wrapped = f"""%wrapped (q: f32[6]) -> f32[6] {{
  %q = f32[6]{{0}} parameter(0)
  ROOT %inner = f32[6]{{0}} all-to-all(%q), {GROUPS}
}}

"""
    entry = """  %p = f32[6]{0} parameter(0)
  %s = ((f32[6]{0}), f32[6]{0}, u32[]) async-start(%p), calls=%wrapped
  %copy = f32[2]{0} copy(%p2)
  %u = ((f32[6]{0}), f32[6]{0}, u32[]) async-update(%s)
  ROOT %d = f32[6]{0} async-done(%u)
  %p2 = f32[2]{0} parameter(1)"""
    timeline = run_text(module(entry, wrapped))
    assert [(t.event.name, t.event.kind) for t in timeline.transfers] == [("s", "all-to-all")]
    assert (timeline.communication, timeline.compute, timeline.exposed) == (6, 2, 4)


def test_a_group_of_collectives_is_one_transfer() -> None:
    wrapped = f"""%wrapped (q: f32[6], r: f32[4]) -> (f32[6], f32[4]) {{
  %q = f32[6]{{0}} parameter(0)
  %r = f32[4]{{0}} parameter(1)
  %one = f32[6]{{0}} all-to-all(%q), {GROUPS}
  %two = f32[4]{{0}} all-to-all(%r), {GROUPS}
  ROOT %t = (f32[6]{{0}}, f32[4]{{0}}) tuple(%one, %two)
}}

"""
    entry = """  %p = f32[6]{0} parameter(0)
  %p2 = f32[4]{0} parameter(1)
  %s = ((f32[6]{0}, f32[4]{0}), (f32[6]{0}, f32[4]{0}), u32[]) async-start(%p, %p2), calls=%wrapped
  ROOT %d = (f32[6]{0}, f32[4]{0}) async-done(%s)"""
    assert [t.event.seconds for t in run_text(module(entry, wrapped)).transfers] == [10]


def test_a_chain_of_collectives_is_one_transfer() -> None:
    """XLA:GPU, of what is on a stream of its own: each has its bytes, its group and its start."""
    called = f"""%go (q: f32[6]) -> f32[12] {{
  %q = f32[6]{{0}} parameter(0)
  %s1 = ((f32[6]{{0}}), f32[6]{{0}}) all-to-all-start(%q), {GROUPS}
  %d1 = f32[6]{{0}} all-to-all-done(%s1)
  %s2 = (f32[6]{{0}}, f32[12]{{0}}) all-gather-start(%d1), {GROUPS}
  ROOT %d2 = f32[12]{{0}} all-gather-done(%s2)
}}

"""
    entry = """  %p = f32[6]{0} parameter(0)
  %s = ((f32[6]{0}), f32[12]{0}) call-start(%p), to_apply=%go
  %copy.4 = f32[4]{0} copy(%p)
  ROOT %d = f32[12]{0} call-done(%s)"""
    rates = replace(RATES, links=NodeLinks(bandwidth=2.0, start_seconds=1.0))
    timeline = simulate(parse(module(entry, called)), rates, {})
    (transfer,) = timeline.transfers
    # 12 bytes by all-to-all, 24 by all-gather, 2 bytes a second, a second to start each.
    assert (transfer.event.kind, transfer.event.seconds) == ("all-to-all+all-gather", 20)
    assert (transfer.bytes, transfer.waited) == (36, 16)


# As XLA:TPU (v5e) writes a transfer that goes on while a loop turns: its parts go through the
# loop's tuple, and a kernel of the loop moves it on.
ASYNC_PARTS = f"""%begin (s: f32[2]) -> (f32[2], f32[4], u32[]) {{
  %s = f32[2]{{0}} parameter(0)
  %ag.1 = f32[4]{{0}} all-gather(%s), {GROUPS}
  ROOT %cc.1 = (f32[2]{{0}}, f32[4]{{0}}, u32[]{{:S(2)}}) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}}

%on (a: f32[2], b: f32[4], c: u32[], x: f32[9]) -> (f32[9], f32[2], f32[4], u32[]) {{
  %a = f32[2]{{0}} parameter(0)
  %b = f32[4]{{0}} parameter(1)
  %c = u32[]{{:S(2)}} parameter(2)
  %x = f32[9]{{0}} parameter(3)
  %ag.2 = f32[4]{{0}} all-gather(%a), {GROUPS}
  %y = f32[9]{{0}} negate(%x)
  ROOT %all = (f32[9]{{0}}, f32[2]{{0}}, f32[4]{{0}}, u32[]{{:S(2)}}) tuple(%y, %a, %ag.2, %c)
}}

%end (e: f32[2], f: f32[4], g: u32[]) -> f32[4] {{
  %e = f32[2]{{0}} parameter(0)
  %f = f32[4]{{0}} parameter(1)
  %g = u32[]{{:S(2)}} parameter(2)
  %ag.3 = f32[4]{{0}} all-gather(%e), {GROUPS}
  ROOT %cc.2 = f32[4]{{0}} custom-call(%e, %f, %ag.3, %g), custom_call_target="AsyncCollectiveDone"
}}

"""
CARRIED = "(f32[9]{0}, f32[2]{0}, f32[4]{0}, u32[]{:S(2)})"
ELEMENTS = """  %x.1 = f32[9]{0} get-tuple-element(%q), index=0
  %a.1 = f32[2]{0} get-tuple-element(%q), index=1
  %b.1 = f32[4]{0} get-tuple-element(%q), index=2
  %c.1 = u32[]{:S(2)} get-tuple-element(%q), index=3"""
BEFORE = f"""  %p = f32[9]{{0}} parameter(0)
  %s.1 = f32[2]{{0}} parameter(1)
  %start = (f32[2]{{0}}, f32[4]{{0}}, u32[]{{:S(2)}}) fusion(%s.1), kind=kCustom, calls=%begin
  %a.2 = f32[2]{{0}} get-tuple-element(%start), index=0
  %b.2 = f32[4]{{0}} get-tuple-element(%start), index=1
  %c.2 = u32[]{{:S(2)}} get-tuple-element(%start), index=2
  %init = {CARRIED} tuple(%p, %a.2, %b.2, %c.2)
  %loop = {CARRIED} while(%init), condition=%none, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %a.3 = f32[2]{{0}} get-tuple-element(%loop), index=1
  %b.3 = f32[4]{{0}} get-tuple-element(%loop), index=2
  %c.3 = u32[]{{:S(2)}} get-tuple-element(%loop), index=3
  ROOT %done = f32[4]{{0}} fusion(%a.3, %b.3, %c.3), kind=kCustom, calls=%end"""


@pytest.mark.parametrize("moved_on", [True, False])
def test_a_transfer_goes_through_a_loop_once(moved_on: bool) -> None:
    turn = f"""  %z = {CARRIED} fusion(%a.1, %b.1, %c.1, %x.1), kind=kLoop, calls=%on
  %x.2 = f32[9]{{0}} get-tuple-element(%z), index=0
  %a.4 = f32[2]{{0}} get-tuple-element(%z), index=1
  %b.4 = f32[4]{{0}} get-tuple-element(%z), index=2
  %c.4 = u32[]{{:S(2)}} get-tuple-element(%z), index=3
  ROOT %r = {CARRIED} tuple(%x.2, %a.4, %b.4, %c.4)"""
    if not moved_on:  # handed through
        turn = f"""  %x.2 = f32[9]{{0}} negate(%x.1)
  ROOT %r = {CARRIED} tuple(%x.2, %a.1, %b.1, %c.1)"""
    body = (
        f"%body (q: f32[9]) -> f32[9] {{\n  %q = {CARRIED} parameter(0)\n{ELEMENTS}\n{turn}\n}}\n\n"
    )
    timeline = run_text(module(BEFORE, ASYNC_PARTS + body))
    (transfer,) = timeline.transfers
    assert (transfer.event.name, transfer.bytes) == ("start", 8)
    assert (timeline.communication, timeline.exposed) == (4, 0)
    assert timeline.compute == pytest.approx(3 * 9)


def test_a_turn_waits_for_what_the_turn_before_started() -> None:
    """As a loop over layers does that gathers the next layer's weights."""
    turn = f"""  %d.1 = f32[4]{{0}} fusion(%a.1, %b.1, %c.1), kind=kCustom, calls=%end
  %s.2 = f32[2]{{0}} bitcast(%d.1)
  %again = (f32[2]{{0}}, f32[4]{{0}}, u32[]{{:S(2)}}) fusion(%s.2), kind=kCustom, calls=%begin
  %x.2 = f32[9]{{0}} negate(%x.1)
  %a.4 = f32[2]{{0}} get-tuple-element(%again), index=0
  %b.4 = f32[4]{{0}} get-tuple-element(%again), index=1
  %c.4 = u32[]{{:S(2)}} get-tuple-element(%again), index=2
  ROOT %r = {CARRIED} tuple(%x.2, %a.4, %b.4, %c.4)"""
    body = (
        f"%body (q: f32[9]) -> f32[9] {{\n  %q = {CARRIED} parameter(0)\n{ELEMENTS}\n{turn}\n}}\n\n"
    )
    timeline = run_text(module(BEFORE, ASYNC_PARTS + body))
    assert [t.event.name for t in timeline.transfers] == ["start", "again", "again", "again"]
    assert timeline.compute == pytest.approx(3 * 9)
    # The first is waited for at once; each other one runs beside the 9 seconds of its turn.
    assert [t.waited for t in timeline.transfers] == [4, 0, 0, 0]


def test_a_transfer_goes_through_a_barrier_in_a_tuple() -> None:
    entry = f"""  %p = f32[4]{{0}} parameter(0)
  %q = f32[9]{{0}} parameter(1)
  %start = ((f32[4]{{0}}), f32[4]{{0}}) all-to-all-start(%p), {GROUPS}
  %both = (((f32[4]{{0}}), f32[4]{{0}}), f32[9]{{0}}) tuple(%start, %q)
  %held = (((f32[4]{{0}}), f32[4]{{0}}), f32[9]{{0}}) opt-barrier(%both)
  %r = f32[9]{{0}} get-tuple-element(%held), index=1
  %copy.1 = f32[9]{{0}} copy(%r)
  %running = ((f32[4]{{0}}), f32[4]{{0}}) get-tuple-element(%held), index=0
  %done = f32[4]{{0}} all-to-all-done(%running)
  ROOT %copy.2 = f32[4]{{0}} copy(%done)"""
    timeline = run_text(module(entry))
    (transfer,) = timeline.transfers
    assert transfer.beside == (("copy.1", 9.0),)  # and not what follows its done
    assert (timeline.compute, timeline.exposed) == (13, 0)


def test_an_end_without_a_start_is_an_error() -> None:
    entry = """  %p = f32[2]{0} parameter(0)
  %b.2 = f32[4]{0} parameter(1)
  %c.2 = u32[]{:S(2)} parameter(2)
  ROOT %done = f32[4]{0} fusion(%p, %b.2, %c.2), kind=kCustom, calls=%end"""
    with pytest.raises(ValueError, match="done in main ends what nothing started"):
        run_text(module(entry, ASYNC_PARTS))


def test_sparsecore_takes_the_operands_with_an_update() -> None:
    """tpu7x: the transfer begins where its operands are there."""
    wrapped = f"""%called (q: f32[6]) -> f32[6] {{
  %q = f32[6]{{0}} parameter(0)
  ROOT %inner = f32[6]{{0}} all-to-all(%q), {GROUPS}
}}, execution_thread="sparsecore"

%wrapped (r: f32[6]) -> f32[6] {{
  %r = f32[6]{{0}} parameter(0)
  ROOT %cc = f32[6]{{0}} custom-call(%r), custom_call_target="TODO", called_computations={{%called}}
}}, execution_thread="sparsecore"

"""
    entry = """  %p = f32[6]{0:T(128)} parameter(0)
  %s = ((), (), (s32[8192]{0:T(1024)}, s32[0]{0:S(2)})) async-start(), async_execution_thread="sparsecore", calls=%wrapped, metadata={op_name="jit(step)/psum"}
  %copy.1 = f32[6]{0:T(128)} copy(%p)
  %u = ((f32[6]{0:T(128)}), f32[6]{0:T(128)}, (s32[8192]{0:T(1024)})) async-update(%s, %copy.1)
  %copy.2 = f32[6]{0:T(128)} copy(%p)
  ROOT %d = f32[6]{0:T(128)} async-done(%u)"""
    timeline = run_text(module(entry, wrapped))
    (transfer,) = timeline.transfers
    assert (transfer.event.start, transfer.event.end, transfer.event.op_name) == (
        6,
        12,
        "jit(step)/psum",
    )
    assert (timeline.step, timeline.compute, timeline.exposed) == (12, 12, 0)


CONTINUATION = f"""%start (q: f32[2]) -> (f32[2], f32[2], u32[]) {{
  %q = f32[2]{{0}} parameter(0)
  %ag.1 = f32[4]{{0}} all-gather(%q), {GROUPS}
  ROOT %cc.1 = (f32[2]{{0}}, f32[4]{{0}}, u32[]{{:S(2)}}) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}}

%step (a: f32[2], b: f32[4], c: u32[], d: f32[3]) -> (f32[3], f32[2], f32[4], f32[4], u32[]) {{
  %a = f32[2]{{0}} parameter(0)
  %b = f32[4]{{0}} parameter(1)
  %c = u32[]{{:S(2)}} parameter(2)
  %d = f32[3]{{0}} parameter(3)
  %neg = f32[3]{{0}} negate(%d)
  %ag.2 = f32[4]{{0}} all-gather(%a), {GROUPS}
  ROOT %t = (f32[3]{{0}}, f32[2]{{0}}, f32[4]{{0}}, f32[4]{{0}}, u32[]{{:S(2)}}) tuple(%neg, %a, %b, %ag.2, %c)
}}

%done (e: f32[2], f: f32[4], g: u32[]) -> f32[4] {{
  %e = f32[2]{{0}} parameter(0)
  %f = f32[4]{{0}} parameter(1)
  %g = u32[]{{:S(2)}} parameter(2)
  %ag.3 = f32[4]{{0}} all-gather(%e), {GROUPS}
  ROOT %cc.2 = f32[4]{{0}} custom-call(%e, %f, %ag.3, %g), custom_call_target="AsyncCollectiveDone"
}}

%other_fused (h: f32[3]) -> f32[3] {{
  %h = f32[3]{{0}} parameter(0)
  ROOT %exchanged = f32[3]{{0}} all-to-all(%h), {GROUPS}
}}

"""


def test_v5e_moves_a_transfer_on_in_fusions_that_compute() -> None:
    entry = """  %p = f32[2]{0} parameter(0)
  %x = f32[3]{0} parameter(1)
  %s = (f32[2]{0}, f32[4]{0}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start
  %s.0 = f32[2]{0} get-tuple-element(%s), index=0
  %s.1 = f32[4]{0} get-tuple-element(%s), index=1
  %s.2 = u32[]{:S(2)} get-tuple-element(%s), index=2
  %f = (f32[3]{0}, f32[2]{0}, f32[4]{0}, f32[4]{0}, u32[]{:S(2)}) fusion(%s.0, %s.1, %s.2, %x), kind=kOutput, calls=%step
  %f.0 = f32[3]{0} get-tuple-element(%f), index=0
  %f.1 = f32[2]{0} get-tuple-element(%f), index=1
  %f.2 = f32[4]{0} get-tuple-element(%f), index=2
  %f.4 = u32[]{:S(2)} get-tuple-element(%f), index=4
  %other = f32[3]{0} fusion(%f.0), kind=kCustom, calls=%other_fused
  ROOT %d = f32[4]{0} fusion(%f.1, %f.2, %f.4), kind=kCustom, calls=%done"""
    timeline = run_text(module(entry, CONTINUATION))
    # The fusion reads and writes f32[3]; all of the gather is one transfer of f32[2]. What the
    # fusion computes is no part of the transfer: `other` is a collective of its own.
    assert [(t.event.name, t.event.seconds, t.waited) for t in timeline.transfers] == [
        ("s", 4, 1),
        ("other", 3, 3),
    ]
    assert (timeline.compute, timeline.step) == (3, 7)


# --- Against a clock --------------------------------------------------------------------------


def seconds_of_work() -> st.SearchStrategy[int]:
    return st.integers(1, 4)


@st.composite
def programs(draw: st.DrawFn, depth: int = 2) -> list[Op]:
    ops: list[Op] = []
    running: list[str] = []
    for number in range(draw(st.integers(1, 7))):
        kinds = ["compute", "start", "sync"] + ["done"] * bool(running) + ["loop"] * bool(depth)
        kind = draw(st.sampled_from(kinds))
        if kind == "start":
            running.append(f"t{number}")
            ops.append(("start", running[-1], draw(seconds_of_work())))
        elif kind == "done":
            ops.append(("done", running.pop(draw(st.integers(0, len(running) - 1)))))
        elif kind == "loop":
            ops.append(("loop", draw(st.integers(0, 3)), draw(programs(depth=depth - 1))))
        else:
            ops.append((kind, draw(seconds_of_work())))
    return ops


class Clock:
    """Runs a program second by second, and notes whom a second of standing still is owed to."""

    def __init__(self) -> None:
        self.now = 0
        self.queue: deque[list[Any]] = deque()  # transfer, seconds left
        self.stood: dict[str, int] = {}
        self.sent = 0

    def tick(self, standing: bool) -> None:
        self.now += 1
        if not self.queue:
            assert not standing
            return
        name = self.queue[0][0]
        self.stood[name] = self.stood.get(name, 0) + standing
        self.sent += 1
        self.queue[0][1] -= 1
        if not self.queue[0][1]:
            self.queue.popleft()

    def wait(self, name: str) -> None:
        while any(transfer == name for transfer, _ in self.queue):
            self.tick(standing=True)

    def run(self, ops: Sequence[Op], where: str) -> None:
        for number, op in enumerate(ops):
            name = f"{where}.{number}"
            match op:
                case ("compute", n):
                    for _ in range(n):
                        self.tick(standing=False)
                case ("sync", n):
                    self.queue.append([f"sync.{name}", n])
                    self.wait(f"sync.{name}")
                case ("start", start, n):
                    self.wait(f"{start}.{where}")
                    self.queue.append([f"{start}.{where}", n])
                case ("done", start):
                    self.wait(f"{start}.{where}")
                case ("loop", turns, body):
                    for _ in range(turns):
                        self.run(body, name)


@given(programs())
def test_agrees_with_a_clock(ops: list[Op]) -> None:
    clock = Clock()
    clock.run(ops, "main")
    while clock.queue:
        clock.tick(standing=True)
    timeline = run(ops)
    assert timeline.step == pytest.approx(clock.now)
    assert timeline.communication == pytest.approx(clock.sent)
    exposed: dict[str, float] = {}
    for transfer in timeline.transfers:
        assert -1e-9 <= transfer.waited <= transfer.event.seconds + 1e-9
        exposed[transfer.event.name] = exposed.get(transfer.event.name, 0.0) + transfer.waited
    assert exposed == pytest.approx(clock.stood)
    assert timeline.hidden + timeline.exposed == pytest.approx(timeline.communication)
    assert timeline.step == pytest.approx(timeline.compute + timeline.exposed)
    assert timeline.step >= max(timeline.compute, timeline.communication) - 1e-9


@given(programs())
def test_lanes_do_one_thing_at_a_time(ops: list[Op]) -> None:
    events = run(ops).events
    assert [e.start for e in events] == sorted(e.start for e in events)
    for lane in ("compute", "link"):
        mine = [e for e in events if e.lane == lane]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
