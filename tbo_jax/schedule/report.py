"""`inspect`: compile a step for a target, and report what its schedule hides."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax.overlap.config import Strategy
from tbo_jax.schedule.audit import Finding, audit
from tbo_jax.schedule.cost import Work
from tbo_jax.schedule.hlo import Module, parse
from tbo_jax.schedule.run_time import run_time_notes
from tbo_jax.schedule.scopes import BACKWARD, find_scope
from tbo_jax.schedule.targets import Target, find_target
from tbo_jax.schedule.timeline import Timeline, Transfer, simulate
from tbo_jax.step.compiler_options import Options, known_options, overlap_options

# From v5p on XLA moves small scatters, gathers and sorts to the SparseCores, and jaxlib 0.10 cannot
# read the program that it makes then. The step that is run leaves them there.
_READABLE: Options = {
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
    "xla_tpu_offload_gather_to_sparsecore": "false",
    "xla_tpu_enable_offloading_sort_to_sparsecore": "false",
}
_HOPPER = "9.0"
_NO_TIME = 0.01  # of a transfer: less compute beside it than this is none


@dataclass(frozen=True)
class CollectiveReport:
    """A collective of the program, averaged over the turns of the loop it is in. Seconds."""

    name: str  # of the instruction
    kind: str  # all-to-all, ...
    scope: str  # layer_2/micro_batch_1/dispatch
    source: str  # file:line
    turns: int
    bytes: float  # that a device sends, per turn
    seconds: float
    hidden: float
    exposed: float
    beside: tuple[tuple[str, float], ...]  # what computes between its start and its done
    reason: str  # why it is exposed; "" when it is hidden


@dataclass(frozen=True)
class ScheduleReport:
    """What the compiler's schedule of a step hides. All times are modelled, in seconds."""

    target: str
    micro_batches: int
    step: float
    compute: float
    contention: float  # of compute: what it takes longer beside collectives
    communication: float
    hidden: float
    exposed: float
    flops: float
    memory_bytes: float  # read and written by kernels
    sent_bytes: float  # by a device
    temporary_bytes: int
    needed_bytes: int  # arguments, results and temporary memory together
    memory: int | None  # bytes of a device; None if unknown
    aliased_bytes: int
    hlo_characters: int
    compile_seconds: float  # measured, on the machine that compiled
    collectives: tuple[CollectiveReport, ...]
    findings: tuple[Finding, ...]
    assumed_loops: tuple[str, ...]  # turns unknown until run time, counted as one
    not_priced: Mapping[str, str]  # instruction: what of it costs nothing here
    run_time: tuple[str, ...]  # what is known to slow it when it runs, and is not in the times
    timeline: Timeline
    hlo: str
    layer_bytes: int | None = None  # of a device, that one more layer would take; None if unknown
    expert_chunks: int = 1
    # Of the layers' weights, that a device reads: all of them once for each micro-batch, if every
    # expert has a token; None if unknown.
    weight_bytes: int | None = None

    @property
    def strategy(self) -> Strategy:
        """How the program overlaps."""
        return Strategy(self.micro_batches, self.expert_chunks)

    @property
    def hidden_share(self) -> float:
        """Of communication; 1 if there is none."""
        return self.hidden / self.communication if self.communication else 1.0

    def ceiling(self, other: float) -> float:
        """Speed-up over a step of `other` seconds if all were hidden beside all.

        Splitting costs compute and communication of its own, so that this may be below 1.
        """
        longer = max(self.compute - self.contention, self.communication)
        return other / longer if longer else 1.0

    def needed_with(self, layers: int) -> int:
        """Bytes of a device that so many more layers would need in all."""
        return self.needed_bytes + layers * (self.layer_bytes or 0)

    def fits(self, layers: int = 0) -> bool:
        """Whether a device has the memory for so many more layers, as far as that is known."""
        return self.memory is None or self.needed_with(layers) <= self.memory

    def hidden_by_pass(self) -> dict[str, tuple[float, float]]:
        """Of a step of training (else empty): of each part of it, seconds of communication, hidden.

        Those of the layers' forward and backward pass, and of the sums outside of the layers: of
        gradients over the ranks, of metrics.
        """
        parts = dict.fromkeys(("forward", "backward", "sums"), (0.0, 0.0))
        for c in self.collectives:
            forward = "forward" if c.scope else "sums"
            part = "backward" if c.scope.endswith(BACKWARD) else forward
            seconds, hidden = parts[part]
            parts[part] = seconds + c.turns * c.seconds, hidden + c.turns * c.hidden
        return parts if parts["backward"][0] else {}

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the timeline and the program."""
        fields = {k: v for k, v in vars(self).items() if k not in ("timeline", "hlo")}
        fields["collectives"] = [asdict(c) for c in self.collectives]
        fields["findings"] = [asdict(f) for f in self.findings]
        fields |= {name: list(fields[name]) for name in ("assumed_loops", "run_time")}
        return fields | {"hidden_share": self.hidden_share, "times": "modelled"}


def inspect(
    step: Any,
    target: Target | str,
    *args: Any,
    micro_batches: int = 1,
    expert_chunks: int = 1,
    trip_counts: Mapping[str, float] | None = None,
    kernels: Mapping[str, Work] | None = None,
    ragged_rows: float | None = None,
    options: Options | None = None,
) -> ScheduleReport:
    """Compile a step for a machine that need not be there, and report its schedule.

    Args:
        step: a function jitted over `target.mesh()`, what its `lower` gave, or what that compiled
            to; or a function that is not jitted, which is jitted for the target.
        target: the machine, or its name (`find_target`).
        *args: of a function: arrays or `jax.ShapeDtypeStruct`s with their shardings over
            `target.mesh()`. Those of a function that is not jitted lie whole on every device where
            they have none.
        micro_batches, expert_chunks: of the step, for the compiler options and the report.
        trip_counts: turns of loops that depend on data, by a part of their name scope.
        kernels: work of custom calls by the name of the kernel; else what their operands weigh.
        ragged_rows: rows that a device sends to others in a ragged exchange, whose sizes are data;
            default all it could.
        options: of the compiler, on top of `compiler_options`.

    Raises:
        ValueError: unknown target, or its compiler is not installed; a step that was compiled, or
            whose Mosaic GPU kernels were lowered, for another machine; a program that is written in
            a form not known here.
    """
    target = find_target(target) if isinstance(target, str) else target
    start = time.perf_counter()
    if callable(step) and not hasattr(step, "lower") and not hasattr(step, "as_text"):
        step, args = jax.jit(step), _placed(args, target)
    is_function = hasattr(step, "trace")
    if is_function:
        step = _lower(step.trace(*args), target)
        args = ()
    if args:
        raise ValueError("arguments are for a jitted function, this one is lowered already")
    if hasattr(step, "compile"):
        strategy = Strategy(micro_batches, expert_chunks)
        given = overlap_options(target.platform, target.num_devices, strategy)
        given = known_options(given, target.mesh()) if given else {}
        if target.platform == "cuda":
            given["xla_gpu_autotune_level"] = "0"  # there is no device to tune on
        elif target.platform == "tpu":
            given |= _READABLE
        step = step.compile(given | (options or {}))
    elif options:
        raise ValueError("compiler options come too late: the step is compiled already")
    seconds = time.perf_counter() - start
    _check_machine(step, target)
    _check_mosaic(step, target, is_function)
    return report(
        step, target, Strategy(micro_batches, expert_chunks), trip_counts or {}, kernels or {},
        seconds, ragged_rows, _device_ids(step, target),
    )  # fmt: skip


def _placed(args: Any, target: Target) -> Any:
    """Arguments that are on no machine yet, or on this one, as if they lay whole on the target."""
    whole = NamedSharding(target.mesh(), PartitionSpec())

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        known = isinstance(leaf, jax.ShapeDtypeStruct) and sharding is not None
        shape = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding if known else whole)

    return jax.tree.map(place, args)


def _lower(traced: jax.stages.Traced, target: Target) -> jax.stages.Lowered:
    """Lower a step so that Mosaic GPU kernels in it are those of the target.

    JAX lowers them for the default device, and where that is no GPU for Hopper.
    """
    if target.platform != "cuda" or target.chip == _HOPPER:
        return traced.lower()
    with jax.default_device(target.devices()[0]):
        return traced.lower()


def _check_mosaic(compiled: jax.stages.Compiled, target: Target, lowered_here: bool) -> None:
    """ValueError if there are Mosaic GPU kernels that may be of another chip than the target's."""
    if target.platform != "cuda" or target.chip == _HOPPER:
        return
    # Before 0.12 JAX asks the mesh, which does not know it.
    asks_default_device = jax.__version_info__ >= (0, 12)
    if "mosaic_gpu" in (compiled.as_text() or "") and not (lowered_here and asks_default_device):
        raise ValueError(
            f"the step has Mosaic GPU kernels, and JAX {jax.__version__} lowered them for compute "
            f"capability {_HOPPER}, {target.name} is {target.chip}: expected a function that is "
            "not lowered yet, and jax 0.12"
        )


