"""Bytes of memory that a kernel reads and writes.

Elements are followed from the results back to the operands: a slice or a gather needs only what it
takes, whatever copies, conversions or inner fusions stand between it and the operand; an update in
place writes the update and needs nothing of the array that it updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tbo_jax.schedule.hlo import Computation, Instruction, Module

# An element of the result takes all of an operand, or many of its elements.
_MANY_TO_ONE = frozenset(
    [
        "reduce",
        "reduce-window",
        "dot",
        "scaled-dot",
        "ragged-dot",
        "convolution",
        "sort",
        "topk",
        "scatter",
        "select-and-scatter",
        "custom-call",
        "while",
        "call",
        "conditional",
        "map",
        "fft",
        "cholesky",
        "triangular-solve",
    ]
)
_UPDATES = frozenset(["dynamic-update-slice", "scatter"])
# An array by another name, layout or type, on the way to or from an update in place.
_SAME = frozenset(["bitcast", "copy", "convert", "reshape"])
COLLECTIVES = (
    "all-to-all", "ragged-all-to-all", "all-gather", "all-reduce", "reduce-scatter",
    "collective-permute", "collective-broadcast", "send",
)  # fmt: skip


def instruction_bytes(computation: Computation, instruction: Instruction) -> float:
    """Read and written by an instruction on its own that is neither a fusion nor a loop."""
    operands = computation.operands(instruction)
    if instruction.opcode in _UPDATES:  # XLA runs them in place: where it cannot it copies first
        _, updates, indices = _update(instruction, operands)
        return 2.0 * sum(u.bytes for u in updates) + sum(i.bytes for i in indices)
    needed = _needed(instruction, operands, _elements(instruction))
    return instruction.bytes + sum(elements * _width(operand) for operand, elements in needed)


def fusion_bytes(module: Module, fused: Computation) -> float:
    """Read and written by a kernel that runs a fused computation."""
    wanted: Counter[str] = Counter()
    written = 0.0
    root = fused.root
    for result in fused.operands(root) if root.opcode == "tuple" else (root,):
        if (update := _in_place(fused, result)) is not None:
            updates, indices = update
            written += sum(_elements(u) for u in updates) * _width(result)
            wanted.update({value.name: _elements(value) for value in (*updates, *indices)})
        elif not _handed_through(fused, result):
            written += result.bytes
            wanted[result.name] = _elements(result)
    read = _read(module, fused, wanted)
    return written + sum(_width(fused.parameters[n]) * elements for n, elements in read.items())


def _read(module: Module, fused: Computation, wanted: Mapping[str, int]) -> dict[int, int]:
    """Elements of each parameter that are needed for so many elements of other values."""
    totals = Counter(wanted)
    for instruction in reversed(fused.instructions):
        totals[instruction.name] = min(totals[instruction.name], _elements(instruction))
        elements = totals[instruction.name]
        if elements and instruction.opcode not in COLLECTIVES:  # what those read takes the link
            for operand, needed in _operands_needed(module, fused, instruction, elements):
                totals[operand.name] += needed
    return {number: totals[parameter.name] for number, parameter in fused.parameters.items()}


def _operands_needed(
    module: Module, fused: Computation, instruction: Instruction, elements: int
) -> Iterable[tuple[Instruction, int]]:
    operands = fused.operands(instruction)
    if instruction.opcode != "fusion":
        return _needed(instruction, operands, elements)
    inner = module.called(instruction)[0]
    wanted = {inner.root.name: elements}
    if inner.root.opcode == "tuple":
        wanted = {result.name: _elements(result) for result in inner.operands(inner.root)}
    return [(operands[number], needed) for number, needed in _read(module, inner, wanted).items()]


def _needed(
    instruction: Instruction, operands: Iterable[Instruction], elements: int
) -> Iterator[tuple[Instruction, int]]:
    """How many elements of each operand go into so many of the result."""
    for operand in operands:
        whole = instruction.opcode in _MANY_TO_ONE or len(operand.arrays) > 1
        yield operand, _elements(operand) if whole else min(elements, _elements(operand))


def _in_place(
    fused: Computation, result: Instruction
) -> tuple[list[Instruction], list[Instruction]] | None:
    """Updates and indices of a result that is an operand of the kernel, updated in place."""
    made = _original(fused, result)
    if made.opcode not in _UPDATES:
        return None
    arrays, updates, indices = _update(made, fused.operands(made))
    if any(_original(fused, array).opcode != "parameter" for array in arrays):
        return None  # made here, hence written whole
    return updates, indices


def _update(
    instruction: Instruction, operands: list[Instruction]
) -> tuple[list[Instruction], list[Instruction], list[Instruction]]:
    """Arrays, updates and indices of a dynamic-update-slice or a scatter."""
    if instruction.opcode == "dynamic-update-slice":
        return operands[:1], operands[1:2], operands[2:]
    count = len(operands) // 2  # arrays, indices, as many updates
    return operands[:count], operands[count + 1 :], operands[count : count + 1]


def _handed_through(fused: Computation, result: Instruction) -> bool:
    """An operand that comes out as it is, or what a collective left."""
    while result.opcode == "bitcast":
        result = fused.by_name[result.operands[0]]
    return result.opcode == "parameter" or result.opcode in COLLECTIVES


def _original(fused: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _SAME:
        instruction = fused.by_name[instruction.operands[0]]
    return instruction


def _elements(instruction: Instruction) -> int:
    return sum(array.elements for array in instruction.arrays)


def _width(instruction: Instruction) -> float:
    """Bytes of an element, the mean over the arrays of a tuple."""
    return instruction.bytes / max(1, _elements(instruction))
