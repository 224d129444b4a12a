"""`inspect` and what the report says, from dumps and from programs of this machine's CPU."""

from __future__ import annotations

import json
import lzma
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tbo_jax import ModelRunner
from tbo_jax.checkpoint.load import read_config
from tbo_jax.overlap.config import Strategy
from tbo_jax.parallel.sharding import RANKS, make_mesh
from tbo_jax.schedule import Target, find_target, inspect
from tbo_jax.schedule.hlo import parse
from tbo_jax.schedule.links import TorusLinks
from tbo_jax.schedule.model_step import StepShape, abstract_model, last_layers, layer_bytes
from tbo_jax.schedule.report import (
    ScheduleReport,
    _check_mosaic,
    _device_ids,
    _lower,
    layer_body,
    layer_seconds,
    report,
    scope_of,
)
from tbo_jax.schedule.table import print_report
from tbo_jax.schedule.timeline import simulate
from tests.golden_cases import Golden
from tests.schedule.hlo_texts import GROUPS, RATES, module, program

FIXTURES = Path(__file__).parent / "fixtures"
MEMORY = SimpleNamespace(
    temp_size_in_bytes=3, argument_size_in_bytes=20, output_size_in_bytes=11,
    alias_size_in_bytes=10,
)  # fmt: skip


def compiled(text: str) -> SimpleNamespace:
    return SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: MEMORY)


def of_fixture(name: str, target: str = "h100x8") -> ScheduleReport:
    text = lzma.decompress((FIXTURES / f"{name}.hlo.xz").read_bytes()).decode()
    return report(compiled(text), find_target(target), Strategy(2), {}, {}, 1.5)


def of(*ops: tuple) -> ScheduleReport:
    target = replace(find_target("h100x2"), rates=RATES)
    return report(compiled(program(ops)), target, Strategy(), {}, {}, 0.0)


def test_sums() -> None:
    found = of_fixture("gpu_unrolled")
    assert found.hidden + found.exposed == pytest.approx(found.communication)
    assert found.step >= max(found.compute, found.communication)
    assert found.step == pytest.approx(found.compute + found.exposed)
    assert 0 < found.hidden_share < 1
    assert found.temporary_bytes == 3 and found.aliased_bytes == 10
    assert found.needed_bytes == 24 and found.memory == 84942979072
    assert found.target == "h100x8" and found.compile_seconds == 1.5
    assert found.sent_bytes == sum(c.bytes * c.turns for c in found.collectives)


@pytest.mark.parametrize("name", ["gpu_unrolled", "gpu_scanned"])
def test_all_but_the_last_combine_is_hidden(name: str) -> None:
    *others, last = of_fixture(name).collectives
    assert last.exposed > 0 and last.scope.endswith("micro_batch_1/combine")
    assert last.reason
    assert [c.exposed for c in others] == pytest.approx([0.0] * len(others), abs=1e-9)
    assert not any(c.reason for c in others)


def test_scanned_layers_are_one_line_each() -> None:
    found = of_fixture("gpu_scanned")
    body = layer_body(found.collectives)
    assert len(body) == 4  # two of each micro-batch
    assert {c.turns for c in body} == {2}
    assert {c.scope.split("/")[0] for c in body} == {"layers"}


def test_a_ragged_message_keeps_its_stage() -> None:
    """XLA:GPU forgets where it comes from; what it writes to is made there."""
    scope = "jit(step)/layer_1/micro_batch_0"
    text = module(
        f"""  %p = f32[8]{{0}} parameter(0)
  %n = s64[2]{{0}} parameter(1), metadata={{op_name="{scope}/attend/stack"}}
  %rows = f32[8]{{0}} copy(%p), metadata={{op_name="{scope}/attend/concatenate"}}
  %new = f32[8]{{0}} custom-call(), metadata={{op_name="{scope}/dispatch/cond/branch_0_fun/empty"}}
  %send = ((f32[8]{{0}}), f32[8]{{0}}) ragged-all-to-all-start(%rows, %new, %n, %n, %n, %n), {GROUPS}
  ROOT %sent = f32[8]{{0}} ragged-all-to-all-done(%send)"""
    )
    target = replace(find_target("h100x2"), rates=RATES)
    (found,) = report(compiled(text), target, Strategy(), {}, {}, 0.0).collectives
    assert found.scope == "layer_1/micro_batch_0/dispatch"


def test_an_unrolled_layer_stands_for_all() -> None:
    body = layer_body(of_fixture("gpu_unrolled").collectives)
    assert len({c.scope.split("/")[0] for c in body}) == 1


