"""Reader of HLO that shares nothing with the tool's: of XLA's protocol buffers, not of its text.

XLA parses the text, and what it understood is read from `HloModuleProto` here, by the wire format
(https://protobuf.dev/programming-guides/encoding) and the field numbers of xla/service/hlo.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxlib import _hlo

# Of xla/xla_data.proto: PrimitiveType.
_TYPES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 16: 2}
_TUPLE = 13


@dataclass
class Node:
    """An instruction."""

    id: int
    name: str
    opcode: str
    bytes: int  # of the result; of a tuple, of all in it
    operands: list[int]
    called: list[int]
    groups: int = 0  # devices of a collective's first group
    is_sync: bool = False
    turns: int | None = None  # of a loop, where XLA wrote them down


@dataclass
class Program:
    """A scheduled module: its computations by number, their instructions in order."""

    entry: int
    order: dict[int, list[int]]
    nodes: dict[int, Node] = field(default_factory=dict)


def read(text: str) -> Program:
    """The program of a module's text, as XLA understands it."""
    fields = _fields(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    entry, order, nodes = 0, {}, {}
    for number, value in fields:
        if number == 6:
            entry = value
        elif number == 3:
            for kind, inner in _fields(value):
                if kind == 2:
                    node = _node(inner)
                    nodes[node.id] = node
        elif number == 7:  # the schedule: a map from computations to their instructions in order
            for kind, sequence in _fields(value):
                assert kind == 1
                pair = dict(_fields(sequence))
                listed = dict(_fields(pair[2])).get(1, b"") if 2 in pair else b""
                order[pair[1]] = list(_packed(listed))
    return Program(entry, order, nodes)


def _node(data: bytes) -> Node:
    name = opcode = ""
    size = identity = 0
    operands: list[int] = []
    called: list[int] = []
    groups, is_sync, turns = 0, False, None
    for number, value in _fields(data):
        match number:
            case 1:
                name = value.decode()
            case 2:
                opcode = value.decode()
            case 3:
                size = _shape_bytes(value)
            case 35:
                identity = value
            case 36:
                operands += _packed(value)
            case 38:
                called += _packed(value)
            case 87:  # CollectiveDeviceListProto
                groups = _first_group(value)
            case 93:  # a mesh, and the axes that are communicated over (from jax 0.12 on)
                groups = _over_axes(value)
            case 43:
                is_sync = b'"is_sync":true' in value
                if b"known_trip_count" in value:
                    turns = int(value.split(b'"n":"')[1].split(b'"')[0])
    return Node(identity, name, opcode, size, operands, called, groups, is_sync, turns)


def _first_group(data: bytes) -> int:
    """The devices of the first ReplicaGroup of a list."""
    group = next(part for kind, part in _fields(data) if kind == 1)
    return len(list(_packed(next(part for kind, part in _fields(group) if kind == 1))))


def _over_axes(data: bytes) -> int:
    """The product of the sizes of some axes of a mesh."""
    mesh = next(part for kind, part in _fields(data) if kind == 1)
    sizes = [dict(_fields(axis))[2] for kind, axis in _fields(mesh) if kind == 1]
    devices = 1
    for kind, axis in _fields(data):
        if kind == 2:
            over = dict(_fields(axis))
            assert set(over) <= {1}, "a part of an axis"
            devices *= sizes[over.get(1, 0)]
    return devices


def _shape_bytes(data: bytes) -> int:
    kind, elements, parts = 0, 1, 0
    for number, value in _fields(data):
        if number == 2:
            kind = value
        elif number == 3:
            for size in _packed(value):
                elements *= size
        elif number == 4:
            parts += _shape_bytes(value)
    return parts if kind == _TUPLE else elements * _TYPES.get(kind, 0)


def _packed(data: bytes | int) -> Iterator[int]:
    """Of a repeated number: all in one field, or a field each."""
    if isinstance(data, int):
        yield data
        return
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
        elif kind == 2:
            size, at = _varint(data, at)
            yield number, data[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
