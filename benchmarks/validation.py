"""Compare what the schedule's model predicts with what others published.

Collectives need nothing but the model of the links. Steps are compiled for the machine in question,
which needs the extra "cuda12" and no GPU:

    python benchmarks/validation.py            # collectives, in a second
    python benchmarks/validation.py --steps    # also steps: some ten minutes

Nothing here is fitted to a row: every rate is that of `tbo_jax/schedule/targets`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from tbo_jax.parallel.exchange import Transport
from tbo_jax.parallel.exchange.ragged import expected_destinations
from tbo_jax.schedule.cost import Work
from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.model_step import (
    StepShape,
    attention_work,
    expected_turns,
    expert_work,
    inspect_model,
    read_shape,
)
from tbo_jax.schedule.report import layer_seconds
from tbo_jax.schedule.targets import find_target
from tbo_jax.schedule.timeline import simulate

MIB = 2**20


@dataclass(frozen=True)
class Collective:
    """A published time of a collective."""

    what: str
    source: str
    measured: float  # seconds
    target: str
    kind: str
    sent: float  # bytes that a device sends
    devices: tuple[int, ...]
    nodes: int = 1
    link_gbps: float | None = None  # of a machine that is not among the targets

    def predicted(self) -> float:
        """Seconds, by the model of the links."""
        target = find_target(self.target, nodes=self.nodes, link_gbps=self.link_gbps)
        links, groups = target.rates.links, (self.devices,)
        return links.seconds(self.kind, self.sent, groups) + links.start(groups)


def _all_reduce(size: float, devices: int) -> float:
    return 2 * size * (devices - 1) / devices


# What DeepSeek-V3 sends to other devices for each token, 8 experts of 256 drawn evenly.
def _dispatched(tokens: int, devices: int, bytes_each: int) -> float:
    return tokens * expected_destinations(devices, 256, 8) * bytes_each


COLLECTIVES = (
    Collective(
        "all-reduce, 64 MiB, 2 nodes of 8 H100", "NVIDIA/nccl-tests #309", 466.1e-6,
        "h100x8", "all-reduce", _all_reduce(64 * MIB, 16), tuple(range(16)), nodes=2,
    ),
    Collective(
        "all-reduce, 1 GiB, 2 nodes of 8 H100", "NVIDIA/nccl-tests #309", 4484.9e-6,
        "h100x8", "all-reduce", _all_reduce(1024 * MIB, 16), tuple(range(16)), nodes=2,
    ),
    Collective(
        "all-reduce, 1 MiB, 2 nodes of 8 H100", "NVIDIA/nccl-tests #309", 71.9e-6,
        "h100x8", "all-reduce", _all_reduce(MIB, 16), tuple(range(16)), nodes=2,
    ),
    Collective(
        "all-reduce, 64 MiB, 8 H100", "Azure/AI-benchmarking-guide", 325e-6,
        "h100x8", "all-reduce", _all_reduce(64 * MIB, 8), tuple(range(8)),
    ),
    Collective(
        "all-to-all, 524 MB, 4 H100", "NVIDIA/nccl #2169", 1174e-6,
        "h100x4", "all-to-all", 524.288e6 * 3 / 4, tuple(range(4)),
    ),
    Collective(
        "all-gather, 537 MB, 8 H100, by JAX", "How to Scale Your Model", 1.5e-3,
        "h100x8", "all-gather", 536.9e6 * 7 / 8, tuple(range(8)),
    ),
    Collective(
        "all-to-all, 1 GiB, 2 nodes of 8 H200", "awslabs, p5en, NCCL 2.30", 1024 * MIB / 91e9,
        "h200x8", "all-to-all", 1024 * MIB * 15 / 16, tuple(range(16)), nodes=2,
    ),
    Collective(
        "dispatch of 2,048 tokens, 8 of GB200, bfloat16", "TensorRT-LLM, blog 18", 311.8e-6,
        "b200x8", "ragged-all-to-all", _dispatched(2048, 8, 2 * 7168), tuple(range(8)),
    ),
    Collective(
        "dispatch of 128 tokens, 8 of GB200, bfloat16", "TensorRT-LLM, blog 18", 31.7e-6,
        "b200x8", "ragged-all-to-all", _dispatched(128, 8, 2 * 7168), tuple(range(8)),
    ),
    Collective(
        "dispatch of 128 tokens, 8 nodes of 8 H800, FP8", "deepseek-ai/DeepEP", 173e-6,
        "h100x8", "ragged-all-to-all", _dispatched(128, 64, 7168), tuple(range(64)), nodes=8,
        link_gbps=160,
    ),
    Collective(
        "combine of 128 tokens, 8 nodes of 8 H800, bfloat16", "deepseek-ai/DeepEP", 314e-6,
        "h100x8", "ragged-all-to-all", _dispatched(128, 64, 2 * 7168), tuple(range(64)), nodes=8,
        link_gbps=160,
    ),
    Collective(
        "all-gather, 34 MB over a line of 4 chips of v5e", "How to Scale Your Model", 680e-6,
        "v5e:4x4", "all-gather", 34e6 * 3 / 4, (0, 1, 2, 3),
    ),
    Collective(
        "all-gather, 101 MB, 2x2 chips of tpu7x", "AI-Hypercomputer/accelerator-microbenchmarks",
        576e-6, "tpu7x:2x2x1", "all-gather", 0.1007e9, tuple(range(0, 8, 2)),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step."""

    one: float  # with one micro-batch
    two: float
    launches: float  # of `two`: starting kernels