def test_a_program_without_scopes_shows_all() -> None:
    found = of(("sync", 3), ("sync", 4))
    assert layer_body(found.collectives) == list(found.collectives)
    assert layer_seconds(found.timeline) is None


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/shard_map/layer_3/micro_batch_1/dispatch/all_to_all",
         "layer_3/micro_batch_1/dispatch"),
        ("jit(step)/while/body/layers/micro_batch_0/run_experts/x", "layers/micro_batch_0/run_experts"),
        ("jit(step)/gather", ""),
    ],
)  # fmt: skip
def test_scope(op_name: str, scope: str) -> None:
    assert scope_of(op_name) == scope


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        ([("sync", 4)], "runs in line with compute"),
        ([("start", "a", 4), ("done", "a")], "nothing computes between"),
        ([("start", "a", 4), ("compute", 1), ("done", "a")], "only 1000000.0 us compute between"),
        ([("start", "a", 4), ("start", "b", 4), ("compute", 5), ("done", "a"), ("done", "b")],
         "5000000.0 us compute between its start and its done, but it is 4000000.0 us in the queue"),
        ([("start", "a", 4), ("compute", 4), ("done", "a")], ""),
    ],
)  # fmt: skip
def test_reasons(ops: list, reason: str) -> None:
    found = of(*ops).collectives[-1]
    assert reason in found.reason
    assert bool(found.reason) == (found.exposed > 0)


def test_ceiling() -> None:
    """Over one micro-batch's step, by what the split one computes and sends."""
    assert of(("sync", 4), ("compute", 4)).ceiling(8.0) == pytest.approx(2.0)
    assert of(("compute", 4)).ceiling(3.0) == pytest.approx(0.75)
    assert of().ceiling(1.0) == 1.0


def test_json_is_plain() -> None:
    values = json.loads(json.dumps(of_fixture("gpu_unrolled").to_json()))
    assert values["times"] == "modelled"
    assert values["collectives"][0]["kind"] == "all-to-all"
    assert "hlo" not in values and "timeline" not in values


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    target = find_target("h100x8")
    found = of_fixture("gpu_unrolled")
    print_report("the title", [found, found], target)
    out = capsys.readouterr().out
    for part in (
        "the title",
        "modelled",
        "2 micro-batches",
        "hidden",
        "dispatch",
        "GB/s of link a device",
    ):
        assert part in out
    assert "extrapolated" not in out  # two layers are too few


def test_a_step_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = replace(of_fixture("gpu_unrolled"), needed_bytes=100 * 10**9)
    print_report("the title", [found], find_target("h100x8"))
    assert "does not fit: 100.0 GB of 84.9 GB" in capsys.readouterr().out


@pytest.mark.parametrize(("layers", "fits"), [(2, True), (4, False)])
def test_all_layers_have_to_fit(
    layers: int, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replace(
        of_fixture("gpu_unrolled"), needed_bytes=10_000_000_000, layer_bytes=20_000_000_000
    )
    print_report("the title", [found], find_target("h100x8"), layers)
    printed = capsys.readouterr().out
    assert f"{10 + 20 * layers}.0 GB" in printed
    assert ("does not fit: 90.0 GB with all layers of 84.9 GB" in printed) == (not fits)


CPU = Target("cpu x4", "cpu", 4, 1, RATES, {}, "")


def test_inspect_a_function_of_ones_own() -> None:
    mesh = make_mesh(4)
    placed = NamedSharding(mesh, PartitionSpec(RANKS))

    def step(x):
        return jax.lax.all_to_all(x.reshape(4, -1), RANKS, 0, 0) * 2

    specs = PartitionSpec(RANKS)
    jitted = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=placed)
    found = inspect(jitted, CPU, x)
    again = inspect(jitted.lower(x), CPU)
    (collective,) = found.collectives
    assert collective.kind == "all-to-all"
    assert collective.exposed == pytest.approx(collective.seconds)  # XLA:CPU: in line
    assert found.communication == again.communication > 0
    assert inspect(jitted.lower(x).compile(), CPU).communication == found.communication


def test_a_function_that_is_not_jitted_is_jitted_for_the_target(monkeypatch) -> None:
    monkeypatch.setattr(Target, "mesh", lambda self: make_mesh(4))
    found = inspect(lambda x, w: jnp.tanh(x @ w), CPU, jnp.ones((4, 8)), jnp.ones((8, 2)))
    assert found.flops == 2 * 4 * 8 * 2  # on each device: nobody said how to share it out
    assert not found.collectives


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("h100x8", "compiled for platform 'cpu', h100x8 is 'cuda': give its arguments shardings"),
        (CPU, r"compiled for 1 device\(s\), cpu x4 has 4"),
        (replace(CPU, num_devices=1, description={"device_kind": "a"}), "for 'cpu', cpu x4 is 'a'"),
    ],
)
def test_a_step_of_another_machine_is_refused(target, message) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(ValueError, match=message):
        inspect(lowered.compile(), target)


