"""Measure what two-batch overlap gains on the devices of this machine, beside what the model says.

    python examples/measure_overlap.py --json overlap.json
    python examples/measure_overlap.py --phase prefill --tokens 8192 --profile profile

Runs the step of a model with random weights on all GPUs or TPUs, as one batch (USE_TBO=0) and as
two micro-batches (USE_TBO=1). First it times both in turn, without a profiler. Then it profiles
some steps of both, and reads from the profile what was on the link and what computed meanwhile. If
tbo_jax knows the rates of the device, the modelled times stand beside the measured ones.

The JSON holds versions, the kind and number of devices, the step and its times: no names of hosts,
no paths. Please send it to us, whatever it says.

To see how it works where there is no GPU or TPU (its times mean nothing then):

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/measure_overlap.py --cpu
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tbo_jax import ModelRunner, OverlapConfig, make_mesh
from tbo_jax.checkpoint.random_weights import random_model
from tbo_jax.host.command import run_command
from tbo_jax.host.progress import progress_bar
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.overlap.batch import ForwardBatch, stack_batches
from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.exchange import Transport
from tbo_jax.parallel.sharding import num_ranks
from tbo_jax.schedule import find_target, inspect, list_targets
from tbo_jax.schedule.measured import MeasuredReport, measure_steps, text_path
from tbo_jax.schedule.measured_table import print_measured
from tbo_jax.schedule.model_step import PAGE_SIZE, StepShape, expected_costs, read_shape
from tbo_jax.schedule.profile import read_profile
from tbo_jax.schedule.report import ScheduleReport
from tbo_jax.schedule.table import wide_console
from tbo_jax.step.compiler_options import Options, known_options

SCHEMA = 1  # of the JSON; one more whenever a key or a unit changes
CHAIN = 4  # steps that are dispatched together, as an engine does: the host is not waited for
PROFILED = 5  # steps of each form
# Kernels in a command buffer do not say which instruction they are of.
READABLE: Options = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Command line of examples/measure_overlap.py."""

    config: str = "qwen3-30b-a3b"
    """Shape of the model: a config.json, a folder that holds one, or a name (tbo-jax schedule
    --list-targets has them). With --cpu, a tiny model of its kind."""
    layers: int = 4
    """Layers of the model, the last ones."""
    phase: Literal["decode", "prefill"] = "decode"
    """One token of each sequence, or whole prompts."""
    tokens: int | None = None
    """Tokens of a step on one device; default 256, in prefill 8192; with --cpu 16."""
    context: int | None = None
    """Tokens of each sequence; default 2048; with --cpu 64, in prefill 8."""
    transport: Transport = "all_to_all"
    """Of the expert exchange."""
    devices: int | None = None
    """Take only the first so many devices; default all."""
    steps: int = 20
    """How often each form is timed."""
    warmup: int = 3
    """How often each form runs before."""
    target: str | None = None
    """The machine to compare with (tbo-jax schedule --list-targets); default found by the kind."""
    json: Path | None = None
    """Write the results there."""
    profile: Path | None = None
    """Keep the profile and the step's text there, for `tbo-jax schedule --profile` and XProf."""
    cpu: bool = False
    """Run on CPU devices: tries the script, measures nothing."""
    quiet: bool = False
    """No progress on stderr."""


class ReadableRunner(ModelRunner):
    """On GPUs: its programs tell the profiler of every kernel which instruction it is of."""

    def compiler_options(self, strategy: Strategy) -> Options:
        return super().compiler_options(strategy) | known_options(READABLE, self.mesh)


def find_devices(args: Arguments) -> Sequence[jax.Device]:
    """The devices to measure; ValueError if there are none, or one, or they are CPUs unasked."""
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    try_it = (
        "To try the script on CPU: XLA_FLAGS=--xla_force_host_platform_device_count=2 "
        "python examples/measure_overlap.py --cpu"
    )
    devices = jax.devices()
    if devices[0].platform == "cpu" and not args.cpu:
        raise ValueError(
            "JAX finds no GPU and no TPU here (extras cuda12, cuda13 and tpu of tbo-jax bring what "
            f"JAX needs for them). {try_it}"
        )
    count = len(devices) if args.devices is None else args.devices
    if not 2 <= count <= len(devices):
        raise ValueError(
            f"{count} of {len(devices)} device(s): expected 2 or more, as one sends nothing to "
            f"others. {try_it}"
        )
    return devices[:count]