@dataclass(frozen=True)
class Step:
    """A published time of a step of DeepSeek-V3, or how much faster two micro-batches made it."""

    what: str
    source: str
    target: str
    nodes: int
    shape: StepShape
    step: float | None  # seconds, with two micro-batches
    gain: tuple[float, float] | None  # from, to: throughput with two over that with one, less 1
    link_gbps: float | None = None
    # To how many other nodes a token goes, where the exchange crosses to each node once. None: a
    # message to each device, as in the decode kernels of DeepEP and in a ragged exchange here.
    crossings: float | None = None

    def predicted(self, transport: Transport) -> Prediction:
        """The step of all layers, with one micro-batch and with two."""
        target = find_target(self.target, nodes=self.nodes, link_gbps=self.link_gbps)
        whole = read_shape("deepseek-v3")
        config = read_shape("deepseek-v3", 4)
        seconds, launches = [], 0.0
        for count in (1, 2):
            report = inspect_model(
                config, target, self.shape, micro_batches=count, transport=transport
            )
            # Once more, with experts and dispatch in 8 bits.
            tokens, devices = self.shape.tokens // count, target.num_devices
            destinations = expected_destinations(devices, 256, 8)
            if self.crossings is not None:  # as many bytes over the adapters
                elsewhere = devices - devices // self.nodes
                destinations = self.crossings * (devices - 1) / elsewhere
            timeline = simulate(
                parse(report.hlo),
                target.rates,
                expected_turns(config, devices, tokens, self.shape),
                attention_work(config, tokens, self.shape)
                | eight_bits(expert_work(config, devices, tokens)),
                ragged_rows=0.75 * tokens * destinations,
            )
            layer = layer_seconds(timeline)
            assert layer is not None
            seconds.append(timeline.step + (whole.num_layers - 4) * layer)
            kernels = sum(event.lane == "compute" for event in timeline.events)
            launches = kernels * target.rates.launch_seconds * whole.num_layers / 4
        return Prediction(seconds[0], seconds[1], launches)


def eight_bits(kernels: Mapping[str, Work]) -> dict[str, Work]:
    """The same kernels with half of the bytes, and products at the rate of FP8."""
    return {
        name: dataclasses.replace(work, bytes=work.bytes / 2, of_types=(("f8", work.flops),))
        for name, work in kernels.items()
    }


