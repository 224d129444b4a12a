"""What an instruction costs: floating-point operations, bytes of memory, bytes on the link.

A roofline, no more: a kernel takes the longer of its matrix products at the matrix units' rate and
its bytes at the memory's bandwidth. Bytes are counted as if every kernel read its operands from
main memory and wrote its result there, once (`traffic` says how much of each).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tbo_jax.schedule.hlo import Array, Computation, Instruction, Module
from tbo_jax.schedule.targets import Rates
from tbo_jax.schedule.traffic import COLLECTIVES, fusion_bytes, instruction_bytes

# Order, naming and bookkeeping: no kernel is started for these.
FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
        "domain",
        "recv",  # the other end of a send
    ]
)
# Custom calls that only say something to the compiler.
_FREE_TARGETS = frozenset(["AllocateBuffer", "ConcatBitcast", "Sharding"])
# Asynchronous, and of the memory alone.
_MOVES = frozenset(["copy", "slice", "dynamic-slice"])
# What can wrap a collective, or several in a group.
_WRAPPERS = frozenset(
    ["async-start", "async-update", "async-done", "call-start", "fusion", "custom-call"]
)
_PRODUCTS = frozenset(["dot", "scaled-dot", "ragged-dot"])
# What a custom call says of its operations.
_FLOPS = re.compile(r'"flops":"?(\d+)')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
# Their operations are neither products nor few.
_UNCOUNTED = frozenset(["fft", "cholesky", "triangular-solve"])


@dataclass(frozen=True)
class Work:
    """Amounts of work, to be added up."""

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    # Of `flops`, those of products of other types than bfloat16: ("f8", 1e9), ...
    of_types: tuple[tuple[str, float], ...] = ()

    def __add__(self, other: Work) -> Work:
        types: dict[str, float] = {}
        for dtype, flops in (*self.of_types, *other.of_types):
            types[dtype] = types.get(dtype, 0.0) + flops
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
            tuple(types.items()),
        )

    def __mul__(self, times: float) -> Work:
        types = tuple((dtype, flops * times) for dtype, flops in self.of_types)
        return Work(self.flops * times, self.bytes * times, self.kernels * times, types)

    def product_seconds(self, rates: Rates) -> float:
        """Time of the products alone; those of a type whose rate is not known count as bfloat16."""
        others = math.fsum(flops for _, flops in self.of_types)
        seconds = (self.flops - others) / rates.matmul_flops
        for dtype, flops in self.of_types:
            seconds += flops / (rates.product_flops(dtype) or rates.matmul_flops)
        return seconds

    def memory_seconds(self, rates: Rates) -> float:
        """Time of the bytes alone."""
        return self.bytes / rates.memory_bandwidth

    def seconds(self, rates: Rates) -> float:
        """Modelled time of one kernel with this work."""
        roofline = max(self.product_seconds(rates), self.memory_seconds(rates))
        return roofline + self.kernels * rates.launch_seconds

    def slowed(self, rates: Rates, link_rate: float) -> float:
        """How many times as long it takes beside a collective that sends at this rate."""
        products, memory = self.product_seconds(rates), self.memory_seconds(rates)
        if not max(products, memory):
            return 1.0
        matrix_share, memory_share = rates.beside(link_rate)
        return max(products / matrix_share, memory / memory_share) / max(products, memory)


def collective_kind(module: Module, instruction: Instruction) -> str | None:
    """all-to-all, ... of a collective, of its start or done, or of a wrapper around one.

    An `async-done` names no computation, and has no kind: it belongs to its operand.
    """
    base = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if base in COLLECTIVES:
        return base
    kinds = [base_opcode(inner) for _, inner in _wrapped(module, instruction)]
    return "+".join(dict.fromkeys(kinds)) or None


def base_opcode(instruction: Instruction) -> str:
    """all-to-all of an `all-to-all-start`."""
    return instruction.opcode.removesuffix("-start")


def collectives(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """The collectives that an instruction with a kind runs, and where their operands are."""
    return list(_wrapped(module, instruction)) or [(computation, instruction)]


def starts_collective(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction with a kind leaves its collective running."""
    if '"is_sync":true' in instruction.text:
        return False
    if instruction.opcode == "fusion":
        return _calls(module, instruction, "AsyncCollectiveStart")
    return instruction.opcode.endswith("-start") or instruction.opcode == "send"