def _check_machine(compiled: jax.stages.Compiled, target: Target) -> None:
    """ValueError if a step was compiled for another platform, chip or number of devices."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = {device for sharding in shardings for device in sharding.device_set}
    if not devices:
        return
    device = min(devices, key=lambda device: device.id)
    platform = "cuda" if device.platform in ("gpu", "cuda") else device.platform
    advice = f"give its arguments shardings over find_target({target.name!r}).mesh()"
    if platform != target.platform:
        raise ValueError(
            f"the step was compiled for platform {platform!r}, {target.name} is "
            f"{target.platform!r}: {advice}"
        )
    if len(devices) != target.num_devices:
        raise ValueError(
            f"the step was compiled for {len(devices)} device(s), {target.name} has "
            f"{target.num_devices}: {advice}, or name a target of that size"
        )
    chip = target.chip
    given = (
        getattr(device, "compute_capability", None) if platform == "cuda" else device.device_kind
    )
    if chip is not None and given and given != chip:
        raise ValueError(
            f"the step was compiled for {given!r}, {target.name} is {chip!r}: {advice}"
        )


def report(
    compiled: jax.stages.Compiled,
    target: Target,
    strategy: Strategy,
    trip_counts: Mapping[str, float],
    kernels: Mapping[str, Work],
    compile_seconds: float,
    ragged_rows: float | None = None,
    device_ids: Sequence[int] | None = None,
) -> ScheduleReport:
    """The report of a compiled step; see `simulate` for the arguments."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise ValueError("this program has no text to read, or no memory analysis")
    module: Module = parse(text)
    timeline = simulate(module, target.rates, trip_counts, kernels, ragged_rows, device_ids)
    return ScheduleReport(
        target=target.name,
        micro_batches=strategy.micro_batches,
        expert_chunks=strategy.expert_chunks,
        step=timeline.step,
        compute=timeline.compute,
        contention=timeline.contention,
        communication=timeline.communication,
        hidden=timeline.hidden,
        exposed=timeline.exposed,
        flops=timeline.flops,
        memory_bytes=timeline.bytes,
        sent_bytes=sum(t.bytes for t in timeline.transfers),
        temporary_bytes=memory.temp_size_in_bytes,
        needed_bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        memory=target.memory,
        aliased_bytes=memory.alias_size_in_bytes,
        hlo_characters=len(text),
        compile_seconds=compile_seconds,
        collectives=tuple(_collectives(timeline)),
        findings=tuple(audit(module)),
        assumed_loops=tuple(timeline.assumed_loops),
        not_priced=timeline.not_priced,
        run_time=tuple(run_time_notes(module, target, device_ids)),
        timeline=timeline,
        hlo=text,
    )


