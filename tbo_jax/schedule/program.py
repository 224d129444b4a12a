"""A scheduled module as a program for two lanes: the steps of each computation, and their prices.

What starts a collective, hands it on and waits for it looks different on each platform:

- GPU, and TPU: `all-to-all-start` and `all-to-all-done`, or `async-start` and `async-done` around a
  computation. XLA:GPU writes a synchronous one so too, with `"is_sync":true`.
- GPU, of several in a chain: `call-start` and `call-done` around a computation with all of them.
- TPU with SparseCores: an `async-start` without operands, which come with an `async-update`.
- TPU v5e: a fusion that calls AsyncCollectiveStart, fusions that compute and move the transfer on,
  and one that calls AsyncCollectiveDone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from tbo_jax.schedule import cost
from tbo_jax.schedule.hlo import Computation, Instruction, Module
from tbo_jax.schedule.loops import trip_count
from tbo_jax.schedule.scopes import find_scope
from tbo_jax.schedule.targets import Rates

Role = Literal["compute", "loop", "issue", "wait", "synchronous"]
_LOOPS = frozenset(["while", "call", "conditional"])
# They hand a running collective on.
_CARRIERS = frozenset(["async-update", "get-tuple-element", "tuple", "bitcast", "opt-barrier"])


class Program:
    """Steps and prices of a module on a device with these rates."""

    def __init__(
        self,
        module: Module,
        rates: Rates,
        trip_counts: Mapping[str, float],
        kernels: Mapping[str, cost.Work],
        ragged_rows: float | None = None,
    ):
        for part, turns in trip_counts.items():
            if turns < 0:
                raise ValueError(f"turns of loop {part!r} must not be negative, got {turns}")
        self.module = module
        self.rates = rates
        self.trip_counts = trip_counts
        self.kernels = kernels
        self.ragged_rows = ragged_rows
        self.assumed_loops: dict[str, float] = {}
        self.steps = lru_cache(maxsize=None)(self._steps)
        self.price = lru_cache(maxsize=None)(self._price)

    def _steps(self, computation_name: str) -> list[tuple[Role, str]]:
        """What to do for each instruction of a computation: for itself, or for a collective."""
        computation = self.module.computations[computation_name]
        steps: list[tuple[Role, str]] = []
        starts: dict[str, str] = {}  # values that stand for a running collective, and its start
        for instruction in computation.instructions:
            name, opcode = instruction.name, instruction.opcode
            kind = cost.collective_kind(self.module, instruction)
            start = next((starts[o] for o in instruction.operands if o in starts), None)
            if kind is not None and cost.starts_collective(self.module, instruction):
                starts[name] = name
                if instruction.operands:  # else they come with the async-update (SparseCore)
                    steps.append(("issue", name))
            elif start is not None and cost.ends_collective(self.module, instruction):
                steps.append(("wait", start))
            elif start is not None and self._carries(computation, instruction, kind):
                starts[name] = start
                if opcode == "async-update" and not computation.by_name[start].operands:
                    steps.append(("issue", start))
                elif opcode == "fusion":  # a kernel that moves the transfer on while it computes
                    steps.append(("compute", name))
            elif kind is not None and not opcode.endswith("-done"):  # that was waited for already
                if opcode == "fusion" and self.price(computation_name, name)[1].flops:
                    steps.append(("compute", name))  # a product, and a transfer after it
                steps.append(("synchronous", name))
            elif opcode in _LOOPS and self._has_collective(instruction):
                steps.append(("loop", name))
            elif kind is None and opcode not in cost.FREE:
                steps.append(("compute", name))
        return steps

    def _carries(
        self, computation: Computation, instruction: Instruction, kind: str | None
    ) -> bool:
        """Whether what reads a running collective hands it on."""
        if instruction.opcode != "get-tuple-element":
            return instruction.opcode in _CARRIERS or (
                instruction.opcode == "fusion" and bool(kind)
            )
        made = computation.by_name[instruction.operands[0]]
        if made.opcode != "fusion":
            return True
        fused = self.module.called(made)[0]
        if fused.root.opcode != "tuple":
            return True
        element = fused.operands(fused.root)[int(instruction.attribute("index") or 0)]
        return element.opcode in ("parameter", *cost.COLLECTIVES)  # else what it computes

    def _price(self, computation_name: str, name: str) -> tuple[float, cost.Work]:
        """Modelled seconds and the work of an instruction, with all turns of the loops in it."""
        computation = self.module.computations[computation_name]
        instruction = computation.by_name[name]
        wraps = instruction.opcode.endswith("-start") and not cost.is_move(self.module, instruction)
        if instruction.opcode in _LOOPS or (wraps and self.module.called(instruction)):
            turns = self.turns(computation, instruction)
            seconds, work = 0.0, cost.Work()
            for called in self.taken(instruction):
                spent, done = self._total(called)
                seconds, work = seconds + spent * turns, work + done * turns
            return seconds, work
        work = self._kernel(instruction) or cost.work(self.module, computation, instruction)
        return work.seconds(self.rates), work

    def _kernel(self, instruction: Instruction) -> cost.Work | None:
        """The work that was given for a custom call."""
        if instruction.opcode != "custom-call":
            return None
        parts = instruction.op_name.split("/")
        return next((work for name, work in self.kernels.items() if name in parts), None)

    def _total(self, computation: Computation) -> tuple[float, cost.Work]:
        seconds, total = 0.0, cost.Work()
        for role, name in self.steps(computation.name):
            if role in ("compute", "loop"):
                spent, work = self.price(computation.name, name)
                seconds, total = seconds + spent, total + work
            elif role != "wait":
                seconds += self.transfer(computation, computation.by_name[name])[2]
        return seconds, total

    def taken(self, instruction: Instruction) -> list[Computation]:
        """The computations that run: of a conditional the dearest branch."""
        called = self.module.called(instruction)
        if instruction.opcode == "conditional":
            return [max(called, key=lambda branch: self._total(branch)[0])]
        return called

    def turns(self, computation: Computation, instruction: Instruction) -> float:
        """How often an instruction runs what it calls."""
        if instruction.opcode != "while":
            return 1
        known = trip_count(self.module, computation, instruction)
        if known is not None:
            return known
        # Its own scopes only: those of a loop around it are that one's.
        scopes = re.split(r"/while/(?:body|cond)/", instruction.op_name)[-1]
        for part, turns in self.trip_counts.items():
            # In a backward pass a scope is in parentheses: jvp(expert_blocks_64).
            if re.search(rf"(?:^|[/(]){re.escape(part)}\)*(?:/|$)", scopes):
                return turns
        self.assumed_loops[instruction.name] = 1
        return 1

    def op_name(self, computation: Computation, instruction: Instruction) -> str:
        """Where an instruction comes from; a collective without a stage, where its operands do.

        XLA:GPU forgets it of a ragged all-to-all that it rewrites. The second operand is the buffer
        that is written to, made where the exchange is called; others may come from stages before.
        """
        own = instruction.op_name
        if find_scope(own) or cost.collective_kind(self.module, instruction) is None:
            return own
        operands = computation.operands(instruction)
        names = [operand.op_name for operand in (*operands[1:], *operands[:1])]
        return next((name for name in names if find_scope(name)), own)

    def _has_collective(self, instruction: Instruction) -> bool:
        return any(
            cost.collective_kind(self.module, inner) is not None
            for called in self.module.called(instruction)
            for inner in self.module.walk(called)
        )

    def transfer(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[str, float, float]:
        """Kind, bytes and seconds of a collective, or of a group of them."""
        inner = cost.collectives(self.module, computation, instruction)
        kind = cost.collective_kind(self.module, instruction) or ""
        # A call of several is a chain; any other group is started, and runs, as one.
        chain = instruction.opcode == "call-start"
        devices = self.module.num_devices
        sent = seconds = startup = 0.0
        for home, one in inner:
            groups = cost.groups(one, devices)
            base = cost.collective_kind(self.module, one) or ""
            away = cost.link_bytes(base, one, home.operands(one), devices, self.ragged_rows)
            sent += away
            # As slow as the slowest: a ring over nodes has hops within and between them.
            seconds += max(self.rates.link_seconds(away, group) for group in groups)
            if any(len(group) > 1 for group in groups):
                startup = self.rates.collective_seconds + (startup if chain else 0.0)
        return kind, sent, seconds + startup