def ends_collective(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction that reads a running collective waits for it."""
    if instruction.opcode == "fusion":
        return _calls(module, instruction, "AsyncCollectiveDone")
    return instruction.opcode.endswith("-done")


def _calls(module: Module, instruction: Instruction, target: str) -> bool:
    return any(i.target == target for c in module.called(instruction) for i in c.instructions)


def _wrapped(module: Module, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    for called in module.called(instruction) if instruction.opcode in _WRAPPERS else ():
        for inner in called.instructions:
            if base_opcode(inner) in COLLECTIVES:
                yield called, inner
            else:
                yield from _wrapped(module, inner)


def link_bytes(
    kind: str,
    instruction: Instruction,
    operands: list[Instruction],
    num_devices: int = 2,
    ragged_rows: float | None = None,
) -> float:
    """Bytes that a device sends in a collective over n devices: the ring and all-to-all bounds.

    Of a ragged exchange, whose sizes are data, `ragged_rows` rows; None: as if all were sent.
    """
    devices = len(groups(instruction, num_devices)[0])
    away = (devices - 1) / devices
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # the rest: where the result goes, offsets and sizes
        if ragged_rows is not None:
            (rows,) = operands[0].arrays
            return ragged_rows * rows.bytes / rows.dims[0]
    sent = sum(operand.bytes for operand in operands)
    if kind == "all-gather":
        return sent * (devices - 1)
    if kind == "all-reduce":
        return 2 * sent * away
    if kind in ("all-to-all", "ragged-all-to-all", "reduce-scatter"):
        return sent * away
    return sent


def groups(instruction: Instruction, num_devices: int = 2) -> list[list[int]]:
    """The groups of devices that a collective runs in; of a permutation the pairs it sends between.

    Raises:
        ValueError: XLA wrote them in a form that is not known here.
    """
    text = instruction.text
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", text):
        lists = re.findall(r"\{([\d,]+)\}", match[1])
        return [[int(device) for device in one.split(",")] for one in lists]
    # The iota form: numbers in the shape on the right, transposed, are groups of those on the left.
    iota = r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(iota, text):
        numbers = _iota(match[3], match[4])
        return numbers.reshape(int(match[1]), int(match[2])).tolist()
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", text):
        return _mesh_groups(*match.groups())
    if re.search(r"replica_groups=\{\}", text):
        return [list(range(num_devices))]
    if base_opcode(instruction) in ("send", "recv"):
        return [[0, 1]]  # from one to another
    if match := re.search(r"(?:replica_groups|source_target_pairs)=.*", text):
        raise ValueError(f"{instruction.name}: groups of a form that is not known: {match[0][:80]}")
    return [list(range(num_devices))]


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Numbers from 0 on in a shape "2,4", its axes in the order "1,0"."""
    dims = [int(size) for size in shape.split(",")]
    axes = [int(axis) for axis in order.split(",")] if order else list(range(len(dims)))
    return np.arange(math.prod(dims)).reshape(dims).transpose(axes)


def _mesh_groups(mesh: str, devices: str, over: str) -> list[list[int]]:
    """Groups of `mesh['a'=2,'b'=4] {'b'}`: along the axes in braces, for each place on the others.

    A part of an axis is 'b':(2)2: of the axis of 4, cut into 2 x 2, the second. Devices that do not
    stand in the order of their numbers are told between mesh and braces.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    numbers = np.arange(math.prod(sizes.values()))
    listed = re.fullmatch(r",? *device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?\)?,? *", devices)
    if listed:
        numbers = _iota(listed[1], listed[2]).reshape(-1)
    elif devices.strip():
        raise ValueError(f"replica_groups of a form that is not known: mesh[{mesh}]{devices}")
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", over)
    cuts = {}  # of each axis: sizes of its parts, and which of them is communicated over
    for name, before, size in parts:
        whole = sizes[name]
        first, middle = (int(before), int(size)) if size else (1, whole)
        cuts[name] = [first, middle, whole // (first * middle)]
    shape = [part for name, size in sizes.items() for part in cuts.get(name, [size])]
    starts = dict(
        zip(sizes, np.cumsum([0, *(len(cuts.get(name, [0])) for name in sizes)]), strict=False)
    )
    along = [int(starts[name]) + 1 for name, _, _ in parts]
    others = [axis for axis in range(len(shape)) if axis not in along]
    count = math.prod(shape[axis] for axis in along)
    return numbers.reshape(shape).transpose([*others, *along]).reshape(-1, count).tolist()


def work(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """The work of one instruction that is no loop and no collective.

    An asynchronous copy is charged at its start. Into or out of fast memory (TPU) it is free:
    whoever reads or makes the array is charged with it.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")):
        return Work()
    if opcode.removesuffix("-start") == "custom-call":
        return _custom_call(computation, instruction)
    if opcode.endswith("-start"):
        return _move(module, computation, instruction)
    if opcode == "fusion":
        called = module.called(instruction)[0]
        return _fused_products(module, called) + Work(0.0, fusion_bytes(module, called), 1)
    if opcode != "copy" and _is_scalar(computation, instruction):
        return Work()  # for TPU's scalar unit; on GPU there is a fusion around it, or a copy
    moved = Work(0.0, instruction_bytes(computation, instruction), 1)
    return product(computation, instruction) + moved


def _is_scalar(computation: Computation, instruction: Instruction) -> bool:
    touched = (instruction, *computation.operands(instruction))
    return all(array.elements == 1 for i in touched for array in i.arrays)


def is_move(module: Module, instruction: Instruction) -> bool:
    """Whether it starts a copy, or a slice, that runs beside other work."""
    if instruction.opcode == "async-start":
        return any(called.root.opcode in _MOVES for called in module.called(instruction))
    return instruction.opcode.endswith("-start") and (
        instruction.opcode.removesuffix("-start") in _MOVES
    )


def _move(module: Module, computation: Computation, start: Instruction) -> Work:
    if not is_move(module, start):
        return Work()
    sources = [array for operand in computation.operands(start) for array in operand.arrays]
    if start.opcode == "async-start":
        result = module.called(start)[0].root.arrays[0]
    else:  # result, source, ...; a slice has its operands first
        result = start.arrays[0 if start.opcode == "copy-start" else len(start.operands)]
    in_main = all(array.memory_space == 0 for array in (*sources[:1], result))
    return Work(bytes=2.0 * result.bytes, kernels=1) if in_main else Work()


def _custom_call(computation: Computation, instruction: Instruction) -> Work:
    if instruction.target in _FREE_TARGETS:
        return Work()
    operands = computation.operands(instruction)
    given = re.search(r'"bytes_accessed":"?(\d+)', instruction.text)
    if given:
        traffic = float(given[1])
    else:
        traffic = float(sum(array.bytes for array in _results(instruction)))
        traffic += sum(operand.bytes for operand in operands)
    return _custom_product(instruction, operands) + Work(0.0, traffic, 1)


def _results(instruction: Instruction) -> tuple[Array, ...]:
    """Without the scratch memory that the kernels of cuBLAS and cuDNN hand out last."""
    arrays = instruction.arrays
    scratch = len(arrays) > 1 and arrays[-1].dtype in ("s8", "u8")
    return arrays[:-1] if scratch and instruction.target.startswith("__cu") else arrays


def _custom_product(instruction: Instruction, operands: list[Instruction]) -> Work:
    """A matrix product of a library, or what the kernel's own cost estimate says."""
    if given := _FLOPS.search(instruction.text):
        return Work(float(given[1]))
    contracted = _CONTRACTED.search(instruction.text)
    if contracted and operands and operands[0].arrays:
        dims = operands[0].arrays[0].dims
        axes = [int(d) for d in re.findall(r"\d+", contracted[1])]
        flops = 2.0 * instruction.arrays[0].elements * math.prod(dims[a] for a in axes)
        return _of_type(flops, product_type(instruction, operands))
    return Work()


def unpriced(instruction: Instruction) -> str | None:
    """Why operations of an instruction are not counted; None if they are, or there are none.

    Its bytes are: a custom call is never free.
    """
    if instruction.opcode in _UNCOUNTED:
        return f"{instruction.opcode}: its bytes are counted, its operations are not"
    custom = instruction.opcode.removesuffix("-start") == "custom-call"
    if not custom or instruction.target in _FREE_TARGETS:
        return None
    if _FLOPS.search(instruction.text) or _CONTRACTED.search(instruction.text):
        return None
    return f"custom call {instruction.target}: its bytes are counted, its operations are not"


def product(computation: Computation, instruction: Instruction) -> Work:
    """The operations of a matrix product, by the type that they are done in; none of others."""
    flops = matmul_flops(computation, instruction)
    if not flops:
        return Work()
    return _of_type(flops, product_type(instruction, computation.operands(instruction)))


def _of_type(flops: float, dtype: str) -> Work:
    return Work(flops, of_types=() if dtype == "bf16" else ((dtype, flops),))


def product_type(instruction: Instruction, operands: list[Instruction]) -> str:
    """The type in which the operations of a product are done, as `Rates.product_flops` takes it.

    bfloat16 stands for float16 too. A float32 product is one of fewer bits unless the highest
    precision is asked for (TF32 on GPU, one pass of bfloat16 on TPU).
    """
    types = {array.dtype for operand in operands[:2] for array in operand.arrays[:1]}
    if types & {"f64", "c64", "c128"}:
        return max(types)
    if "f32" in types:
        precise = re.search(r'operand_precision[=:"{\[]+"?highest', instruction.text, re.I)
        return "f32_highest" if precise else "f32"
    if types & {"bf16", "f16"}:
        return "bf16"
    for short in ("f8", "f4", "s8", "s4"):
        if types and all(dtype.startswith(short) for dtype in types):
            return short
    return min(types, default="bf16")


def matmul_flops(computation: Computation, instruction: Instruction) -> float:
    """Operations of a `dot`, or of a `convolution` that stands for one (as on TPU); 0 of others."""
    if instruction.opcode in _PRODUCTS:
        lhs = computation.operands(instruction)[0].arrays[0]
        contracted = math.prod(lhs.dims[d] for d in instruction.dims("lhs_contracting_dims"))
        return 2.0 * instruction.arrays[0].elements * contracted
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    return 0.0


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if labels is None:
        return 0.0
    kernel = computation.operands(instruction)[1].arrays[0]
    dilation = re.search(r"window=\{[^}]*lhs_dilate=([\dx]+)", instruction.text)
    gaps = [int(n) for n in dilation[1].split("x")] if dilation else []
    contracted = 1
    for size, label in zip(kernel.dims, labels[2], strict=True):
        # A batch dimension of a product is written as a spatial one whose input is spread so far
        # that each place of the window meets one element: it is not summed over.
        batch = label.isdigit() and gaps and gaps[int(label)] == size
        contracted *= 1 if label == "o" or batch else size
    return 2.0 * instruction.arrays[0].elements * contracted


def _fused_products(module: Module, fused: Computation) -> Work:
    total = Work()
    for instruction in fused.instructions:
        total += product(fused, instruction)
        for called in module.called(instruction):
            total += _fused_products(module, called)
    return total
