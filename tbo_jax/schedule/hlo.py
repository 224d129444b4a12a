"""Reader of the text of compiled HLO: computations, instructions, shapes, where they come from.

The order of the instructions of a scheduled module (`is_scheduled=true`) is the order in which the
device is given them. The grammar is that of `jax.stages.Compiled.as_text()`, jax 0.10 to 0.12, for
CPU, GPU and TPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

# Bits an element takes. Opaque things (tokens) take none.
_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": bits for bits in (16, 32, 64)},
}  # fmt: skip
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{$")
_END = re.compile(r"^\}(,|$)")  # of a computation; another bracket closes an attribute
_TABLE_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')


@dataclass(frozen=True)
class Array:
    """The type of one array: element type, dimensions, and the memory it is in (0 the main one)."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 4)
        return (self.elements * bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction. `arrays` are those of its result, flattened; `text` its attributes."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses
    text: str
    op_name: str = ""  # the JAX operation: jit(step)/shard_map/...
    source: str = ""  # file:line that made it
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    def attribute(self, key: str) -> str | None:
        """The value of `key=` as text, braces stripped."""
        match = re.search(rf"\b{key}=(?:\{{([^{{}}]*)\}}|%?([^\s,{{}}]+))", self.text)
        return None if match is None else (match[1] if match[1] is not None else match[2])

    def dims(self, key: str) -> tuple[int, ...]:
        """A list of numbers such as lhs_contracting_dims={1}."""
        value = self.attribute(key)
        return tuple(int(d) for d in value.split(",")) if value else ()

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs, a loop's body included, its condition left out."""
        names = [
            match[1] for match in re.finditer(r"\b(?:calls|body|to_apply)=%?([^\s,{}]+)", self.text)
        ]
        for key in ("branch_computations", "called_computations"):
            listed = self.attribute(key)
            names += [name.strip().lstrip("%") for name in listed.split(",")] if listed else []
        if self.opcode == "conditional" and not self.attribute("branch_computations"):
            pair = [self.attribute("true_computation"), self.attribute("false_computation")]
            names += [name for name in pair if name]
        return tuple(names)

    @property
    def target(self) -> str:
        """Name of the kernel of a custom call."""
        match = re.search(r'custom_call_target="([^"]*)"', self.text)
        return "" if match is None else match[1]

    @property
    def known_trip_count(self) -> int | None:
        """Turns of a loop, where XLA found them."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.text)
        return None if match is None else int(match[1])


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that one of these reads, in its order."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    name: str
    is_scheduled: bool
    computations: dict[str, Computation]
    entry: Computation
    aliased_parameters: frozenset[int] = field(default_factory=frozenset)  # updated in place
    donated_parameters: frozenset[int] = field(default_factory=frozenset)
    num_devices: int = 1  # that run it together

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction runs."""
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def walk(self, computation: Computation) -> Iterator[Instruction]:
        """All instructions of a computation and of those it calls."""
        for instruction in computation.instructions:
            yield instruction
            for called in self.called(instruction):
                yield from self.walk(called)


def parse(text: str) -> Module:
    """Read the text of a module.

    Raises:
        ValueError: it is none, or has no entry computation.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule "):
        raise ValueError(f"this is no HLO module: it begins with {text[:40]!r}")
    header = lines[0]
    frames = _Frames()
    computations: dict[str, Computation] = {}
    entry: str | None = None
    name: str | None = None
    body: list[str] = []
    for line in lines[1:]:
        if name is not None:
            if _END.match(line):
                read = (_instruction(one, frames) for one in body)
                computations[name] = Computation(name, tuple(one for one in read if one))
                name = None
            elif line.startswith("  ") or not body:
                body.append(line)
            else:  # attributes of a kernel may have lines of their own (splash attention's have)
                body[-1] += line
        elif match := _HEADER.match(line):
            name, body = match[2], []
            entry = name if match[1] else entry
        else:
            frames.read(line)
    if entry is None:
        raise ValueError(f"HLO module without an ENTRY computation: {header[:80]!r}")
    aliases = re.search(r"input_output_alias=\{(.*?)\}, \w+=", header + ", end=")
    aliased = {int(n) for n in re.findall(r": \((\d+), ", aliases[1])} if aliases else set()
    donors = re.search(r"buffer_donor=\{(.*?)\}, \w+=", header + ", end=")
    donated = {int(n) for n in re.findall(r"\((\d+), ", donors[1])} if donors else set()
    counts = re.findall(r", (?:num_partitions|replica_count)=(\d+)", header)
    return Module(
        name=header.split()[1].rstrip(","),
        is_scheduled="is_scheduled=true" in header,
        computations=computations,
        entry=computations[entry],
        aliased_parameters=frozenset(aliased),
        donated_parameters=frozenset(aliased | donated),
        num_devices=math.prod(map(int, counts)),
    )


class _Frames:
    """The tables FileNames, FunctionNames, FileLocations, StackFrames that precede a module."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, str]] = {}
        self._current: dict[int, str] = {}
        self.source = lru_cache(maxsize=None)(self._source)

    def read(self, line: str) -> None:
        if match := _TABLE_ROW.match(line):
            self._current[int(match[1])] = match[2] if match[2] is not None else match[3]
        elif line.strip().isalpha():
            self._current = self.tables.setdefault(line.strip(), {})

    def _source(self, frame_id: int) -> str:
        """file:line of a stack frame."""
        frame = self._row("StackFrames", frame_id)
        location = self._row("FileLocations", frame.get("file_location_id", 0))
        file = self.tables.get("FileNames", {}).get(location.get("file_name_id", 0), "")
        return f"{file}:{location.get('line', 0)}" if file else ""

    def _row(self, table: str, key: int) -> dict[str, int]:
        text = self.tables.get(table, {}).get(key, "")
        return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", text)}


def _instruction(line: str, frames: _Frames) -> Instruction | None:
    match = re.match(r"\s*(ROOT )?%?(\S+) = ", line)
    if match is None:
        return None
    end = _shape_end(line, match.end())
    arrays = tuple(_arrays(line[match.end() : end]))
    opened = line.index("(", end)
    closed = _matching(line, opened)
    inside = line[opened + 1 : closed]
    text = line[closed + 1 :]
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', text)
    return Instruction(
        name=match[2],
        opcode=line[end:opened].strip(),
        arrays=arrays,
        operands=tuple(re.findall(r"%([^\s,()]+)", inside)),
        literal=inside,
        text=text,
        op_name=op_name[1] if op_name else "",
        source=_source(text, frames),
        is_root=match[1] is not None,
    )


def _source(text: str, frames: _Frames) -> str:
    if match := re.search(r"stack_frame_id=(\d+)", text):
        return frames.source(int(match[1]))
    match = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', text)
    return f"{match[1]}:{match[2]}" if match else ""


def _shape_end(line: str, start: int) -> int:
    """Where the type that begins at `start` ends: a tuple in parentheses, or up to a space."""
    if line[start] == "(":
        return _matching(line, start) + 1
    return line.index(" ", start)


def _matching(line: str, opened: int) -> int:
    """Index of the parenthesis that closes the one at `opened`, strings skipped."""
    depth, quoted, index = 0, False, opened
    for index in range(opened, len(line)):
        char = line[index]
        if char == '"' and line[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and char == "(":
            depth += 1
        elif not quoted and char == ")":
            depth -= 1
            if not depth:
                return index
    return index


def _arrays(text: str) -> Iterator[Array]:
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        yield Array(dtype, sizes, int(space[1]) if space else 0)
