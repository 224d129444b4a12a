"""The mesh, what is shared out over it, and what cannot be."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from tbo_jax.checkpoint.load import read_config
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.layers.exchange import exchange_of
from tbo_jax.parallel.exchange import LocalExchange
from tbo_jax.parallel.exchange.two_level import TwoLevel
from tbo_jax.parallel.sharding import DEVICES, NODES, TENSOR, make_mesh, num_ranks, parameter_spec
from tests.golden_cases import DATA


def config_of(name: str) -> Any:
    return read_config(DATA / name, jnp.float32)[0]


def test_ranks_are_groups_of_neighbours() -> None:
    mesh = make_mesh(8, tensor=2, nodes=2)
    assert dict(mesh.shape) == {"nodes": 2, "ranks": 2, "tensor": 2}
    assert num_ranks(mesh) == 4
    assert [[d.id for d in group] for group in mesh.devices.reshape(4, 2)] == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_devices": 9}, "9 devices were asked for, 8 exist"),
        ({"num_devices": 0}, "num_devices must be at least 1, got 0"),
        ({"num_devices": 2.0}, r"num_devices must be an integer from 1, got 2\.0"),
        ({"tensor": True}, "tensor must be an integer from 1, got True"),
        ({"tensor": 3}, r"8 device\(s\) do not divide .* 3-way .* a multiple of 3"),
        ({"tensor": 0}, "tensor must be at least 1, got 0"),
        ({"nodes": -1}, "nodes must be at least 1, got -1"),
        ({"num_devices": 6, "tensor": 2, "nodes": 2}, "expected a multiple of 4"),
    ],
)
def test_a_mesh_that_cannot_be(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make_mesh(**options)


def test_processes_with_different_numbers_of_devices() -> None:
    devices: Any = [SimpleNamespace(process_index=i, platform="gpu") for i in (0, 0, 1)]
    with pytest.raises(ValueError, match="different numbers of devices"):
        make_mesh(devices=devices)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_what_is_shared_out(tensor: int) -> None:
    """Two key/value heads go to two devices, and are whole on each of four."""
    mesh = make_mesh(8, tensor=tensor)
    model = nnx.eval_shape(lambda: CausalLM(config_of("qwen3_moe"), rngs=nnx.Rngs(0)))
    specs = {
        ".".join(map(str, path)): parameter_spec(path, variable, mesh)
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }
    own = PartitionSpec() if tensor == 4 else PartitionSpec(TENSOR)
    assert specs["layers.0.mlp.gate_up_proj"] == PartitionSpec(DEVICES)
    assert specs["layers.0.self_attn.q_proj.weight"] == PartitionSpec(TENSOR)
    assert specs["layers.0.self_attn.k_proj.weight"] == own
    assert specs["layers.0.self_attn.o_proj.weight"] == PartitionSpec(None, TENSOR)
    assert specs["layers.0.mlp.gate.weight"] == PartitionSpec()
    assert specs["norm.scale"] == PartitionSpec()


@pytest.mark.parametrize(
    ("name", "changes", "tensor", "error"),
    [
        ("qwen3_moe", {}, 3, "4 attention heads cannot be shared equally by 3 devices"),
        ("llama", {"intermediate_size": 81}, 2, "81 features of the feed-forward"),
        (
            "qwen3_moe",
            {"num_heads": 12, "num_kv_heads": 4},
            6,
            "4 key/value heads and 6 devices",
        ),
    ],
)
def test_heads_and_features_that_do_not_divide(
    name: str, changes: dict[str, int], tensor: int, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(config_of(name), **changes).of_device(tensor)


@pytest.mark.parametrize("options", [("two_level", None), ("all_to_all", "int8")])
def test_a_dense_model_exchanges_nothing(options: tuple[Any, Any]) -> None:
    config, mesh = config_of("llama"), make_mesh(4)
    assert isinstance(exchange_of(config, mesh, "all_to_all"), LocalExchange)
    with pytest.raises(ValueError, match="this llama model has none: expected 'all_to_all'"):
        exchange_of(config, mesh, *options)


@pytest.mark.parametrize(
    ("platform", "num_devices", "num_processes", "said"),
    [
        ("cuda", 8, 1, False),
        ("cuda", 16, 1, True),
        ("cuda", 8, 2, True),
        ("cpu", 16, 1, False),
        ("tpu", 16, 2, False),
    ],
)
def test_ragged_sizes_that_go_over_the_host_are_said(
    caplog: pytest.LogCaptureFixture,
    platform: str,
    num_devices: int,
    num_processes: int,
    said: bool,
) -> None:
    devices = [
        SimpleNamespace(platform=platform, process_index=number % num_processes)
        for number in range(num_devices)
    ]
    mesh: Any = SimpleNamespace(
        devices=np.array(devices), size=num_devices, shape={NODES: num_processes}
    )
    with caplog.at_level(logging.WARNING):
        config = dataclasses.replace(config_of("qwen3_moe"), num_experts=16)
        exchange_of(config, mesh, "all_to_all")
        assert not caplog.records
        exchange_of(config, mesh, "ragged_all_to_all")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == said
    if said:
        start = f"over {num_devices} GPUs in {num_processes} process(es): XLA copies the sizes"
        assert start in messages[0]


def test_what_does_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("qwen3_moe")
    with caplog.at_level(logging.WARNING):
        exchange_of(config, make_mesh(1), "all_to_all", "int8")
        exchange_of(config, make_mesh(4), "two_level")
        assert isinstance(exchange_of(config, make_mesh(4, nodes=2), "two_level"), TwoLevel)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "dispatch_dtype 'int8' on one device: nothing is sent",
        "transport 'two_level' on one node: all tokens go to all of its devices",
    ]
