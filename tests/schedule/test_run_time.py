from __future__ import annotations

import pytest

from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.run_time import run_time_notes
from tbo_jax.schedule.targets import find_target
from tests.schedule.hlo_texts import module


def ragged(groups: str) -> str:
    operands = ", ".join(f"%p{i}" for i in range(6))
    lines = [f"  %p{i} = s32[16]{{0}} parameter({i})" for i in range(6)]
    return module(
        "\n".join([*lines, f"  ROOT %r = s32[16]{{0}} ragged-all-to-all({operands}), "
                   f"replica_groups={groups}"]),
        header="HloModule jit_step, is_scheduled=true, num_partitions=16\n\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "target", "nodes", "device_ids", "note"),
    [
        ("[2,8]<=[16]", "h100x8", 2, None, "one-shot kernel"),
        ("[1,16]<=[16]", "h100x8", 2, None, "sizes to the host"),
        ("{{0,8},{1,9}}", "h100x8", 2, None, "sizes to the host"),
        # A mesh whose neighbours are on both nodes.
        ("{{0,1},{2,3}}", "h100x8", 2, [0, 8, 1, 9], "sizes to the host"),
        ("[1,16]<=[16]", "v5e:4x4", 1, None, None),
    ],
)
def test_ragged(
    groups: str, target: str, nodes: int, device_ids: list[int] | None, note: str | None
) -> None:
    found = run_time_notes(parse(ragged(groups)), find_target(target, nodes=nodes), device_ids)
    assert found == [] if note is None else note in "".join(found)


def test_other_programs_have_none() -> None:
    text = module("  ROOT %p = f32[8]{0} parameter(0)")
    assert run_time_notes(parse(text), find_target("h100x8")) == []
