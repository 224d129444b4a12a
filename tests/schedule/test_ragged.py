"""Steps with the ragged transport, compiled for GPUs: payloads are kept apart, and still hidden.

Needs the plugin of `tbo-jax[cuda12]`, and no GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

from tbo_jax.schedule import cost
from tbo_jax.schedule.hlo import Module, parse
from tbo_jax.schedule.model_step import StepShape, inspect_model, read_shape
from tbo_jax.schedule.program import Program
from tbo_jax.schedule.targets import find_target
from tests.gpu_code import needs_compiler, no_triton_warnings

pytestmark = needs_compiler

QWEN3, NODE = "qwen3-30b-a3b", find_target("h100x8")
DEEPSEEK = "deepseek-v3"
NODES = find_target("h100x8", nodes=4, link_gbps=300, node_link_gbps=45)
PREFILL, DECODE = StepShape("prefill", 8192, 4096), StepShape("decode", 256, 4096)
# With an overlap limit of 2 and payloads that were not kept apart, 4 layers, jax 0.10.2:
# 97.2, 94.0, 96.3 and 76.3 % were hidden. The scan: all layers.
CASES = {
    "Qwen3, decode": (QWEN3, NODE, DECODE, False, 0.972),
    "Qwen3, prefill": (QWEN3, NODE, PREFILL, False, 0.940),
    "Qwen3, prefill, scanned": (QWEN3, NODE, PREFILL, True, 0.995),
    "DeepSeek-V3, decode": (DEEPSEEK, NODES, DECODE, False, 0.963),
    "DeepSeek-V3, prefill": (DEEPSEEK, NODES, PREFILL, False, 0.763),
}


def most_in_flight(module: Module, program: Program) -> int:
    """Collectives that are on their way at a time, the one that a loop's turn hands on included."""
    most = 0
    for name in module.computations:
        flying: set[str] = set()
        for role, step in program.steps(name):
            if role == "issue":
                flying.add(step)
            elif role == "wait":
                flying.discard(step)
            most = max(most, len(flying) + (role == "synchronous"))
    return most


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_is_in_flight_and_hidden(case: tuple[Any, ...]) -> None:
    name, target, shape, scanned, before = case
    config = read_shape(name, None if scanned else 4)
    # The norm of Flax relies on promotion in bfloat16.
    with jax.numpy_dtype_promotion("standard"), no_triton_warnings():
        report = inspect_model(
            config, target, shape, micro_batches=2, scanned=scanned, transport="ragged_all_to_all"
        )
    module = parse(report.hlo)
    payloads = [
        i
        for computation in module.computations.values()
        for i in computation.instructions
        if i.opcode == "ragged-all-to-all-start" and cost.starts_collective(module, i)
    ]
    assert len(payloads) >= 4  # two stages of two micro-batches
    assert most_in_flight(module, Program(module, target.rates, {}, {})) == 1
    named = {c.scope.rpartition("/")[2] for c in report.collectives if c.kind.startswith("ragged")}
    assert named == {"dispatch", "combine"}
    assert report.hidden_share > before - 0.02
