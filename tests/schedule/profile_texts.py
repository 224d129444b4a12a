"""Writes profiles as `jax.profiler.trace` does, in the form that each platform gives them.

The forms are described, with where they were looked up, in `tbo_jax/schedule/profile.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jax.profiler import ProfileData

Stat = str | int
RUN = "2026_01_02_03_04_05"


@dataclass(frozen=True)
class Ran:
    """An event; times are in microseconds."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Stat] = field(default_factory=dict)


Lines = Mapping[str, Sequence[Ran]]


def kernel(op: str, start: float, end: float, *, name: str = "", **stats: Stat) -> Ran:
    """A kernel on a stream of a GPU."""
    found = {"correlation_id": 7, "hlo_op": op, "hlo_module": "jit_step", "program_id": 3} | stats
    return Ran(name or f"{op}_kernel", start, end, {k: v for k, v in found.items() if v != ""})


def nccl(op: str, start: float, end: float, **stats: Stat) -> Ran:
    """A collective on a stream of a GPU."""
    return kernel(
        op, start, end, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", **stats
    )


def write_profile(
    folder: Path, planes: Mapping[str, Lines], run: str = RUN, host: str = "host"
) -> Path:
    """Write planes of lines of events; returns `folder`."""
    place = folder / "plugins" / "profile" / run
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(_plane(name, lines) for name, lines in planes.items())
    data = ProfileData.text_proto_to_serialized_xspace(text)
    (place / f"{host}.xplane.pb").write_bytes(data)
    return folder


def _plane(name: str, lines: Lines) -> str:
    names: dict[str, int] = {}
    keys: dict[str, int] = {}
    parts = [f"name: {json.dumps(name)}"]
    for number, (line, events) in enumerate(lines.items()):
        texts = []
        for event in events:
            stats = ""
            for key, value in event.stats.items():
                kind = "str_value" if isinstance(value, str) else "int64_value"
                number_of = keys.setdefault(key, len(keys) + 1)
                stats += f"stats {{ metadata_id: {number_of} {kind}: {json.dumps(value)} }} "
            start, length = round(event.start * 1e6), round((event.end - event.start) * 1e6)
            texts.append(
                f"events {{ metadata_id: {names.setdefault(event.name, len(names) + 1)} "
                f"offset_ps: {start} duration_ps: {length} {stats}}}"
            )
        parts.append(
            f"lines {{ id: {number} name: {json.dumps(line)} timestamp_ns: 1000 {' '.join(texts)} }}"
        )
    for kind, table in {"event_metadata": names, "stat_metadata": keys}.items():
        for text, number in table.items():
            parts.append(
                f"{kind} {{ key: {number} value {{ id: {number} name: {json.dumps(text)} }} }}"
            )
    return f"planes {{ {' '.join(parts)} }}\n"
