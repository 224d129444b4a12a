"""Show what two-batch overlap hides on a machine, before renting it.

Compiles the runner's step for a machine that is not there, reads the schedule that XLA made of it,
and prints what is hidden. Times are modelled: the order is the compiler's, the prices a roofline's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import jax
import tyro

from tbo_jax.attention.rounded import CacheDtype
from tbo_jax.host.command import run_command
from tbo_jax.host.progress import progress_bar
from tbo_jax.host.quiet import silence_libraries
from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.exchange import Transport
from tbo_jax.schedule.compare import (
    SCHEMA,
    TOLERANCE,
    Change,
    check_settings,
    compare,
    read_report,
)
from tbo_jax.schedule.held_weights import Weights
from tbo_jax.schedule.measured import MeasuredReport, measure_steps
from tbo_jax.schedule.measured_table import print_measured, timelines_of
from tbo_jax.schedule.model_step import Phase, StepShape, inspect_model, list_presets, read_shape
from tbo_jax.schedule.page import facts_of, write_page
from tbo_jax.schedule.profile import read_profile
from tbo_jax.schedule.report import ScheduleReport
from tbo_jax.schedule.strategies import print_strategies
from tbo_jax.schedule.table import print_changes, print_report, program_name
from tbo_jax.schedule.targets import RateKind, Target, find_target, list_targets
from tbo_jax.schedule.trace import write_trace
from tbo_jax.step.backends import KernelChoice

# What --json says of the step, beside its target and layers.
SETTING = (
    "config", "phase", "tokens", "context", "remat", "loop", "weights", "transport",
    "tensor_parallel", "nodes", "rates", "cache_dtype",
)  # fmt: skip
CHUNKS = 2, 4  # of the experts, that --strategies compares
UNROLLED_LAYERS = 4  # compiled unless --layers says otherwise: XLA takes seconds for each


@dataclass(frozen=True)
class Arguments:
    """Command line."""

    config: str = "qwen3-30b-a3b"
    """A config.json, a folder that holds one, or the name of a public shape (--list-targets)."""
    target: str = "h100x8"
    """The machine: h100x8, v5e:2x4, ... (--list-targets)."""
    phase: Phase = "decode"
    """One token of each sequence, whole prompts, or a step of training."""
    tokens: int = 256
    """Tokens of each rank: a device, or as many as --tensor-parallel says."""
    context: int = 2048
    """Tokens of each sequence. With 4096, 256 sequences of the default model do not fit an H100."""
    remat: bool = False
    """Training: compute the layers anew in the backward pass instead of keeping what is in them."""
    micro_batches: str = "1,2"
    """Numbers of micro-batches to compare."""
    expert_chunks: str | None = None
    """Numbers of expert chunks to compare beside them, such as 2,4; with --strategies all that a
    device has experts for, of 2 and 4."""
    strategies: bool = False
    """Compare all ways to overlap in one table, and name the best of each step."""
    buckets: str | None = None
    """With --strategies: the steps, such as decode:32,decode:256,prefill:8192; default that of
    --phase and --tokens."""
    loop: Literal["unrolled", "scanned"] = "unrolled"
    """Layers one after another in the program, or one loop over stacked layers."""
    weights: Weights = "bf16"
    """How weights are held: fp8 as DeepSeek-V3's, int8 with a factor for each output, int4 in
    groups of 128, or the experts in mxfp4 as gpt-oss'."""
    cache_dtype: CacheDtype | None = None
    """Hold keys and values in 8 bits."""
    kernels: KernelChoice = "auto"
    """Kernels for attention and experts, as `tbo-jax decode` has them; --against compares reports
    of any."""
    layers: int | None = None
    """Compile only so many layers; default 4 unrolled, all scanned."""
    transport: Transport = "all_to_all"
    """Of the expert exchange."""
    tensor_parallel: int = 1
    """Devices that share the attention and the feed-forward of a rank."""
    link_gbps: float | None = None
    """Gigabytes per second that a GPU sends within its node, or a link of a TPU in one direction;
    default the target's."""
    nodes: int = 1
    """Nodes of GPUs, each as --target says."""
    node_link_gbps: float | None = None
    """Gigabytes per second that a GPU sends to other nodes; default the target's."""
    rates: RateKind = "achieved"
    """Prices: what others measured of real kernels and collectives, or what the data sheet says."""
    collective_cores: int | None = None
    """Multiprocessors of a GPU that a collective takes from what runs beside it; default the
    target's."""
    json: Path | None = None
    """Write the report here."""
    trace: Path | None = None
    """Write a Chrome trace here, for ui.perfetto.dev."""
    plot: Path | None = None
    """Draw the two lanes here, .png or .svg; needs the extra "plot"."""
    html: Path | None = None
    """Write a page here to look at the lanes, figures and findings in a browser."""
    profile: Path | None = None
    """A folder of jax.profiler.trace, of this step on a real machine: what was measured, too."""
    against: Path | None = None
    """A report that --json wrote: print what changed, and exit with 1 if something got worse."""
    tolerance: float = TOLERANCE
    """With --against: the share by which a quantity may get worse."""
    dump_hlo: Path | None = None
    """Write the compiled programs into this folder."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress on stderr."""
    list_targets: bool = False
    """Print the machines and the public shapes, and stop."""


