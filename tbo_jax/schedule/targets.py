"""Machines to compile for that need not be there: what they can do, and how XLA is told of them."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from typing import Any, Literal

from jax.experimental import topologies
from jax.sharding import Mesh

from tbo_jax.parallel.sharding import make_mesh
from tbo_jax.schedule.links import Links, NodeLinks, TorusLinks

MOST_GPUS_A_NODE = 8
_LEAST_SHARE = 0.1  # of the memory, beside links that are as fast


RateKind = Literal["achieved", "line"]


@dataclass(frozen=True)
class Rates:
    """What one device does: the prices of the modelled timeline."""

    matmul_flops: float  # floating-point operations per second, bfloat16, dense
    memory_bandwidth: float  # bytes per second
    launch_seconds: float  # start of a kernel
    links: Links
    # Operations per second of products of other types than bfloat16 and float16. "f32" is what XLA
    # makes of float32 by default, "f32_highest" what it makes at the highest precision.
    matmul_flops_of: Mapping[str, float] = field(default_factory=dict)
    cores: int = 1  # multiprocessors of a GPU
    collective_cores: int = 0  # of them, what a running collective takes
    # Bytes of memory traffic for each byte sent: it is read here, and one that came is written.
    collective_traffic: float = 2.0

    def product_flops(self, dtype: str) -> float | None:
        """Operations per second of products of a type; None if that is not known."""
        return self.matmul_flops if dtype == "bf16" else self.matmul_flops_of.get(dtype)

    def describe(self) -> str:
        """The prices in a few words."""
        return (
            f"{self.matmul_flops / 1e12:.0f} TFLOP/s, {self.memory_bandwidth / 1e9:.0f} GB/s of "
            f"memory and {self.links.describe()}"
        )

    def beside(self, link_rate: float) -> tuple[float, float]:
        """Shares of the matrix units and of the memory that are left beside a collective.

        Args:
            link_rate: bytes per second that the device sends.
        """
        memory = 1 - self.collective_traffic * link_rate / self.memory_bandwidth
        return 1 - self.collective_cores / self.cores, max(memory, _LEAST_SHARE)


@dataclass(frozen=True)
class Target:
    """A machine: `num_devices` chips of one kind."""

    name: str  # h100x8, 4 nodes of h100x8, v5e:2x4
    platform: str  # "cuda" or "tpu"
    num_devices: int
    num_nodes: int
    rates: Rates
    description: Mapping[str, Any]  # the chip's file, parsed
    topology: str  # as the platform's plugin names it

    @property
    def memory(self) -> int | None:
        """Bytes of memory of a device; None where the description does not tell."""
        gpu = self.description.get("gpu_device_info", {})
        return self.description.get("memory_bytes", gpu.get("device_memory_size"))

    @property
    def chip(self) -> str | None:
        """Compute capability of a GPU ("9.0"), kind of a TPU as JAX names it; None if unknown."""
        gpu = self.description.get("gpu_device_info", {}).get("cuda_compute_capability")
        if gpu is not None:
            return f"{gpu['major']}.{gpu.get('minor', 0)}"
        return self.description.get("device_kind")

    def devices(self) -> list[Any]:
        """The devices, for a mesh to compile for.

        Raises:
            ValueError: the plugin that compiles for this platform is not installed, or it does not
                know the topology.
        """
        options: dict[str, Any] = {}
        if self.platform == "cuda":
            options = {"target_config": _target_config(self.description), "topology": self.topology}
        try:
            described = topologies.get_topology_desc(
                self.name if self.platform == "cuda" else self.topology, self.platform, **options
            )
        except Exception as error:  # whatever the plugin, or its absence, raises
            hint = _hint(self.platform, error)
            raise ValueError(f"cannot compile for {self.name}: {hint}") from error
        return list(described.devices)

    def mesh(self, tensor: int = 1) -> Mesh:
        """The mesh over all devices, of which `tensor` share a rank."""
        return make_mesh(devices=self.devices(), tensor=tensor, nodes=self.num_nodes)


def find_target(
    name: str,
    *,
    nodes: int = 1,
    link_gbps: float | None = None,
    node_link_gbps: float | None = None,
    rates: RateKind = "achieved",
    collective_cores: int | None = None,
) -> Target:
    """The target of a name.

    Args:
        name: `CHIPxN` for N GPUs in a node (h100x8), `CHIP` or `CHIP:TOPOLOGY` for a TPU slice
            (v5e, v5p:2x2x2). `list_targets` has the chips.
        nodes: how many such nodes of GPUs. What leaves a node takes the slower link between nodes.
        link_gbps: gigabytes per second that a GPU sends to others of its node, or that a link of a
            TPU carries in one direction; default from the chip's description.
        node_link_gbps: gigabytes per second that a GPU sends to other nodes.
        rates: what others measured of real kernels and collectives, or what the data sheet says.
            A bandwidth that is given is taken as it is.
        collective_cores: multiprocessors of a GPU that a running collective takes from the kernels
            beside it; default from the chip's description.

    Raises:
        ValueError: no such chip, a count out of range, nodes of TPUs, no bandwidth, or one between
            nodes where there is one node. Whether a slice exists its compiler knows:
            `Target.devices` raises.
    """
    chips = _chips()
    match = re.fullmatch(r"([a-z0-9]+?)(?:x(\d+)|:(\d+(?:x\d+)+))?", name)
    if match is None or match[1] not in chips:
        raise ValueError(
            f"unknown target {name!r}: expected {', '.join(list_targets())} or, of TPUs, "
            "CHIP:TOPOLOGY such as v5e:4x4"
        )
    chip, count, topology = match.groups()
    description = chips[chip]
    platform = description["platform"]
    if nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")
    if platform == "cuda":
        if topology or count is None or not 1 <= int(count) <= MOST_GPUS_A_NODE:
            raise ValueError(f"target {name!r}: expected {chip}x1 to {chip}x{MOST_GPUS_A_NODE}")
        num_devices, topology = int(count) * nodes, f"1x{nodes}x{int(count)}"
        name = f"{chip}x{int(count)}"
        label = name if nodes == 1 else f"{nodes} nodes of {name}"
    else:
        if count is not None:
            raise ValueError(f"target {name!r}: name a slice, such as {chip}:2x4")
        if nodes != 1:
            raise ValueError(f"target {name!r}: nodes are for GPUs; name a larger TPU slice")
        topology = f"{chip}:{topology or description['default_topology']}"
        chips_in_slice = math.prod(int(n) for n in topology.split(":")[1].split("x"))
        num_devices, label = chips_in_slice * description["devices_per_chip"], topology
        if not num_devices:
            raise ValueError(f"target {name!r}: a slice without chips")
    if nodes == 1 and node_link_gbps is not None:
        raise ValueError(f"node_link_gbps is {node_link_gbps}, and there is one node")
    prices = dict(description["rates"])
    types = dict(description["matmul_tflops_of"])
    if rates == "achieved":
        shares = dict(description["achieved"])
        # Of types whose products were not measured on their own, the share of bfloat16.
        types = {t: v * shares.pop(t, shares["matmul_tflops"]) for t, v in types.items()}
        prices |= {key: prices[key] * share for key, share in shares.items()}
    for key, value in {"link_gbps": link_gbps, "node_link_gbps": node_link_gbps}.items():
        if value is not None:
            if not 0 < value < math.inf:
                raise ValueError(f"{key} must be positive, got {value}")
            prices[key.replace("gbps", "gb_s")] = value
    if platform == "cuda":
        links: Links = _node_links(prices, num_devices // nodes, nodes)
    else:
        links = _torus_links(prices, topology, description)
    priced = _rates(prices, types, description, links, collective_cores)
    return Target(label, platform, num_devices, nodes, priced, description, topology)


def list_targets() -> list[str]:
    """The names that `find_target` takes, GPUs with the range of their counts."""
    names = []
    for chip, description in sorted(_chips().items()):
        gpu = description["platform"] == "cuda"
        names.append(
            chip + (f"x1..{MOST_GPUS_A_NODE}" if gpu else f":{description['default_topology']}")
        )
    return names


def _chips() -> dict[str, dict[str, Any]]:
    folder = resources.files("tbo_jax.schedule") / "targets"
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


def _rates(
    prices: Mapping[str, float],
    types: Mapping[str, float],
    description: Mapping[str, Any],
    links: Links,
    collective_cores: int | None,
) -> Rates:
    cores = description.get("gpu_device_info", {}).get("core_count", 1)
    taken = description["collective_cores"] if collective_cores is None else collective_cores
    if not 0 <= taken < cores:
        raise ValueError(f"collective_cores must be 0 to {cores - 1}, got {taken}")
    return Rates(
        matmul_flops=prices["matmul_tflops"] * 1e12,
        memory_bandwidth=prices["memory_gb_s"] * 1e9,
        launch_seconds=prices["launch_us"] * 1e-6,
        links=links,
        matmul_flops_of={dtype: tflops * 1e12 for dtype, tflops in types.items()},
        cores=cores,
        collective_cores=taken,
    )


def _node_links(prices: Mapping[str, float], per_node: int, nodes: int) -> NodeLinks:
    inside = NodeLinks(
        bandwidth=prices["link_gb_s"] * 1e9, start_seconds=prices["collective_us"] * 1e-6
    )
    if nodes == 1:
        return inside
    return replace(
        inside,
        node_bandwidth=prices["node_link_gb_s"] * 1e9,
        node_start_seconds=prices["node_collective_us"] * 1e-6,
        devices_per_node=per_node,
    )


def _torus_links(
    prices: Mapping[str, float], topology: str, description: Mapping[str, Any]
) -> TorusLinks:
    dims = tuple(int(size) for size in topology.split(":")[1].split("x"))
    return TorusLinks(
        dims=dims,
        wraps=tuple(size % description["ring_multiple"] == 0 for size in dims),
        bandwidth=prices["link_gb_s"] * 1e9,
        start_seconds=prices["collective_us"] * 1e-6,
        devices_per_chip=description["devices_per_chip"],
        chip_bandwidth=prices.get("chip_link_gb_s", math.inf) * 1e9,
    )


def _target_config(description: Mapping[str, Any]) -> str:
    """The chip as the text form of XLA's GpuTargetConfigProto.

    With more memory than it has: where a step does not fit, XLA recomputes and gives up on hiding
    communication (48 scanned layers of Qwen3-30B-A3B with 256 contexts of 4,096 tokens need 111 GB:
    hidden fell to 0 %). The report says when a step does not fit.

    With its name, too: devices of a topology without one do not lower on jax 0.12.
    """

    def lines(values: Mapping[str, Any]) -> str:
        out = []
        for key, value in values.items():
            if isinstance(value, Mapping):
                out.append(f"{key} {{ {lines(value)} }}")
            elif key == "feature_extension":  # an enum, hence no quotes
                out.append(f"{key}: {value}")
            else:
                out.append(f"{key}: {value!r}")
        return " ".join(out)

    gpu = dict(description["gpu_device_info"])
    gpu["device_memory_size"] *= 16
    info = lines(gpu)
    return (
        f'gpu_device_info {{ {info} }} platform_name: "CUDA" '
        f'device_description_str: "{description["device_kind"]}" '
        "dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 }"
    )


def _hint(platform: str, error: Exception) -> str:
    """What to do about an error of the plugin that compiles for a platform."""
    packages, extra, device = {
        "cuda": (("jax-cuda12-plugin", "jax-cuda13-plugin"), "cuda12", "GPU"),
        "tpu": (("libtpu",), "tpu", "TPU"),
    }[platform]
    if not any(_is_installed(package) for package in packages):
        return (
            f"{packages[0]} is not installed. pip install 'tbo-jax[{extra}]' (it compiles without "
            f"a {device})"
        )
    if platform == "cuda" and isinstance(error, NotImplementedError):
        return (
            "JAX looked for a GPU in this process and found none, which leaves it without its "
            "compiler for CUDA. Set JAX_PLATFORMS=cpu before JAX is first used"
        )
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
