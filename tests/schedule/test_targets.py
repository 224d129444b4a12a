from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from tbo_jax.schedule import targets
from tbo_jax.schedule.links import NodeLinks
from tbo_jax.schedule.targets import RateKind, find_target, list_targets

GPUS, TPUS = ("a100", "b200", "h100", "h200"), ("tpu7x", "v5e", "v5p", "v6e")


def test_list() -> None:
    assert list_targets() == [
        "a100x1..8",
        "b200x1..8",
        "h100x1..8",
        "h200x1..8",
        "tpu7x:2x2x1",
        "v5e:2x4",
        "v5p:2x2x2",
        "v6e:2x4",
    ]


@pytest.mark.parametrize(
    "name, label, topology, devices",
    [
        ("h100x8", "h100x8", "1x1x8", 8),
        ("h100x1", "h100x1", "1x1x1", 1),
        ("v5e", "v5e:2x4", "v5e:2x4", 8),
        ("v5p:4x4x4", "v5p:4x4x4", "v5p:4x4x4", 64),
        ("tpu7x", "tpu7x:2x2x1", "tpu7x:2x2x1", 8),  # two devices a chip
    ],
)
def test_names(name: str, label: str, topology: str, devices: int) -> None:
    target = find_target(name)
    assert (target.name, target.topology) == (label, topology)
    assert (target.num_devices, target.num_nodes) == (devices, 1)
    assert target.platform == ("cuda" if name.startswith("h") else "tpu")