# Four of eight groups of experts, two groups on each of four nodes: a node is left out with
# probability C(6, 4) / C(8, 4), and three of the nodes are others.
CROSSINGS = 3 * (1 - math.comb(6, 4) / math.comb(8, 4))
LMSYS = "LMSYS, 96 H100, May 2025"
PROFILE = "deepseek-ai/profile-data, as LMSYS gives it"
STEPS = (
    Step("decode, 256 tokens a device, 2,000 of context, EP72", LMSYS, "h100x8", 8,
         StepShape("decode", 256, 2000), 91.8e-3, (0.255, 0.255)),
    Step("decode, 32 tokens a device, 2,000 of context, EP72", LMSYS, "h100x8", 8,
         StepShape("decode", 32, 2000), None, (-0.27, -0.27)),
    Step("decode, 128 tokens a device, 4,096 of context, EP128", PROFILE, "h100x8", 16,
         StepShape("decode", 128, 4096), 55.1e-3, None, link_gbps=160),
    Step("prefill, 8,192 tokens a device, prompts of 4,096, EP32", LMSYS, "h100x8", 4,
         StepShape("prefill", 8192, 4096), None, (0.27, 0.35), crossings=CROSSINGS),
    Step("prefill, 16,384 tokens a device, prompts of 4,096, EP32", LMSYS, "h100x8", 4,
         StepShape("prefill", 16384, 4096), 2.606, None, crossings=CROSSINGS),
    Step("the same, experts balanced perfectly", LMSYS, "h100x8", 4,
         StepShape("prefill", 16384, 4096), 2.209, None, crossings=CROSSINGS),
)  # fmt: skip


def collective_rows() -> list[dict[str, Any]]:
    """The published and the modelled time of each collective, in seconds."""
    return [
        {
            "what": c.what, "source": c.source, "measured": c.measured, "predicted": c.predicted(),
        }
        for c in COLLECTIVES
    ]  # fmt: skip


def step_rows(transport: Transport) -> list[dict[str, Any]]:
    """The published and the modelled steps and gains."""
    rows, known = [], {}
    for step in STEPS:
        key = (step.target, step.nodes, step.shape, step.link_gbps)
        if key not in known:
            print(f"compiling: {step.what}", file=sys.stderr, flush=True)
            known[key] = step.predicted(transport)
        found = known[key]
        rows.append(
            {
                "what": step.what, "source": step.source, "measured": step.step,
                "predicted": found.two, "measured_gain": step.gain,
                "predicted_gain": found.one / found.two - 1, "launches": found.launches,
            }
        )  # fmt: skip
    return rows


@dataclass(frozen=True)
class Arguments:
    """Command line."""

    steps: bool = False
    """Also compile steps (ten minutes); needs the extra "cuda12"."""
    transport: Transport = "ragged_all_to_all"
    """Of the expert exchange in the steps."""
    json: Path | None = None
    """Write the rows here."""


def main(args: Arguments) -> None:
    """Print the tables of docs/validation.md."""
    rows = {"collectives": collective_rows()}
    print("| collective | published | modelled | modelled / published |\n|---|---|---|---|")
    for row in rows["collectives"]:
        print(
            f"| {row['what']} ({row['source']}) | {row['measured'] * 1e6:,.0f} us "
            f"| {row['predicted'] * 1e6:,.0f} us | {row['predicted'] / row['measured']:.2f} |"
        )
    if args.steps:
        # The host only compiles.
        jax.config.update("jax_platforms", "cpu")
        rows["steps"] = step_rows(args.transport)
        print("\n| step | published | modelled | gain published | gain modelled |")
        print("|---|---|---|---|---|")
        for row in rows["steps"]:
            step = f"{row['measured'] * 1e3:,.1f} ms" if row["measured"] else ""
            gain = row["measured_gain"]
            shown = "" if gain is None else " to ".join(f"{g:+.1%}" for g in sorted(set(gain)))
            print(
                f"| {row['what']} ({row['source']}) | {step} | {row['predicted'] * 1e3:,.1f} ms "
                f"| {shown} | {row['predicted_gain']:+.1%} |"
            )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