def _device_ids(compiled: jax.stages.Compiled, target: Target) -> list[int] | None:
    """The machine's numbers of the devices, in the order in which the program numbers them.

    They follow the mesh, which may have been laid out for the links. None if no argument or result
    tells.
    """
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding) and sharding.mesh.size == target.num_devices:
            return [device.id for device in sharding.mesh.devices.flat]
    return None


def layer_body(collectives: Sequence[CollectiveReport]) -> list[CollectiveReport]:
    """Those of one layer in the middle: of the scanned layers, or of the middle unrolled one.

    A program without the scopes of `run_layers` gives all.
    """
    scanned = [c for c in collectives if c.scope.startswith("layers/")]
    if scanned:
        return [c for c in scanned if c.turns == max(s.turns for s in scanned)]
    numbers = sorted({int(n) for c in collectives for n in re.findall(r"^layer_(\d+)/", c.scope)})
    if not numbers:
        return list(collectives)
    middle = numbers[len(numbers) // 2 if len(numbers) > 2 else 0]
    return [c for c in collectives if c.scope.startswith(f"layer_{middle}/")]


def layer_seconds(timeline: Timeline) -> float | None:
    """Modelled time from the start of an unrolled layer to that of the next, in the middle.

    None with fewer than three layers: the first and the last one differ from the others. None of
    a step of training, in which they come twice.
    """
    starts: dict[int, float] = {}
    for event in timeline.events:
        scope = scope_of(event.op_name)
        if scope.endswith(BACKWARD):
            return None
        match = re.match(r"layer_(\d+)/", scope)
        if match and event.lane == "compute":
            number = int(match[1])
            starts[number] = min(starts.get(number, event.start), event.start)
    last = max(starts, default=0)
    return (starts[last] - starts[1]) / (last - 1) if last > 1 and 1 in starts else None


def scope_of(op_name: str) -> str:
    """layer_2/micro_batch_1/dispatch of an `op_name`; "" outside of a layer."""
    scope = find_scope(op_name)
    if scope is None:
        return ""
    return f"{scope.layer}/micro_batch_{scope.micro_batch}/{scope.label}"


def _collectives(timeline: Timeline) -> list[CollectiveReport]:
    by_name: dict[str, list[Transfer]] = {}
    for transfer in timeline.transfers:
        by_name.setdefault(transfer.event.name, []).append(transfer)
    return [_collective(transfers) for transfers in by_name.values()]


def _collective(transfers: list[Transfer]) -> CollectiveReport:
    turns, event = len(transfers), transfers[-1].event

    def mean(values: Sequence[float]) -> float:
        return sum(values) / turns

    last = transfers[-1]
    exposed = mean([t.waited for t in transfers])
    return CollectiveReport(
        name=event.name,
        kind=event.kind,
        scope=scope_of(event.op_name),
        source=event.source,
        turns=turns,
        bytes=last.bytes,
        seconds=mean([t.event.seconds for t in transfers]),
        hidden=mean([t.hidden for t in transfers]),
        exposed=exposed,
        beside=last.beside,
        reason=_reason(last) if exposed > 1e-9 else "",
    )


def _reason(transfer: Transfer) -> str:
    seconds = transfer.event.seconds
    if transfer.synchronous:
        return "runs in line with compute: XLA has not made it asynchronous"
    if transfer.computed < _NO_TIME * seconds:
        return "nothing computes between its start and its done"
    between = f"{transfer.computed * 1e6:.1f} us compute between its start and its done"
    if transfer.queued > 0:
        return f"{between}, but it is {transfer.queued * 1e6:.1f} us in the queue for the link"
    if transfer.computed < seconds:
        return f"only {between}"
    return f"{between}, but another transfer is waited for meanwhile"