@pytest.mark.parametrize(
    "name, options, error",
    [
        ("h300x8", {}, "unknown target 'h300x8': expected a100x1..8, .*v6e:2x4"),
        ("", {}, "unknown target ''"),
        ("H100x8", {}, "unknown target 'H100x8'"),
        ("h100", {}, "target 'h100': expected h100x1 to h100x8"),
        ("h100x0", {}, "expected h100x1 to h100x8"),
        ("h100x9", {}, "expected h100x1 to h100x8"),
        ("h100:2x4", {}, "expected h100x1 to h100x8"),
        ("v5ex8", {}, "target 'v5ex8': name a slice, such as v5e:2x4"),
        ("v5e:0x4", {}, "target 'v5e:0x4': a slice without chips"),
        ("v5e", {"nodes": 2}, "target 'v5e': nodes are for GPUs; name a larger TPU slice"),
        ("h100x8", {"nodes": 0}, "nodes must be at least 1, got 0"),
        ("h100x8", {"link_gbps": 0.0}, "link_gbps must be positive, got 0.0"),
        ("h100x8", {"link_gbps": float("nan")}, "link_gbps must be positive, got nan"),
        ("h100x8", {"nodes": 2, "node_link_gbps": -1}, "node_link_gbps must be positive, got -1"),
        ("h100x8", {"node_link_gbps": 45}, "node_link_gbps is 45, and there is one node"),
        ("h100x8", {"collective_cores": 132}, "collective_cores must be 0 to 131, got 132"),
        ("h100x8", {"collective_cores": -1}, "collective_cores must be 0 to 131, got -1"),
        ("v5e", {"collective_cores": 1}, "collective_cores must be 0 to 0, got 1"),
    ],
)
def test_bad_names(name: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_target(name, **options)


def node_links(**options: Any) -> NodeLinks:
    links = find_target("h100x8", **options).rates.links
    assert isinstance(links, NodeLinks)
    return links


def test_rates_of_the_data_sheet() -> None:
    rates = find_target("h100x8", rates="line").rates
    assert rates.matmul_flops == rates.product_flops("bf16") == 989e12
    assert rates.product_flops("f8") == 1979e12
    assert rates.product_flops("f32_highest") == 67e12
    assert rates.product_flops("f4") is None  # there are none on this chip
    assert rates.memory_bandwidth == 3352e9
    assert rates.launch_seconds == pytest.approx(2e-6)
    assert node_links(rates="line").bandwidth == 450e9
    assert node_links(rates="line").start_seconds == pytest.approx(10e-6)


@pytest.mark.parametrize("chip", [f"{gpu}x8" for gpu in GPUS] + list(TPUS))
def test_every_chip_has_rates(chip: str) -> None:
    line, achieved = (find_target(chip, rates=kind).rates for kind in ("line", "achieved"))
    assert line.matmul_flops > 1e14
    for fast, real in (
        (line.matmul_flops, achieved.matmul_flops),
        (line.memory_bandwidth, achieved.memory_bandwidth),
        (line.links.bandwidth, achieved.links.bandwidth),  # type: ignore[attr-defined]
        *((line.matmul_flops_of[t], achieved.matmul_flops_of[t]) for t in line.matmul_flops_of),
    ):
        assert 0.5 * fast < real < fast
    assert 1e10 < line.links.bandwidth < line.memory_bandwidth < 1e13  # type: ignore[attr-defined]
    assert 1e-7 < line.launch_seconds < line.links.start(((0, 1),)) < 1e-4
    for dtype in ("bf16", "f32", "f32_highest", "s8"):
        assert line.product_flops(dtype), dtype


def test_several_nodes() -> None:
    target = find_target("h100x8", nodes=2)
    assert (target.name, target.num_devices, target.num_nodes) == ("2 nodes of h100x8", 16, 2)
    assert target.topology == "1x2x8"
    links = node_links(nodes=2, rates="line")
    assert (links.bandwidth, links.node_bandwidth, links.devices_per_node) == (450e9, 50e9, 8)
    assert links.node_start_seconds > links.start_seconds


@pytest.mark.parametrize("rates", ["line", "achieved"])
def test_links_that_are_given_are_taken_as_they_are(rates: RateKind) -> None:
    links = node_links(nodes=2, link_gbps=300, node_link_gbps=12.5, rates=rates)
    assert (links.bandwidth, links.node_bandwidth) == (300e9, 12.5e9)


def test_what_a_collective_takes_from_the_kernels_beside_it() -> None:
    rates = find_target("h100x8", rates="line", collective_cores=33).rates
    matrix, memory = rates.beside(link_rate=419e9)
    assert matrix == pytest.approx(1 - 33 / 132)
    assert memory == pytest.approx(1 - 2 * 419 / 3352)
    assert rates.beside(0) == (matrix, 1)
    assert rates.beside(1e15)[1] > 0  # never nothing
    assert find_target("v5e").rates.beside(0) == (1, 1)  # no multiprocessors are taken


@pytest.mark.parametrize("gpu", GPUS)
def test_xla_is_told_every_fact_about_a_gpu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def describe(*names: str, **options: str) -> topologies.TopologyDescription:
        asked.append((names, options))
        return topologies.TopologyDescription(jax.devices())

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    target = find_target(f"{gpu}x4", nodes=2)
    assert target.mesh().size == 8
    ((names, options),) = asked
    assert names == (f"2 nodes of {gpu}x4", "cuda")
    assert options["topology"] == "1x2x4"
    text = options["target_config"]
    assert text.startswith("gpu_device_info {") and text.count("{") == text.count("}")
    for key, value in _facts(target.description["gpu_device_info"]):
        if key == "device_memory_size":  # as if everything fitted: the report says what does not
            value = 16 * int(value)
        assert re.search(rf"\b{key}: {value}(?![\w.])", text), key
    assert f'device_description_str: "{target.description["device_kind"]}"' in text


def _facts(values: dict[str, Any]) -> list[tuple[str, Any]]:
    facts: list[tuple[str, Any]] = []
    for key, value in values.items():
        facts += _facts(value) if isinstance(value, dict) else [(key, value)]
    return facts


@pytest.mark.parametrize(
    "name, plugin, hint",
    [
        ("h100x8", "jax-cuda12-plugin", "'tbo-jax\\[cuda12\\]' \\(it compiles without a GPU\\)"),
        ("v5e", "libtpu", "'tbo-jax\\[tpu\\]' \\(it compiles without a TPU\\)"),
    ],
)
def test_without_its_plugin_the_error_says_what_to_install(
    name: str, plugin: str, hint: str
) -> None:
    if targets._is_installed(plugin):
        pytest.skip(f"{plugin} is installed")
    with pytest.raises(ValueError, match=f"{plugin} is not installed. pip install {hint}"):
        find_target(name).devices()


def test_a_process_that_looked_for_a_gpu_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What JAX raises then is what it raises without the plugin."""

    def describe(*names: str, **options: str) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(targets, "_is_installed", lambda package: True)
    with pytest.raises(ValueError, match="cannot compile for h100x8: .* Set JAX_PLATFORMS=cpu"):
        find_target("h100x8").devices()


def test_other_errors_of_a_plugin_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(*names: str, **options: str) -> None:
        raise RuntimeError('Topology layout "v5e:3x3" is not divisible\nand more')

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(targets, "_is_installed", lambda package: True)
    with pytest.raises(
        ValueError, match='for v5e:3x3: Topology layout "v5e:3x3" is not divisible$'
    ):
        find_target("v5e:3x3").devices()
