from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from tbo_jax.schedule import targets
from tbo_jax.schedule.targets import find_target, list_targets

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
    ],
)
def test_bad_names(name: str, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_target(name, **options)


def test_rates() -> None:
    rates = find_target("h100x8").rates
    assert rates.matmul_flops == 989e12
    assert rates.memory_bandwidth == 3352e9
    assert rates.link_bandwidth == 450e9
    assert rates.launch_seconds == pytest.approx(2e-6)
    assert rates.collective_seconds == pytest.approx(8e-6)


@pytest.mark.parametrize("chip", [f"{gpu}x8" for gpu in GPUS] + list(TPUS))
def test_every_chip_has_rates(chip: str) -> None:
    rates = find_target(chip).rates
    assert rates.matmul_flops > 1e14
    assert 1e11 < rates.link_bandwidth < rates.memory_bandwidth < 1e13
    assert 1e-7 < rates.launch_seconds < rates.collective_seconds < 1e-4


def test_several_nodes_wait_for_the_slower_link() -> None:
    target = find_target("h100x8", nodes=2)
    assert (target.name, target.num_devices, target.num_nodes) == ("2 nodes of h100x8", 16, 2)
    assert target.topology == "1x2x8"
    # Of 15 parts that a device sends 8 leave the node, at 50 GB/s; the other 7 are done by then.
    assert target.rates.link_seconds(15e9, range(16)) == pytest.approx(8 / 50)
    # Nothing leaves the node, and everything does.
    assert target.rates.link_seconds(7e9, range(8)) == pytest.approx(7 / 450)
    assert target.rates.link_seconds(1e9, (3, 11)) == pytest.approx(1 / 50)
    assert find_target("h100x8").rates.link_seconds(7e9, range(8)) == pytest.approx(7 / 450)


def test_the_links_can_be_given() -> None:
    rates = find_target("h100x8", nodes=2, link_gbps=300, node_link_gbps=12.5).rates
    assert (rates.link_bandwidth, rates.node_link_bandwidth) == (300e9, 12.5e9)


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
