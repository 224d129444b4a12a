"""Reading parameters: how often, in how much memory, and that every device gets its own part."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from tbo_jax.checkpoint import read, tensors
from tbo_jax.checkpoint.load import load_model
from tbo_jax.checkpoint.names import Source
from tbo_jax.checkpoint.quantized import PlainWeights
from tbo_jax.checkpoint.read import Wanted, read_parameters
from tbo_jax.checkpoint.tensors import TensorFolder
from tbo_jax.parallel.sharding import RANKS, TENSOR, make_mesh
from tests.golden_cases import DATA

MESHES = [(1, 1), (2, 1), (8, 1), (2, 2), (4, 2), (8, 2)]  # devices, tensor parallel


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    plain = tensors.read_exactly

    def counted(stream: Any, offset: int, out: Any) -> None:
        sizes.append(out.nbytes)
        plain(stream, offset, out)

    monkeypatch.setattr(tensors, "read_exactly", counted)
    return sizes


def arrays(model: Any) -> dict[Any, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {path: np.asarray(variable.get_value()) for path, variable in flat}


@pytest.mark.parametrize(("devices", "tensor"), MESHES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "llama_bias", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("scanned", [False, True])
def test_each_byte_is_read_once(
    bytes_read: list[int], name: str, devices: int, tensor: int, scanned: bool
) -> None:
    if scanned and name in ("gpt_oss", "deepseek_v3"):
        pytest.skip("its layers are not equal")
    if name == "deepseek_v3" and devices == 8:
        devices = 6  # it has 12 experts
    folder = TensorFolder.open(DATA / name)
    in_file = sum(folder.info(tensor).nbytes for tensor in folder.names)
    mesh = make_mesh(devices, tensor=tensor)
    found = load_model(DATA / name, mesh=mesh, dtype=jnp.float32, scanned=scanned)
    assert in_file <= sum(bytes_read) <= 1.02 * in_file
    alone = load_model(DATA / name, mesh=make_mesh(1), dtype=jnp.float32, scanned=scanned)
    expected = arrays(alone)
    for path, value in arrays(found).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=str(path))


def wanted(
    folder: Any, shape: tuple[int, ...], spec: PartitionSpec, transpose: bool = False
) -> Wanted:
    """Of a file with one tensor, x, on 4 ranks of 2 devices."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    save_file({"x": values.swapaxes(-1, -2).copy() if transpose else values},
              folder / "model.safetensors")  # fmt: skip
    sharding = NamedSharding(make_mesh(8, tensor=2), spec)
    weights = PlainWeights(TensorFolder.open(folder))
    return Wanted(weights, [Source("x", shape, transpose=transpose)], shape, values.dtype, sharding)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(),
        PartitionSpec(RANKS),
        PartitionSpec(None, TENSOR),
        PartitionSpec(None, None, TENSOR),
        PartitionSpec(RANKS, TENSOR),
        PartitionSpec(None, RANKS, TENSOR),
    ],
    ids=str,
)
@pytest.mark.parametrize("pieces", [False, True])
def test_parts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, bytes_read: list[int],
    spec: PartitionSpec, transpose: bool, pieces: bool,
) -> None:  # fmt: skip
    """Large ones in pieces where a device does not take over the host's array: 96 of 384 bytes."""
    one = wanted(tmp_path, (8, 4, 6), spec, transpose)
    monkeypatch.setattr(read, "_AT_ONCE", 96)
    if pieces:
        monkeypatch.setattr(read, "_takes_over", lambda platform: False)
    array = one.read()
    expected = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)
    np.testing.assert_array_equal(array, expected)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])
    assert array.sharding == one.sharding
    assert sum(bytes_read) == expected.nbytes
    # Of what is read together, a piece and a device's part of it.
    assert one.host_bytes <= (2 * 96 if pieces else 2 * expected.nbytes)


def test_devices_that_share_a_part_do_not_write_to_each_other(tmp_path: Any) -> None:
    """On CPU they may have the same memory; a program that is given it may write its result there."""
    array = wanted(tmp_path, (8, 4, 6), PartitionSpec()).read()
    expected = np.array(array)
    first, second = (jnp.asarray(s.data) for s in array.addressable_shards[:2])
    for _ in range(3):
        first = jax.jit(lambda x: 2 * x, donate_argnums=0)(first)
    np.testing.assert_array_equal(second, expected)
    np.testing.assert_array_equal(first, 8 * expected)


def test_what_is_read_at_a_time_is_bounded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By twice the largest parameter, whatever the threads; and all of it arrives."""
    lock, held, most = threading.Lock(), [0], [0]

    def slow(one: Wanted) -> Any:
        with lock:
            held[0] += one.host_bytes
            most[0] = max(most[0], held[0])
        time.sleep(0.01)
        with lock:
            held[0] -= one.host_bytes
        return one.shape

    monkeypatch.setattr(Wanted, "read", slow)
    monkeypatch.setattr(read.os, "cpu_count", lambda: 4)
    shapes = [(8, 4, 6), *[(2, 4, 6)] * 9, (8, 4, 6), (8, 4, 6), (8, 4, 6), (1, 1, 1)]
    jobs = {
        i: Wanted(None, [], shape, np.dtype(np.float32),  # type: ignore[arg-type]
                  NamedSharding(make_mesh(1), PartitionSpec()))
        for i, shape in enumerate(shapes)
    }  # fmt: skip
    found = dict(read_parameters(jobs))
    assert found == dict(enumerate(shapes))
    largest = 4 * 8 * 4 * 6
    assert largest < most[0] <= 2 * largest


def test_a_read_that_fails_is_raised_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(one: Wanted) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Wanted, "read", fail)
    sharding = NamedSharding(make_mesh(1), PartitionSpec())
    job = Wanted(None, [], (2,), np.dtype(np.float32), sharding)  # type: ignore[arg-type]
    before = threading.active_count()
    with pytest.raises(OSError, match="the disk is gone"):
        list(read_parameters(dict.fromkeys(range(9), job)))
    assert threading.active_count() == before
    assert list(read_parameters({})) == []
