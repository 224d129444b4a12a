"""Reader of the profiles that `jax.profiler.trace` writes: what ran on each device, and when.

What the parts of a profile look like, by platform:

- GPU: a plane "/device:GPU:0" with a line "Stream #13(Kernel)" for each stream. Its events are
  kernels, with the stats `hlo_op`, `hlo_module` and `program_id` of XLA's annotation. Collectives
  are kernels of NCCL on streams of their own. A kernel that was launched by a command buffer has
  the buffer's name for `hlo_op`, or none. Lines "XLA Ops" and "XLA Modules" are made of these by
  the viewer, and are copies where a file has them.
- TPU: a plane "/device:TPU:0" with the lines "XLA Modules" (an event for each execution, named
  `jit_f(PROGRAM)`, with `run_id`), "XLA Ops" (events in the core's order, loops around what they
  run, named by the text of the instruction) and "Async XLA Ops" (an event for the whole flight of a
  copy or a collective, named by its start, with the name of its done for `hlo_op`).
- CPU: a plane "/host:CPU" with a line for each thread. Events of instructions have `hlo_op`,
  `hlo_module`, `program_id`, `run_id` and `device_ordinal`.

Looked up in xla/backends/profiler/gpu/cupti_collector.cc, xla/tsl/profiler/utils/xplane_schema.cc
and xla/python/xplane_to_profile_instructions.cc of openxla/xla, in issue 3070 of openxla/xprof
(command buffers), and in xprof/convert/test_xplanes/tpu_inference_2.xplane.pb there (TPU v6e). CPU:
profiles of jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

OPS, ASYNC_OPS = "XLA Ops", "Async XLA Ops"  # lines of a TPU
_MODULES = "XLA Modules"
_DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
_HOST = "/host:CPU"
_INSTRUCTION = re.compile(r"%?([^\s=%]+) = ")  # at the start of its text
_EXECUTION = re.compile(r"(.+)\((\d+)\)")  # jit_f(1234)


@dataclass(frozen=True)
class DeviceEvent:
    """Something that ran on a device. Times are in seconds of the profile's clock."""

    device: str  # /device:GPU:0
    line: str  # of the device: a stream, a kind of events, a thread
    name: str  # of the kernel, or of the instruction
    hlo_op: str  # name of the instruction, or of what launched the kernel; "" if it is not told
    module: str  # jit_step; "" if it is not told
    start: float
    end: float
    program: str = ""  # number of the compiled program, which tells modules of one name apart
    run: str = ""  # number of the execution, where the profile tells


@dataclass(frozen=True)
class Profile:
    """The events of one run of the profiler."""

    folder: Path  # of the run, where the .xplane.pb files are
    events: tuple[DeviceEvent, ...]
    note: str = ""  # what the reader had to choose


def read_profile(folder: str | Path) -> Profile:
    """Read the newest run that `jax.profiler.trace(folder)` wrote, or the run that `folder` is.

    Raises:
        ValueError: there is no profile, a file is none, or no event of it names an instruction.
    """
    folder = Path(folder)
    run, note = _newest_run(folder)
    files = sorted(run.glob("*.xplane.pb"))
    events: list[DeviceEvent] = []
    planes: list[str] = []
    for number, file in enumerate(files):
        try:
            data = ProfileData.from_file(str(file))
        except Exception as error:  # RuntimeError or JaxRuntimeError, by version of jaxlib
            raise ValueError(f"{file}: not a profile that this jaxlib reads ({error})") from error
        planes += [plane.name for plane in data.planes]
        # Every host numbers its devices from 0.
        events += read_events(data, f"{number}:" if len(files) > 1 else "")
    if not any(event.hlo_op for event in events):
        raise ValueError(
            f"{run}: no event names an instruction of a program. Expected a plane /device:GPU:N, "
            f"/device:TPU:N or {_HOST} with the events of a step; found {listed(planes)}"
        )
    return Profile(run, tuple(events), note)


def _newest_run(folder: Path) -> tuple[Path, str]:
    """The folder of a run, and what was left aside."""
    if any(folder.glob("*.xplane.pb")):
        return folder, ""
    runs = sorted({path.parent for path in folder.glob("plugins/profile/*/*.xplane.pb")})
    if not runs:
        raise ValueError(
            f"no profile in {folder}: expected plugins/profile/RUN/HOST.xplane.pb, as "
            "jax.profiler.trace writes"
        )
    # A run is named by its time, to the second.
    note = f"{len(runs)} runs in {folder}, took the newest, {runs[-1].name}"
    return runs[-1], note if len(runs) > 1 else ""


def read_events(data: Any, prefix: str = "") -> list[DeviceEvent]:
    """The events of a `ProfileData`; `prefix` is put before the names of devices.

    Those of the host count where no GPU or TPU has any: XLA:CPU runs there.
    """
    planes = list(data.planes)
    events: list[DeviceEvent] = []
    with warnings.catch_warnings():  # jaxlib's iterator of stats is a type without a module
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in planes:
            if found := _DEVICE.fullmatch(plane.name):
                read = _gpu_events if found[1] == "GPU" else _tpu_events
                events += read(plane, f"{prefix}{plane.name}")
        if not events:
            for plane in planes:
                if plane.name == _HOST:
                    events += _host_events(plane, prefix)
    return events


def _gpu_events(plane: Any, device: str) -> Iterator[DeviceEvent]:
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                yield _event(event, device, line.name, _stats(event))


def _tpu_events(plane: Any, device: str) -> Iterator[DeviceEvent]:
    lines = {line.name: list(line.events) for line in plane.lines}
    executions = []
    for event in lines.get(_MODULES, ()):
        named = _EXECUTION.fullmatch(event.name)
        module, program = named.groups() if named else (event.name, "")
        executions.append((event.start_ns, event.end_ns, module, program, _stats(event)))
    executions.sort(key=lambda execution: execution[:2])
    for name in (OPS, ASYNC_OPS):
        at = 0
        for event in sorted(lines.get(name, ()), key=lambda event: event.start_ns):
            while at < len(executions) and executions[at][1] <= event.start_ns:
                at += 1
            stats = _stats(event)
            if at < len(executions) and executions[at][0] <= event.start_ns:
                start, _, module, program, of_execution = executions[at]
                stats |= {"hlo_module": module, "program_id": program}
                stats["run_id"] = of_execution.get("run_id") or f"at {start}"
            if text := _INSTRUCTION.match(event.name):
                stats["hlo_op"] = text[1]
            stats.setdefault("hlo_op", event.name)
            yield _event(event, device, name, stats)


def _host_events(plane: Any, prefix: str) -> Iterator[DeviceEvent]:
    for line in plane.lines:
        for event in line.events:
            stats = _stats(event)
            if "hlo_op" in stats and "hlo_module" in stats:
                device = f"{prefix}{_HOST}:{stats.get('device_ordinal', '0')}"
                yield _event(event, device, line.name, stats)


def _event(event: Any, device: str, line: str, stats: dict[str, str]) -> DeviceEvent:
    return DeviceEvent(
        device,
        line,
        event.name,
        stats.get("hlo_op", ""),
        stats.get("hlo_module", ""),
        event.start_ns * 1e-9,
        event.end_ns * 1e-9,
        stats.get("program_id", ""),
        stats.get("run_id", ""),
    )


def _stats(event: Any) -> dict[str, str]:
    return {name: str(value) for name, value in event.stats if name is not None}


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first of the names, and how many there are more."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - most} more" if len(distinct) > most else ""
    return (", ".join(distinct[:most]) or "nothing") + more
