"""Turns of a loop, read from its condition where the compiler has not written them down.

XLA:TPU leaves `known_trip_count` out. Such a loop counts an element of its tuple up or down by a
constant, from a constant, until a comparison with a constant fails; each of these values can hide
behind copies, in fusions, or in an element that the loop hands through.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbo_jax.schedule.hlo import Computation, Instruction, Module

# The value of the first operand, in another place, type or shape.
_SAME = frozenset(["bitcast", "copy", "convert", "reshape", "copy-start", "copy-done"])
_PARTS = ("condition", "body")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


@dataclass(frozen=True)
class _Frame:
    """A computation; inside a fusion, with the values that its parameters stand for."""

    computation: Computation
    arguments: tuple[tuple[_Frame, str], ...] = ()


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Turns of a `while` of a computation; None if they depend on data."""
    if loop.known_trip_count is not None:
        return loop.known_trip_count
    condition, body = (module.computations.get(loop.attribute(k) or "") for k in _PARTS)
    if condition is None or body is None or not loop.operands:
        return None
    return _Loop(module, _Frame(computation), loop, _Frame(condition), _Frame(body)).turns()


@dataclass(frozen=True)
class _Loop:
    module: Module
    outside: _Frame
    loop: Instruction
    condition: _Frame
    body: _Frame

    def turns(self) -> int | None:
        frame, compare = self._origin(self.condition, self.condition.computation.root.name)
        direction = compare.attribute("direction")
        if compare.opcode != "compare" or direction not in _MIRRORED:
            return None
        counter, other = ((frame, name) for name in compare.operands)
        if self._element(*counter) is None or self._constant(*other) is None:
            counter, other, direction = other, counter, _MIRRORED[direction]
        element, limit = self._element(*counter), self._constant(*other)
        if element is None or limit is None:
            return None
        start, step = self._at_start(element), self._step(element)
        if start is None or not step:
            return None
        if direction in ("GT", "GE"):  # counts down
            start, limit, step = -start, -limit, -step
        limit += direction in ("LE", "GE")
        if start >= limit:
            return 0
        return -((start - limit) // step) if step > 0 else None

    def _at_start(self, element: int) -> int | None:
        """The value of an element of the tuple before the first turn."""
        frame, init = self._origin(self.outside, self.loop.operands[0])
        return self._number(frame, init.operands[element]) if init.opcode == "tuple" else None

    def _step(self, element: int) -> int | None:
        """What a turn adds to an element of the tuple."""
        made = self._after_turn(element)
        if made is None or made[1].opcode != "add":
            return None
        frame, add = made
        one, two = add.operands
        if self._element(frame, one) != element:
            one, two = two, one
        return self._constant(frame, two) if self._element(frame, one) == element else None

    def _after_turn(self, element: int) -> tuple[_Frame, Instruction] | None:
        frame, root = self._origin(self.body, self.body.computation.root.name)
        return self._origin(frame, root.operands[element]) if root.opcode == "tuple" else None

    def _constant(self, frame: _Frame, name: str) -> int | None:
        """A number: written there, or an element that the loop hands through unchanged."""
        element = self._element(frame, name)
        if element is None:
            return self._number(frame, name)
        made = self._after_turn(element)
        if made is None or self._element(made[0], made[1].name) != element:
            return None
        return self._at_start(element)

    def _number(self, frame: _Frame, name: str) -> int | None:
        _, origin = self._origin(frame, name)
        literal = origin.literal.strip()
        whole = origin.opcode == "constant" and literal.lstrip("-").isdigit()
        return int(literal) if whole else None

    def _element(self, frame: _Frame, name: str) -> int | None:
        """Which element of the loop's tuple a value is, in the condition or the body."""
        frame, origin = self._origin(frame, name)
        if origin.opcode != "get-tuple-element":
            return None
        frame, whole = self._origin(frame, origin.operands[0])
        inside = frame in (self.condition, self.body)
        return _index(origin) if inside and whole.opcode == "parameter" else None

    def _origin(self, frame: _Frame, name: str) -> tuple[_Frame, Instruction]:
        """What makes a value: through copies, tuples and fusions."""
        while True:
            instruction = frame.computation.by_name[name]
            if instruction.opcode in _SAME:
                name = instruction.operands[0]
            elif instruction.opcode == "fusion":
                arguments = tuple((frame, operand) for operand in instruction.operands)
                frame = _Frame(self.module.called(instruction)[0], arguments)
                name = frame.computation.root.name
            elif instruction.opcode == "parameter" and frame.arguments:
                frame, name = frame.arguments[int(instruction.literal)]
            elif instruction.opcode == "get-tuple-element":
                inner, whole = self._origin(frame, instruction.operands[0])
                if whole.opcode != "tuple":
                    return frame, instruction
                frame, name = inner, whole.operands[_index(instruction)]
            else:
                return frame, instruction


def _index(instruction: Instruction) -> int:
    """Of a get-tuple-element."""
    return int(instruction.attribute("index") or 0)