@pytest.mark.parametrize(
    ("target", "lowered_here", "version", "refused"),
    [
        ("b200x2", True, (0, 12, 0), False),
        ("b200x2", True, (0, 10, 2), True),  # asks the mesh, which has no compute capability
        ("b200x2", False, (0, 12, 0), True),
        ("h100x2", False, (0, 10, 2), False),  # what JAX takes where there is no GPU
        ("v5e", False, (0, 10, 2), False),
    ],
)
def test_mosaic_kernels_of_another_gpu_are_refused(
    target: str, lowered_here: bool, version: tuple[int, ...], refused: bool, monkeypatch
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    text = module(
        "  %p = f32[8]{0} parameter(0)\n  ROOT %k = f32[8]{0} custom-call(%p), "
        'custom_call_target="mosaic_gpu_v2"'
    )
    raises = pytest.raises(ValueError, match="capability 9.0, b200x2 is 10.0: expected a function")
    with raises if refused else nullcontext():
        _check_mosaic(compiled(text), find_target(target), lowered_here)
    _check_mosaic(
        compiled(module("  ROOT %p = f32[8]{0} parameter(0)")), find_target(target), False
    )


@pytest.mark.parametrize(
    ("target", "device"), [("b200x2", "the first"), ("h100x2", None), ("v5e", None)]
)
def test_a_step_is_lowered_for_the_devices_of_its_target(target, device, monkeypatch) -> None:
    monkeypatch.setattr(Target, "devices", lambda self: jax.devices()[1:])
    seen = []
    traced = SimpleNamespace(lower=lambda: seen.append(jax.config.jax_default_device))
    _lower(traced, find_target(target))
    assert seen == [jax.devices()[1] if device else None]


def test_the_devices_are_numbered_as_the_machine_does(monkeypatch) -> None:
    """A mesh may be laid out for the links, and HLO counts along it."""
    devices = [jax.devices()[i] for i in (2, 0, 3, 1)]
    mesh = make_mesh(devices=devices)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(RANKS)))
    step = jax.jit(lambda x: x + 1).lower(x).compile()
    assert _device_ids(step, CPU) == [2, 0, 3, 1]
    assert _device_ids(step, replace(CPU, num_devices=8)) is None
    pairs = "source_target_pairs={{0,1},{2,3}}"  # of devices 2 and 0, 3 and 1
    text = parse(
        module(
            f"  %p = f32[2]{{0}} parameter(0)\n  ROOT %c = f32[2]{{0}} collective-permute(%p), {pairs}"
        )
    )
    line = TorusLinks(dims=(4,), wraps=(False,), bandwidth=2.0, start_seconds=0.0)
    rates = replace(RATES, links=line)
    assert simulate(text, rates, {}).communication == 4  # neighbours, 8 bytes a link
    # From 2 to 0 and from 3 to 1: both go from 2 to 1.
    assert simulate(text, rates, {}, device_ids=[2, 0, 3, 1]).communication == 8


def test_inspect_refuses_what_comes_too_late() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(ValueError, match="lowered already"):
        inspect(lowered, CPU, jnp.ones(3))
    with pytest.raises(ValueError, match="compiled already"):
        inspect(lowered.compile(), CPU, options={"xla_dump_to": "x"})


def test_training_is_reported_by_pass() -> None:
    found = of_fixture("gpu_unrolled")
    assert found.hidden_by_pass() == {}
    one = replace(found.collectives[0], seconds=2.0, turns=3, hidden=1.0)
    scopes = ("layer_0/micro_batch_0/dispatch", "layer_0/micro_batch_0/dispatch (backward)", "")
    of_each = [replace(one, scope=scope) for scope in scopes]
    training = replace(found, collectives=(*of_each, of_each[1]))
    assert training.hidden_by_pass() == {
        "forward": (6.0, 3.0), "backward": (12.0, 6.0), "sums": (6.0, 3.0),
    }  # fmt: skip
    print_report("title", [training], find_target("h100x8"))


@pytest.mark.parametrize(("name", "tensor"), [("qwen3_moe", 1), ("llama", 2), ("deepseek_v3", 1)])
def test_bytes_of_a_layer_are_what_another_one_takes(name: str, tensor: int) -> None:
    config, _ = read_config(Golden(name).folder, jnp.float32)
    mesh, shape = make_mesh(4, tensor=tensor), StepShape("decode", 6, 100)

    sizes = []
    for layers in (1, 2):
        runner = ModelRunner(
            abstract_model(last_layers(config, layers), False), shape.cache, mesh=mesh
        )
        sizes.append(runner.lower(shape.bucket).compile().memory_analysis())
    grown = sizes[1].argument_size_in_bytes - sizes[0].argument_size_in_bytes
    assert layer_bytes(config, mesh, shape) == grown
