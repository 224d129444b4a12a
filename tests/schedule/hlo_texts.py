"""Texts of small scheduled modules, and rates that make their times whole numbers.

With `RATES`, `copy` of f32[n] takes n seconds, and an all-to-all of f32[n] between two devices n
seconds of the link. A program is a list of

    ("compute", n)   ("start", name, n)   ("done", name)   ("sync", n)   ("loop", turns, [...])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tbo_jax.schedule.links import NodeLinks
from tbo_jax.schedule.targets import Rates

RATES = Rates(
    matmul_flops=1e30,
    memory_bandwidth=8.0,
    launch_seconds=0.0,
    links=NodeLinks(bandwidth=2.0, start_seconds=0.0),
    collective_traffic=0.0,  # a transfer slows nothing beside it
)
HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=2\n\n"
GROUPS = "replica_groups={{0,1}}, dimensions={0}"
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""

Op = tuple[Any, ...]


def module(entry: str, computations: str = "", header: str = HEADER) -> str:
    """A module from the lines of its entry computation."""
    return f"{header}{computations}ENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"


def program(ops: Sequence[Op]) -> str:
    """A module in the style of XLA:GPU that runs a list of operations in this order."""
    computations: list[str] = []
    lines = ["  %p = f32[8]{0} parameter(0)", *_lines(ops, computations, "main")]
    return module("\n".join([*lines, "  ROOT %end = f32[8]{0} bitcast(%p)"]), "".join(computations))


def _lines(ops: Sequence[Op], computations: list[str], where: str) -> list[str]:
    lines = []
    for number, op in enumerate(ops):
        name = f"{where}.{number}"
        match op:
            case ("compute", n):
                lines.append(f"  %copy.{name} = f32[{n}]{{0}} copy(%x.{name})")
                lines.insert(0, f"  %x.{name} = f32[{n}]{{0}} parameter({number + 1})")
            case ("sync", n):
                lines.append(f"  %sync.{name} = f32[{n}]{{0}} all-to-all(%x.{name}), {GROUPS}")
                lines.insert(0, f"  %x.{name} = f32[{n}]{{0}} parameter({number + 1})")
            case ("start", start, n):
                lines.append(
                    f"  %{start}.{where} = ((f32[{n}]{{0}}), f32[{n}]{{0}}) "
                    f"all-to-all-start(%x.{name}), {GROUPS}, "
                    'backend_config={"collective_backend_config":{"is_sync":false}}'
                )
                lines.insert(0, f"  %x.{name} = f32[{n}]{{0}} parameter({number + 1})")
            case ("done", start):
                lines.append(f"  %done.{name} = f32[8]{{0}} all-to-all-done(%{start}.{where})")
            case ("loop", turns, body):
                inner = "\n".join(_lines(body, computations, name))
                computations.append(
                    f"%body.{name} (q: (s32[])) -> (s32[]) {{\n{inner}\n"
                    f"  ROOT %q.{name} = (s32[]) parameter(0)\n}}\n\n"
                )
                lines.append(
                    f"  %loop.{name} = (s32[]) while(%init), condition=%none, body=%body.{name}, "
                    f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
                )
    return lines
