"""What a compiled step does beside its work: copies, slices and gathers of what is large.

Every finding names the instruction and the source line that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tbo_jax.schedule.hlo import Array, Computation, Instruction, Module

LARGE = 1 << 20  # bytes; smaller arrays are not looked at

_RENAMES = frozenset(["bitcast", "reshape", "convert"])  # an array by another name


@dataclass(frozen=True)
class Finding:
    """Something large that a step does for nothing."""

    kind: str
    instruction: str
    bytes: int  # of one execution
    op_name: str  # the JAX operation it belongs to
    source: str  # file:line

    def __str__(self) -> str:
        where = self.source or self.op_name or "unknown place"
        return f"{self.kind}: {self.instruction}, {self.bytes / 1e6:.1f} MB, from {where}"


def audit(module: Module) -> list[Finding]:
    """Look through a compiled step.

    Parameters that are updated in place (aliased) count as the cache, other large ones of floating
    point as weights. A step with a backward pass has no cache: it updates weights in place. Found
    are: copies of either; slices of stacked weights that a loop materialises; pages gathered out of
    the cache; large arrays that are padded; and donated parameters that are not updated in place.
    """
    parameters = module.entry.parameters
    trains = any("transpose(jvp" in i.op_name for i in module.entry.instructions)
    cache: list[Array] = []
    weights: list[Array] = []
    for number, parameter in parameters.items():
        for array in parameter.arrays:
            if array.bytes >= LARGE:
                kept = number in module.aliased_parameters and not trains
                (cache if kept else weights).append(array)
    weights = [array for array in weights if array.dtype.startswith(("f", "bf"))]
    found = [
        _finding("donated, but not updated in place", parameters[number])
        for number in sorted(module.donated_parameters - module.aliased_parameters)
        if number in parameters
    ]
    for computation in _scheduled(module, module.entry):
        for instruction in computation.instructions:
            kind = _kind(module, computation, instruction, cache, weights)
            if kind is not None:
                found.append(_finding(kind, instruction))
    return found


def _finding(kind: str, instruction: Instruction) -> Finding:
    size = max((array.bytes for array in instruction.arrays), default=0)
    return Finding(kind, instruction.name, size, instruction.op_name, instruction.source)


def _scheduled(module: Module, computation: Computation) -> Iterator[Computation]:
    """The computations whose instructions are kernels, each once."""
    yield computation
    for instruction in computation.instructions:
        if instruction.opcode in ("while", "call", "conditional"):
            for called in module.called(instruction):
                yield from _scheduled(module, called)


def _kind(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    cache: list[Array],
    weights: list[Array],
) -> str | None:
    if max((array.bytes for array in instruction.arrays), default=0) < LARGE:
        return None
    for inside, made in _results(module, computation, instruction):
        result = max(made.arrays, key=lambda array: array.bytes, default=None)
        if result is None or result.bytes < LARGE:
            continue
        if made.opcode in ("copy", "transpose") or _leaves_fast_memory(made):
            if any(_same(result, array) for array in cache):
                return "copy of the cache"
            if any(_same(result, array) for array in weights):
                return "copy of a weight"
        if made.opcode in ("dynamic-slice", "slice") and any(
            _is_slice(result, array) for array in weights
        ):
            return "weight slice materialised"
        if made.opcode == "pad":
            return "padding of a large array"
        if made.opcode == "gather" and _from_cache(inside, made, cache):
            return "pages gathered out of the cache"
    for called in module.called(instruction) if instruction.opcode == "fusion" else []:
        if any(i.opcode == "gather" and _from_cache(called, i, cache) for i in called.instructions):
            return "pages gathered out of the cache"
    return None


def _results(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """What makes the results of an instruction: itself, or what a fusion ends in."""
    if instruction.opcode != "fusion":
        yield computation, instruction
        return
    for called in module.called(instruction):
        root = called.root
        for name in root.operands if root.opcode == "tuple" else (root.name,):
            yield called, _original(called, called.by_name[name])


def _original(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _RENAMES:
        instruction = computation.by_name[instruction.operands[0]]
    return instruction


def _leaves_fast_memory(instruction: Instruction) -> bool:
    """A copy-start into main memory; one into fast memory (TPU) is a prefetch."""
    return instruction.opcode == "copy-start" and instruction.arrays[0].memory_space == 0


def _same(array: Array, other: Array) -> bool:
    return array.dtype == other.dtype and sorted(array.dims) == sorted(other.dims)


def _is_slice(array: Array, stacked: Array) -> bool:
    dims = array.dims[1:] if array.dims[:1] == (1,) else array.dims
    return array.dtype == stacked.dtype and len(dims) > 1 and dims == stacked.dims[1:]


def _from_cache(computation: Computation, gather: Instruction, cache: list[Array]) -> bool:
    """Whether a gather takes from an array of the cache's size."""
    taken = computation.by_name[gather.operands[0]]
    taken = _original(computation, taken)
    return any(a.elements == held.elements and a.dtype == held.dtype
               for a in taken.arrays for held in cache)  # fmt: skip
