"""What each instruction of a step does on the device, by the name that a profile has for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tbo_jax.schedule.cost import collective_kind
from tbo_jax.schedule.hlo import Module
from tbo_jax.schedule.links import NodeLinks
from tbo_jax.schedule.program import Program, Running, Step
from tbo_jax.schedule.report import scope_of
from tbo_jax.schedule.targets import Rates

_CONTROL = frozenset(["while", "call", "conditional"])
# `Program` knows what starts and ends a collective, for which it needs no prices.
_UNPRICED = Rates(1.0, 1.0, 0.0, NodeLinks(bandwidth=1.0, start_seconds=0.0))


@dataclass(frozen=True)
class Known:
    """What an instruction of a step does on the device."""

    role: Literal["compute", "transfer", "done", "container"]
    name: str  # of the instruction; of a done, or inside of a collective, that of its start
    op_name: str = ""
    source: str = ""
    kind: str = ""  # of a collective: all-to-all, ...
    asynchronous: bool = False  # a transfer that a done waits for

    @property
    def scope(self) -> str:
        """layer_2/micro_batch_1/dispatch; "" outside of a layer."""
        return scope_of(self.op_name)


def known_instructions(module: Module) -> dict[str, Known]:
    """What each instruction that a device runs, or that a kernel may be named after, does."""
    program = Program(module, _UNPRICED, {}, {})
    known: dict[str, Known] = {}
    pending: list[tuple[str, Running]] = [(module.entry.name, ())]
    while pending:
        name, carried = pending.pop(0)
        for step in program.steps(name, carried)[0]:
            instruction = module.computations[name].by_name[step.at]
            if step.role == "loop" or instruction.opcode in _CONTROL:
                known[step.at] = Known("container", step.at)
                pending += [(called.name, step.carried) for called in module.called(instruction)]
                condition = instruction.attribute("condition") or ""
                pending += [(condition, ())] if condition in module.computations else []
                continue
            what = _known(program, step)
            known[step.at] = what
            if what.role == "transfer":
                # Of a transfer that begins with an update, the start; of others the same.
                known[step.name] = what
                for called in module.called(program.instruction(step.start)):
                    for inner in module.walk(called):  # a kernel may have the name of this
                        known.setdefault(inner.name, what)
    return known


def _known(program: Program, step: Step) -> Known:
    if step.role == "wait":
        return Known("done", step.name)
    module = program.module
    instruction = program.instruction(step.start)
    op_name = program.op_name(module.computations[step.computation], instruction)
    if step.role == "compute":
        return Known("compute", step.name, op_name, instruction.source)
    kind = collective_kind(module, instruction) or ""
    return Known("transfer", step.name, op_name, instruction.source, kind, step.role == "issue")