def counts_of(text: str, option: str = "--micro-batches") -> list[int]:
    """1,2 -> [1, 2]."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"{option} {text!r}: expected numbers from 1, such as 1,2")
    return list(dict.fromkeys(counts))


def strategies_of(args: Arguments, experts: int) -> list[Strategy]:
    """What to compile, for a device with so many experts.

    Raises:
        ValueError: a number is none, or there are more chunks than experts.
    """
    chunks = [] if args.expert_chunks is None else counts_of(args.expert_chunks, "--expert-chunks")
    if chunks and max(chunks) > max(1, experts):
        raise ValueError(
            f"--expert-chunks {args.expert_chunks}: expected {experts} at most, the experts of a "
            "device"
        )
    if args.strategies and args.expert_chunks is None and args.phase != "train":
        chunks = [count for count in CHUNKS if count <= experts]
    found = [Strategy(count) for count in counts_of(args.micro_batches)]
    found += [Strategy(expert_chunks=count) for count in chunks]
    return sorted(set(found), key=lambda one: (one.expert_chunks, one.micro_batches))


def steps_of(args: Arguments) -> list[StepShape]:
    """The steps to compare.

    Raises:
        ValueError: `buckets` is not understood, or there is nothing to compare.
    """
    if args.buckets is None:
        return [StepShape(args.phase, args.tokens, args.context, args.remat, args.cache_dtype)]
    if not args.strategies:
        raise ValueError(f"--buckets {args.buckets} needs --strategies")
    steps = []
    for part in args.buckets.split(","):
        phase, _, tokens = part.partition(":")
        if phase not in get_args(Phase) or not tokens.isdecimal():
            known = ", ".join(get_args(Phase))
            raise ValueError(
                f"--buckets {part!r}: expected a phase ({known}) and tokens, such as decode:256"
            )
        steps.append(
            StepShape(cast(Phase, phase), int(tokens), args.context, args.remat, args.cache_dtype)
        )
    if len(steps) > 1:
        given = {"html": args.html, "plot": args.plot, "trace": args.trace, "profile": args.profile}
        given |= {"json": args.json, "against": args.against, "dump-hlo": args.dump_hlo}
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"--{option} is for one step, --buckets has {len(steps)}")
    return steps


def run(args: Arguments) -> list[Change]:
    """Compile and report; returns what changed, with `against`."""
    steps = steps_of(args)
    if args.buckets is not None:  # one step: what follows is of it
        args = replace(args, phase=steps[0].phase, tokens=steps[0].tokens)
    counts_of(args.micro_batches)
    if args.plot is not None:
        from tbo_jax.schedule.plot import check_path

        check_path(args.plot)
    for option, path in {"json": args.json, "trace": args.trace, "html": args.html}.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{option} {path}: {path.parent} is no folder")
    before = None if args.against is None else read_report(args.against)
    profile = None if args.profile is None else read_profile(args.profile)
    target = find_target(
        args.target,
        nodes=args.nodes,
        link_gbps=args.link_gbps,
        node_link_gbps=args.node_link_gbps,
        rates=args.rates,
        collective_cores=args.collective_cores,
    )
    scanned = args.loop == "scanned"
    whole = read_shape(args.config)
    layers = args.layers
    if layers is None:
        layers = whole.num_layers if scanned else min(UNROLLED_LAYERS, whole.num_layers)
    setting = setting_of(args, target, layers)
    if before is not None:
        check_settings(before.get("setting"), setting)
    config = read_shape(args.config, layers)
    strategies = strategies_of(args, config.num_experts // target.num_devices)
    reports: list[ScheduleReport] = []
    with progress_bar("compiling", not args.quiet) as update:
        update(0, len(strategies) * len(steps))
        for shape in steps:
            for strategy in strategies:
                reports.append(
                    inspect_model(
                        config,
                        target,
                        shape,
                        micro_batches=strategy.micro_batches,
                        expert_chunks=strategy.expert_chunks,
                        scanned=scanned,
                        transport=args.transport,
                        tensor=args.tensor_parallel,
                        weights=args.weights,
                        kernels=args.kernels,
                    )
                )
                update(len(reports), len(strategies) * len(steps))
    step = ""  # several are named in the table
    if len(steps) == 1:
        of_each = "device" if args.tensor_parallel == 1 else "rank"
        remat = " with remat" if args.remat else ""
        step = f"{args.phase}{remat}, {args.tokens} tokens a {of_each}, "
    held = "" if args.weights == "bf16" else f", weights in {args.weights}"
    if args.cache_dtype is not None:
        held += f", cache in {args.cache_dtype}"
    if args.kernels != "auto":
        held += f", kernels of {args.kernels}"
    title = (
        f"{args.config}, {layers} of {whole.num_layers} layers {args.loop}; {step}context "
        f"{args.context}, {args.transport}{held}; {target.name}, jax {jax.__version__}"
    )
    if args.strategies:
        of_step = [
            reports[at : at + len(strategies)] for at in range(0, len(reports), len(strategies))
        ]
        of_steps = list(zip(steps, of_step, strict=True))
        print_strategies(title, of_steps, target, whole.num_layers - layers)
        if len(steps) > 1:
            return []
    else:
        print_report(title, reports, target, whole.num_layers - layers)
    values = as_json(title, setting, target, reports)
    measured: dict[int, MeasuredReport] = {}
    if args.profile is not None and profile is not None:
        modelled = {r.micro_batches: r for r in reports if r.expert_chunks == 1}
        texts = {count: r.hlo for count, r in modelled.items()}
        measured = measure_steps(args.profile, profile, texts)
        print_measured(measured, modelled, profile.note)
        values["measured"] = [m.to_json() for m in measured.values()]
    changes: list[Change] = []
    if before is not None:
        changes = compare(before, values, args.tolerance)
        print_changes(changes, before, values)
    write_files(args, title, values, target, reports, measured)
    return changes


def setting_of(args: Arguments, target: Target, layers: int) -> dict[str, Any]:
    """Which step a report is of; `layers` are compiled."""
    asked = {name: getattr(args, name) for name in SETTING}
    return asked | {"target": target.name, "layers": layers}


def as_json(
    title: str, setting: Mapping[str, Any], target: Target, reports: list[ScheduleReport]
) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "schema": SCHEMA,
        "title": title,
        "setting": dict(setting),
        "versions": {name: metadata.version(name) for name in ("tbo_jax", "jax", "jaxlib")},
        "rates": asdict(target.rates),
        "reports": [r.to_json() for r in reports],
    }


def write_files(
    args: Arguments,
    title: str,
    values: Mapping[str, Any],
    target: Target,
    reports: list[ScheduleReport],
    measured: Mapping[int, MeasuredReport] | None = None,
) -> None:
    """Whatever the command line asks for beside the table; `values` are for `--json`."""
    timelines = {program_name(r.micro_batches, r.expert_chunks): r.timeline for r in reports}
    timelines |= timelines_of((measured or {}).values())
    if args.json is not None:
        args.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if args.trace is not None:
        write_trace(args.trace, timelines)
    if args.plot is not None:
        from tbo_jax.schedule.plot import plot

        times = "modelled and measured time" if measured else "modelled time"
        plot(args.plot, timelines, title=title, times=times)
    if args.html is not None:
        left_out = read_shape(args.config).num_layers - values["setting"]["layers"]
        write_page(args.html, title, reports, facts_of(values, target), left_out)
    if args.dump_hlo is not None:
        args.dump_hlo.mkdir(parents=True, exist_ok=True)
        for r in reports:
            of = f"chunks{r.expert_chunks}" if r.expert_chunks > 1 else f"x{r.micro_batches}"
            name = f"{args.phase}_{args.tokens}_{of}_{args.loop}.hlo"
            (args.dump_hlo / name).write_text(r.hlo, encoding="utf-8")


def print_names() -> None:
    """The machines and shapes that can be named."""
    print("targets:", *list_targets(), sep="\n  ")
    print("shapes:", *list_presets(), sep="\n  ")


def main(words: list[str], name: str) -> int:
    """Run the command `name` with its words; returns the exit status."""

    def command() -> int:
        args = tyro.cli(Arguments, description=__doc__, prog=name, args=words)
        if args.quiet:
            silence_libraries()
        # The host only compiles. With another default, JAX looks for devices, and drops the plugin
        # of a platform that has none.
        jax.config.update("jax_platforms", "cpu")
        # libtpu only compiles here: it need not ask a cloud for metadata, nor be alone on the
        # machine.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        if args.list_targets:
            print_names()
            return 0
        return int(any(change.worse for change in run(args)))

    return run_command(name, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m tbo_jax.schedule"))