def step_of(args: Arguments) -> tuple[DecoderConfig, StepShape]:
    """The model and the step; ValueError if an option is out of range."""
    for name in ("steps", "warmup"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: expected at least 1")
    config = read_shape(args.config, args.layers)
    prefill = args.phase == "prefill"
    if args.cpu:
        config = dataclasses.replace(
            config, vocab_size=512, hidden_size=128, num_heads=4, intermediate_size=128,
            num_kv_heads=2 if config.latent is None else 1, num_experts=config.num_experts and 8,
            expert_intermediate_size=128,
            router=config.router and dataclasses.replace(config.router, top_k=2),
        )  # fmt: skip
    tokens = args.tokens or (16 if args.cpu else 8192 if prefill else 256)
    context = args.context or ((8 if prefill else 64) if args.cpu else 2048)
    shape = StepShape(args.phase, tokens, context)
    shape.check(2)
    return config, shape


def full_batch(shape: StepShape, config: DecoderConfig, ranks: int) -> ForwardBatch:
    """Random tokens that fill the step, the same contexts on every rank. Leaves [ranks, ...]."""
    random = np.random.default_rng(0)
    if shape.phase == "decode":
        lengths, contexts = [1] * shape.tokens, [shape.context - 1] * shape.tokens
    else:
        whole, rest = divmod(shape.tokens, shape.context)
        lengths = [shape.context] * whole + [rest] * (rest > 0)
        contexts = [0] * len(lengths)
    pages, first = [], 1  # page 0 is for padding
    for length, context in zip(lengths, contexts, strict=True):
        needed = -(-(length + context) // PAGE_SIZE)
        pages.append(list(range(first, first + needed)))
        first += needed
    return stack_batches(
        [
            ForwardBatch.pack(
                [random.integers(0, config.vocab_size, length).tolist() for length in lengths],
                contexts,
                pages,
                token_capacity=shape.bucket.tokens,
                sequence_capacity=shape.bucket.sequences,
                pages_per_sequence=shape.cache.pages_per_sequence,
                page_size=PAGE_SIZE,
            )
            for _ in range(ranks)
        ]
    )


class Steps:
    """Runs the two forms of a step on a runner's own buffers."""

    def __init__(self, runner: ModelRunner, shape: StepShape, batch: ForwardBatch):
        self.runner, self.bucket, self.batch = runner, shape.bucket, batch
        self.counts = [one.micro_batches for one in runner.overlap.candidates(shape.tokens)]
        self.buffers = runner.allocate()

    def run(self, count: int, times: int) -> None:
        """`times` steps with `count` micro-batches, one after the other; waits for the last."""
        for _ in range(times):
            logits, self.buffers = self.runner.step(
                self.bucket, self.buffers, self.batch, Strategy(count)
            )
        jax.block_until_ready((logits, self.buffers))

    def time(self, args: Arguments, moved: Callable[[], None]) -> dict[int, list[float]]:
        """Seconds of a step in each form, `args.steps` of them, in turn."""
        seconds: dict[int, list[float]] = {count: [] for count in self.counts}
        for turn in range(args.steps):
            # Each goes first as often as the other, so that a drift of the clock rate hits both.
            for count in self.counts if turn % 2 == 0 else self.counts[::-1]:
                start = time.perf_counter()
                self.run(count, CHAIN)
                seconds[count].append((time.perf_counter() - start) / CHAIN)
            moved()
        return seconds


def guess_target(devices: Sequence[jax.Device]) -> str | None:
    """The name of the target that these devices are, if it is one of those that are known."""
    for listed in list_targets():  # h100x1..8, v5e:2x4
        chip, gpu, _ = listed.partition("x1..")
        if gpu:
            name = f"{chip}x{len(devices)}"
        else:
            chip, _, slice_ = listed.partition(":")
            places = [getattr(device, "coords", ()) for device in devices]
            sizes = [max(axis) + 1 for axis in zip(*places, strict=True)]
            # Places have three numbers, names of flat slices two.
            name = f"{chip}:{'x'.join(map(str, sizes[: slice_.count('x') + 1]))}"
        try:
            target = find_target(name)
        except ValueError:
            continue  # more GPUs than a node has, or devices that have no place
        kind = target.description.get("device_kind")
        if kind == devices[0].device_kind and target.num_devices == len(devices):
            return name
    return None


def model_steps(
    steps: Steps, name: str | None, config: DecoderConfig, shape: StepShape, transport: Transport
) -> dict[int, ScheduleReport]:
    """What the model says of the very programs that run; empty without a target."""
    if name is None:
        return {}
    target = find_target(name)
    return {
        count: inspect(
            steps.runner.compile(steps.bucket, Strategy(count)),
            target,
            micro_batches=count,
            **expected_costs(config, target.num_devices, shape, Strategy(count)),
        )
        for count in steps.counts
    }


def profile_steps(steps: Steps, folder: Path) -> dict[int, MeasuredReport]:
    """Profile both forms, keep their texts beside the profile, and read it."""
    for count in steps.counts:
        text = steps.runner.compile(steps.bucket, Strategy(count)).as_text()
        text_path(folder, count).write_text(text or "", encoding="utf-8")
        steps.run(count, 1)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python would fill the profile
    with jax.profiler.trace(str(folder), profiler_options=options):
        for count in steps.counts:
            steps.run(count, PROFILED)
    return measure_steps(
        folder,
        read_profile(folder),
        {count: text_path(folder, count).read_text(encoding="utf-8") for count in steps.counts},
    )


def print_times(
    console: Console, seconds: Mapping[int, list[float]], modelled: Mapping[int, ScheduleReport]
) -> None:
    """The table of the steps without a profiler."""
    table = Table("", *[f"USE_TBO={count - 1}" for count in seconds], "speed-up", box=None)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(label: str, times: Sequence[float]) -> None:
        table.add_row(label, *[f"{t * 1e3:.3f} ms" for t in times], f"{times[0] / times[-1]:.3f}")

    row("step, measured without profiler", [statistics.median(of) for of in seconds.values()])
    if modelled:
        row("step, modelled", [modelled[count].step for count in seconds])
    console.print(table)


def as_json(
    args: Arguments,
    devices: Sequence[jax.Device],
    shape: StepShape,
    target: str | None,
    seconds: Mapping[int, list[float]],
    measured: Mapping[int, MeasuredReport],
    modelled: Mapping[int, ScheduleReport],
) -> dict[str, Any]:
    """What `--json` writes. Times are in seconds."""
    medians = {count: statistics.median(of) for count, of in seconds.items()}
    quantities = "step", "compute", "communication", "hidden", "exposed", "hidden_share"
    named = Path(args.config).name == args.config  # else a path, which is nobody's business
    return {
        "schema": SCHEMA,
        "is_measurement": not args.cpu,
        "versions": {name: metadata.version(name) for name in ("tbo_jax", "jax", "jaxlib")}
        | {"python": platform.python_version()},
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "number": len(devices),
        },
        "setting": {
            "config": args.config if named else "a file",
            "layers": args.layers,
            "phase": args.phase,
            "tokens": shape.tokens,
            "context": shape.context,
            "transport": args.transport,
            "steps": args.steps,
            "warmup": args.warmup,
        },
        "timed": [
            {"micro_batches": count, "step": medians[count], "steps": of}
            for count, of in seconds.items()
        ],
        "speed_up": medians[1] / min(medians[count] for count in medians if count > 1),
        "target": target,
        "measured": [report.to_json() for report in measured.values()],
        "modelled": [
            {"micro_batches": count} | {name: getattr(report, name) for name in quantities}
            for count, report in modelled.items()
        ],
    }


def run(args: Arguments, console: Console) -> int:
    """Measure and print; the exit status is 1 if the profile could not be read."""
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: {args.json.parent} is no folder")
    config, shape = step_of(args)
    target = None if args.target is None else find_target(args.target).name
    devices = find_devices(args)
    mesh = make_mesh(devices=devices)
    target = target or guess_target(devices)
    console.print(
        f"{args.config}, {config.num_layers} layers; {args.phase}, {shape.tokens} tokens a device, "
        f"context {shape.context}, {args.transport}; {len(devices)} x {devices[0].device_kind}, "
        f"jax {jax.__version__}"
    )
    if args.cpu:
        console.print("On CPU devices, a tiny model: this tries the script, and measures nothing.")
    with progress_bar("weights", not args.quiet):
        model = random_model(config, mesh)
    batch = full_batch(shape, config, num_ranks(mesh))

    def steps_of(runner: type[ModelRunner], what: str) -> Steps:
        overlap = OverlapConfig("auto", strategy="micro_batches")
        made = runner(model, shape.cache, mesh=mesh, overlap=overlap, transport=args.transport)
        programs = [(shape.bucket, one) for one in overlap.candidates(shape.tokens)]
        with progress_bar(what, not args.quiet) as update:
            for error in made.compile_programs(programs, update).values():
                raise error
        return Steps(made, shape, batch)

    steps = steps_of(ModelRunner, "compiling")
    for count in steps.counts:
        steps.run(count, args.warmup)
    with progress_bar("timing", not args.quiet) as update:
        done = iter(range(1, args.steps + 1))
        seconds = steps.time(args, lambda: update(next(done), args.steps))
    modelled = model_steps(steps, target, config, shape, args.transport)
    print_times(console, seconds, modelled)
    if devices[0].platform == "gpu":
        del steps  # with its buffers: there may be no room for two sets
        steps = steps_of(ReadableRunner, "compiling for the profile")
    measured: dict[int, MeasuredReport] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.profile or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            measured = profile_steps(steps, folder)
        except ValueError as error:  # what was timed counts without it
            print(f"measure_overlap.py: the profile cannot be read: {error}", file=sys.stderr)
    if measured:
        print_measured(measured, modelled)
    if args.profile is not None:
        console.print(f"\nThe profile is in {args.profile}")
    if args.json is not None:
        values = as_json(args, devices, shape, target, seconds, measured, modelled)
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return int(not measured)


def main(words: list[str], name: str) -> int:
    """Run the command with its words; returns the exit status."""
    return run_command(
        name,
        lambda: run(
            tyro.cli(Arguments, description=__doc__, prog=name, args=words), wide_console()
        ),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "measure_overlap.py"))
