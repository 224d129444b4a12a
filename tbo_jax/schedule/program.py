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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tbo_jax.schedule import cost
from tbo_jax.schedule.hlo import Computation, Instruction, Module
from tbo_jax.schedule.links import Groups
from tbo_jax.schedule.loops import trip_count
from tbo_jax.schedule.scopes import find_scope
from tbo_jax.schedule.targets import Rates

Role = Literal["compute", "loop", "issue", "wait", "synchronous"]
Start = tuple[str, str]  # of a collective: the computation and the instruction
Running = tuple[tuple[int, Start], ...]  # elements of a tuple that stand for running collectives


@dataclass(frozen=True)
class Step:
    """What to do for an instruction."""

    role: Role
    computation: str
    name: str  # of the instruction; of a wait, of that which started the collective
    at: str  # the instruction where it is done, such as the end of the collective
    carried: Running = ()  # of a loop: the running collectives that it is given

    @property
    def start(self) -> Start:
        """Of the collective that it is about."""
        return self.computation, self.name


_LOOPS = frozenset(["while", "call", "conditional"])
# They hand a running collective on.
_CARRIERS = frozenset(["async-update", "get-tuple-element", "bitcast", "opt-barrier"])


class Program:
    """Steps and prices of a module on a device with these rates."""

    def __init__(
        self,
        module: Module,
        rates: Rates,
        trip_counts: Mapping[str, float],
        kernels: Mapping[str, cost.Work],
        ragged_rows: float | None = None,
        device_ids: Sequence[int] | None = None,
    ):
        """Take a module and its prices.

        Args:
            module: scheduled HLO.
            rates: of a device.
            trip_counts: turns of loops that depend on data, by a part of their name scope.
            kernels: work of custom calls by the name of the kernel.
            ragged_rows: rows that a device sends to others in a ragged exchange; default all.
            device_ids: the devices, in the order in which the program numbers them; default that of
                the machine.

        Raises:
            ValueError: negative turns.
        """
        for part, turns in trip_counts.items():
            if turns < 0:
                raise ValueError(f"turns of loop {part!r} must not be negative, got {turns}")
        self.module = module
        self.rates = rates
        self.trip_counts = trip_counts
        self.kernels = kernels
        self.ragged_rows = ragged_rows
        self.device_ids = device_ids
        self.assumed_loops: dict[str, float] = {}
        self.not_priced: dict[str, str] = {}  # instruction: what of it is not
        self.steps = lru_cache(maxsize=None)(self._steps)
        self.price = lru_cache(maxsize=None)(self._price)

    def _steps(self, computation_name: str, carried: Running = ()) -> tuple[list[Step], Running]:
        """What to do for each instruction of a computation: for itself, or for a collective.

        XLA:TPU starts a collective before a loop, moves it on in the loop's turns, and waits for it
        after, or in the next turn. So a tuple says which of its elements are running.

        Args:
            computation_name: of the body of a loop, or another one.
            carried: the elements of its parameter that stand for a running collective.

        Returns:
            The steps, and the elements of its result that stand for a running collective.

        Raises:
            ValueError: a collective is waited for, and nothing started it.
        """
        computation = self.module.computations[computation_name]
        steps: list[Step] = []
        starts: dict[str, Start] = {}  # values that stand for a running collective, and its start
        tuples: dict[str, dict[int, Start]] = {}  # those with such elements
        for instruction in computation.instructions:
            name, opcode = instruction.name, instruction.opcode
            kind = cost.collective_kind(self.module, instruction)
            start = next((starts[o] for o in instruction.operands if o in starts), None)
            if kind is not None and cost.starts_collective(self.module, instruction):
                starts[name] = (computation_name, name)
                if instruction.operands:  # else they come with the async-update (SparseCore)
                    steps.append(Step("issue", computation_name, name, name))
            elif start is not None and cost.ends_collective(self.module, instruction):
                steps.append(Step("wait", *start, name))
            elif opcode == "parameter" and carried:
                tuples[name] = dict(carried)
            elif opcode == "tuple":
                tuples[name] = {
                    index: starts[o] for index, o in enumerate(instruction.operands) if o in starts
                }
            elif opcode == "opt-barrier" and instruction.operands[0] in tuples:
                tuples[name] = tuples[instruction.operands[0]]
            elif opcode == "get-tuple-element" and instruction.operands[0] in tuples:
                index = int(instruction.attribute("index") or 0)
                if index in tuples[instruction.operands[0]]:
                    starts[name] = tuples[instruction.operands[0]][index]
            elif start is not None and self._carries(computation, instruction, kind):
                starts[name] = start
                if opcode == "async-update" and not self.instruction(start).operands:
                    steps.append(Step("issue", *start, name))
                elif opcode == "fusion":  # a kernel that moves the transfer on while it computes
                    steps.append(Step("compute", computation_name, name, name))
            elif kind is not None and not opcode.endswith("-done"):  # that was waited for already
                if cost.ends_collective(self.module, instruction):
                    raise ValueError(f"{name} in {computation_name} ends what nothing started")
                if opcode == "fusion" and self.price(computation_name, name)[1].flops:
                    steps.append(
                        Step("compute", computation_name, name, name)
                    )  # a transfer after it
                steps.append(Step("synchronous", computation_name, name, name))
            elif opcode in _LOOPS and self._has_collective(instruction):
                given = tuple(sorted(tuples.get(next(iter(instruction.operands), ""), {}).items()))
                steps.append(Step("loop", computation_name, name, name, given))
                tuples[name] = dict(self._after(computation, instruction, given))
            elif kind is None and opcode not in cost.FREE:
                steps.append(Step("compute", computation_name, name, name))
                if opcode == "while":  # it hands on what it is given
                    tuples[name] = tuples.get(instruction.operands[0], {})
        return steps, tuple(sorted(tuples.get(computation.root.name, {}).items()))

    def _after(self, computation: Computation, loop: Instruction, carried: Running) -> Running:
        """What is running after a loop with collectives that was given this."""
        if loop.opcode != "while":
            return ()
        (body,) = self.taken(loop)
        for _ in range(min(2, round(self.turns(computation, loop)))):  # then each turn is alike
            carried = self.steps(body.name, carried)[1]
        return carried

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

    def instruction(self, start: Start) -> Instruction:
        """The instruction of a name in a computation."""
        computation, name = start
        return self.module.computations[computation].by_name[name]

    def _price(self, computation_name: str, name: str) -> tuple[float, cost.Work]:
        """Modelled seconds and the work of an instruction, with all turns of the loops in it."""
        computation = self.module.computations[computation_name]
        instruction = computation.by_name[name]
        wraps = instruction.opcode.endswith("-start") and not cost.is_move(self.module, instruction)
        if instruction.opcode in _LOOPS or (wraps and self.module.called(instruction)):
            return self._turned(computation, instruction, ())
        work = self._kernel(instruction)
        if work is None:
            work = cost.work(self.module, computation, instruction)
            self._note_unpriced(instruction, work)
        return work.seconds(self.rates), work

    def _note_unpriced(self, instruction: Instruction, work: cost.Work) -> None:
        if (why := cost.unpriced(instruction)) is not None:
            self.not_priced[instruction.name] = why
        for dtype, _ in work.of_types:
            if self.rates.product_flops(dtype) is None:
                self.not_priced[instruction.name] = f"product of {dtype}: counted as of bfloat16"

    def _turned(
        self, computation: Computation, instruction: Instruction, carried: Running
    ) -> tuple[float, cost.Work]:
        """Seconds and work of all turns of what an instruction calls, transfers included."""
        turns = self.turns(computation, instruction)
        seconds, work = 0.0, cost.Work()
        for called in self.taken(instruction):
            spent, done = self._total(called, carried)
            seconds, work = seconds + spent * turns, work + done * turns
        return seconds, work

    def _kernel(self, instruction: Instruction) -> cost.Work | None:
        """The work that was given for a custom call."""
        if instruction.opcode != "custom-call":
            return None
        parts = instruction.op_name.split("/")
        return next((work for name, work in self.kernels.items() if name in parts), None)

    def _total(self, computation: Computation, carried: Running = ()) -> tuple[float, cost.Work]:
        seconds, total = 0.0, cost.Work()
        for step in self.steps(computation.name, carried)[0]:
            if step.role == "loop":
                loop = computation.by_name[step.name]
                spent, work = self._turned(computation, loop, step.carried)
                seconds, total = seconds + spent, total + work
            elif step.role == "compute":
                spent, work = self.price(computation.name, step.name)
                seconds, total = seconds + spent, total + work
            elif step.role != "wait":
                seconds += self.transfer(*step.start)[2]
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

    def transfer(self, computation_name: str, name: str) -> tuple[str, float, float]:
        """Kind, bytes and seconds of a collective, or of a group of them."""
        computation = self.module.computations[computation_name]
        instruction = computation.by_name[name]
        inner = cost.collectives(self.module, computation, instruction)
        kind = cost.collective_kind(self.module, instruction) or ""
        # A call of several is a chain; any other group is started, and runs, as one.
        chain = instruction.opcode == "call-start"
        devices = self.module.num_devices
        sent = seconds = startup = 0.0
        for home, one in inner:
            groups = self._of_machine(cost.groups(one, devices))
            base = cost.collective_kind(self.module, one) or ""
            away = cost.link_bytes(base, one, home.operands(one), devices, self.ragged_rows)
            sent += away
            seconds += self.rates.links.seconds(base, away, groups)
            started = self.rates.links.start(groups)
            startup = startup + started if chain else max(startup, started)
        return kind, sent, seconds + startup

    def _of_machine(self, groups: list[list[int]]) -> Groups:
        """Groups of the program's numbers as groups of the machine's devices."""
        numbers = self.device_ids
        return tuple(
            tuple(group if numbers is None else (numbers[device] for device in group))
            for group in groups
        )
