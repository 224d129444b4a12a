"""The safetensors reader: equal to NumPy on good files, a precise error on every bad one."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tbo_jax.checkpoint import headers
from tbo_jax.checkpoint import tensors as reader
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder

DTYPES = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint64,
    np.uint32,
    np.uint16,
    np.uint8,
    np.bool_,
]


def sample(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Small whole numbers, exact in every dtype above."""
    return np.random.default_rng(seed).integers(0, 8, shape).astype(dtype)


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file by hand, so that it can be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shards(folder: Path, files: dict[str, list[str]], weight_map: object) -> None:
    for file, names in files.items():
        save_file({name: sample((2, 3)) for name in names}, folder / file)
    (folder / headers.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_a_whole_file_is_read_where_a_stale_index_lists_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an upload of one file over a sharded checkpoint."""
    save_file({"a": sample((2,))}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"a": sample((4,), seed=1)}, tmp_path / headers.SINGLE_FILE)
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / headers.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    folder = TensorFolder.open(tmp_path)
    np.testing.assert_array_equal(folder.read("a"), sample((4,), seed=1))
    assert len(caplog.records) == 1
    assert "lists model-00002-of-00002.safetensors, which is not there" in caplog.text


def test_one_of_two_checkpoints_in_a_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards(tmp_path, {"one.safetensors": ["a"]}, {"a": "one.safetensors"})
    save_file({"z": sample((4,))}, tmp_path / headers.SINGLE_FILE)
    assert TensorFolder.open(tmp_path).names == ("a",)
    assert f"{headers.SINGLE_FILE} is not read" in caplog.text
    caplog.clear()
    weight_map = {"z": headers.SINGLE_FILE}  # an index of one file
    (tmp_path / headers.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert TensorFolder.open(tmp_path).names == ("z",)
    assert not caplog.records


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path: Path, dtype: Any) -> None:
    tensors = {
        "matrix": sample((5, 7), dtype, 1),
        "scalar": sample((), dtype, 2),
        "empty": sample((3, 0, 2), dtype),
        "cube": sample((2, 3, 4), dtype, 3),
    }
    save_file(tensors, tmp_path / headers.SINGLE_FILE, metadata={"format": "np"})
    folder = TensorFolder.open(tmp_path)
    assert folder.names == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        info = folder.info(name)
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
        result = folder.read(name)
        assert result.dtype == tensor.dtype
        np.testing.assert_array_equal(result, tensor)


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    tensors = {"a": sample((4,), seed=1), "b": sample((3, 2), seed=2), "c": sample((1,), seed=3)}
    save_file({"a": tensors["a"], "c": tensors["c"]}, tmp_path / "one.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "two.safetensors")
    save_file({"z": tensors["b"]}, tmp_path / headers.SINGLE_FILE)  # the index wins over this one
    (tmp_path / headers.INDEX_FILE).write_text(
        json.dumps(
            {
                "metadata": {"total_size": 44},
                "weight_map": {
                    "a": "one.safetensors",
                    "b": "two.safetensors",
                    "c": "one.safetensors",
                },
            }
        )
    )
    folder = TensorFolder.open(str(tmp_path))
    assert folder.names == ("a", "b", "c")
    assert folder.info("b").file == tmp_path / "two.safetensors"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(folder.read(name), tensor)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    bound = st.none() | st.integers(-8, 8)
    kept = draw(st.integers(0, len(shape)))
    return shape, tuple(slice(draw(bound), draw(bound)) for _ in range(kept))


@settings(max_examples=200, deadline=None)
@given(
    region=regions(),
    stored=st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int8]),
    chunk=st.integers(1, 200),
    seek=st.integers(0, 100),
)
def test_slices_equal_numpy_for_every_chunking(
    tmp_path_factory: pytest.TempPathFactory,
    region: tuple[tuple[int, ...], tuple[slice, ...]],
    stored: Any,
    chunk: int,
    seek: int,
) -> None:
    shape, index = region
    tensor = np.arange(int(np.prod(shape))).reshape(shape).astype(stored)
    path = tmp_path_factory.mktemp("slices")
    save_file({"before": sample((3,)), "x": tensor}, path / headers.SINGLE_FILE)
    folder = TensorFolder.open(path)
    wide: Any = np.int32 if stored is np.int8 else np.float64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_CHUNK", chunk)
        patch.setattr(reader, "_SEEK", seek)
        np.testing.assert_array_equal(folder.read("x", index), tensor[index])
        converted = np.empty(tensor[index].shape, wide)
        folder.read_into("x", converted, index)
        np.testing.assert_array_equal(converted, tensor[index].astype(wide))
        if len(shape) >= 2:
            expected = np.swapaxes(tensor[index], -1, -2)
            for dtype in (wide, stored):
                flipped = np.empty(expected.shape, dtype)
                folder.read_into("x", flipped, index, transpose=True)
                np.testing.assert_array_equal(flipped, expected.astype(dtype))


def test_transpose_over_several_tiles(tmp_path: Path) -> None:
    tensor = np.random.default_rng(0).standard_normal((300, 700)).astype(ml_dtypes.bfloat16)
    save_file({"x": tensor}, tmp_path / headers.SINGLE_FILE)
    folder = TensorFolder.open(tmp_path)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        out = np.empty((700, 300), dtype)
        folder.read_into("x", out, transpose=True)
        np.testing.assert_array_equal(out, tensor.T.astype(dtype))


def test_reads_into_a_strided_view_and_leaves_the_rest(tmp_path: Path) -> None:
    tensor = sample((4, 3), seed=1)
    save_file({"x": tensor}, tmp_path / headers.SINGLE_FILE)
    out = np.full((4, 2, 3), -1.0, np.float32)
    TensorFolder.open(tmp_path).read_into("x", out[:, 1])
    np.testing.assert_array_equal(out[:, 1], tensor)
    assert (out[:, 0] == -1).all()


def test_every_bfloat16_bit_pattern_becomes_the_same_float32(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    save_file({"x": bits.view(ml_dtypes.bfloat16)}, tmp_path / headers.SINGLE_FILE)
    out = np.empty(2**16, np.float32)
    TensorFolder.open(tmp_path).read_into("x", out)
    np.testing.assert_array_equal(out.view(np.uint32), bits.astype(np.uint32) << 16)


def test_a_contiguous_slice_reads_no_other_byte(tmp_path: Path) -> None:
    tensor = sample((4, 6, 5), seed=1)
    save_file({"x": tensor}, tmp_path / headers.SINGLE_FILE)
    folder = TensorFolder.open(tmp_path)
    read: list[tuple[int, int]] = []
    real = reader.read_exactly

    def spy(stream: Any, offset: int, data: Any) -> None:
        read.append((offset - folder.info("x").offset, data.nbytes))
        real(stream, offset, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read_exactly", spy)
        folder.read("x", (slice(1, 3),))
        folder.read("x", (slice(2, 3), slice(4, 6)))
    row = 5 * 4
    assert read == [(6 * row, 12 * row), ((2 * 6 + 4) * row, 2 * row)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_memory_is_the_output_and_one_chunk(tmp_path: Path, transpose: bool, dtype: Any) -> None:
    shape = (4096, 4096)  # 32 MiB in the file
    save_file({"x": np.zeros(shape, ml_dtypes.bfloat16)}, tmp_path / headers.SINGLE_FILE)
    folder = TensorFolder.open(tmp_path)
    out = np.ones(shape, dtype)
    tracemalloc.start()
    try:
        folder.read_into("x", out, transpose=transpose)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < reader._CHUNK + 2**20
        tracemalloc.reset_peak()
        columns = folder.read("x", (slice(None), slice(0, 512)))
        assert tracemalloc.get_traced_memory()[1] < columns.nbytes + reader._CHUNK + 2**20
        tracemalloc.reset_peak()
        whole = folder.read("x")
        peak = tracemalloc.get_traced_memory()[1] - columns.nbytes
        assert peak < whole.nbytes + 2**20
    finally:
        tracemalloc.stop()
    assert not out.any()


def test_threads_share_a_folder(tmp_path: Path) -> None:
    tensors = {f"t{i}": sample((64, 33), seed=i) for i in range(16)}
    save_file(tensors, tmp_path / headers.SINGLE_FILE)
    folder = TensorFolder.open(tmp_path)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(reader, "_CHUNK", 256)
        for name, result in zip(tensors, pool.map(folder.read, tensors), strict=True):
            np.testing.assert_array_equal(result, tensors[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.read("y"), "no tensor 'y'"),
        (lambda f: f.read("x", (slice(None, None, 2),)), "step of a slice must be 1, not 2"),
        (lambda f: f.read("x", (slice(None, None, -1),)), "step of a slice must be 1, not -1"),
        (lambda f: f.read("x", (1,)), "tuple of slices"),
        (lambda f: f.read("x", (slice(None),) * 3), r"3 slices for shape \(2, 3\)"),
        (lambda f: f.read_into("x", np.empty((3, 2), "f4")), r"shape \(2, 3\), not \(3, 2\)"),
        (
            lambda f: f.read_into("x", np.empty((2, 3), "f4"), transpose=True),
            r"shape \(3, 2\), not \(2, 3\)",
        ),
        (lambda f: f.read_into("v", np.empty(2, "f4"), transpose=True), "does not transpose"),
        (lambda f: f.read_into("x", np.empty((2, 3), "i4")), "float32 does not convert to int32"),
        (lambda f: f.read_into("i", np.empty(2, "f4")), "int32 does not convert to float32"),
        (lambda f: f.read_into("i", np.empty(2, "i2")), "int32 does not convert to int16"),
        (lambda f: f.read_into("v", np.broadcast_to(np.float32(0), (2,))), "read-only"),
    ],
)
def test_wrong_calls_are_refused(
    tmp_path: Path, call: Callable[[TensorFolder], object], message: str
) -> None:
    tensors = {"x": sample((2, 3)), "v": sample((2,)), "i": sample((2,), np.int32)}
    save_file(tensors, tmp_path / headers.SINGLE_FILE)
    with pytest.raises(ValueError, match=message):
        call(TensorFolder.open(tmp_path))


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ([1], b""),
        (b"{nonsense", b""),
        (b'{"\xff": 1}', b""),
        (b"[" * 100_000, b""),
        ({"__metadata__": {"a": 1}}, b""),
        ({"x": 3}, b""),
        ({"x": {"dtype": "F32", "shape": [2]}}, b""),
        ({"x": entry(dtype="F5")}, b"\0" * 8),
        ({"x": entry(shape=[-2])}, b"\0" * 8),
        ({"x": entry(shape="2")}, b"\0" * 8),
        ({"x": entry(begin=-1, end=7)}, b"\0" * 8),
        ({"x": entry(shape=[3])}, b"\0" * 8),
        ({"x": entry(begin=8, end=0)}, b"\0" * 8),
        ({"x": entry()}, b"\0" * 7),
        ({"x": entry()}, b"\0" * 9),
        ({"x": entry(), "y": entry(4, 12)}, b"\0" * 12),
        ({"x": entry(), "y": entry()}, b"\0" * 8),
        ({"x": entry(), "y": entry(9, 17)}, b"\0" * 17),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, header: object, data: bytes) -> None:
    write(tmp_path / headers.SINGLE_FILE, header, data)
    with pytest.raises(
        CheckpointError, match=f"{headers.SINGLE_FILE}: truncated or no safetensors"
    ):
        TensorFolder.open(tmp_path)


def test_a_tensor_that_a_header_names_twice_is_refused(tmp_path: Path) -> None:
    first, last = (json.dumps({"x": entry(shape=shape)}) for shape in ([2], [1, 2]))
    header = f"{first[:-1]}, {last[1:]}".encode()
    write(tmp_path / headers.SINGLE_FILE, header, b"\0" * 8)
    with pytest.raises(
        CheckpointError, match=f"{headers.SINGLE_FILE}: header: .* key 'x' occurs 2 times"
    ):
        TensorFolder.open(tmp_path)


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / headers.SINGLE_FILE, {"x": entry(dtype="C64", shape=[1])}, b"\0" * 8)
    with pytest.raises(CheckpointError, match="tensor 'x': unknown dtype 'C64', expected one of F"):
        TensorFolder.open(tmp_path)


def test_tensors_lie_where_the_header_says_and_not_in_its_order(tmp_path: Path) -> None:
    """With metadata that is null, which other writers leave, and tensors without elements."""
    header = {
        "__metadata__": None,
        "after": entry(8, 16),
        "empty": entry(8, 8, [3, 0]),
        "first": entry(0, 8),
        "none": entry(16, 16, [0]),
    }
    data = np.arange(4, dtype="<f4").tobytes()
    write(tmp_path / headers.SINGLE_FILE, header, data)
    folder = TensorFolder.open(tmp_path)
    np.testing.assert_array_equal(folder.read("first"), [0, 1])
    np.testing.assert_array_equal(folder.read("after"), [2, 3])
    assert folder.read("empty").shape == (3, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: it has 0 bytes"),
        (b"\1\0\0", "truncated: it has 3 bytes, its header alone takes 8"),
        ((1).to_bytes(8, "little") + b"{}", "truncated or no safetensors"),
        ((10**9).to_bytes(8, "little") + b"{}", "its header alone takes 1,000,000,008"),
        ((5000).to_bytes(8, "little") + b"{}", "it has 10 bytes, its header alone takes 5,008"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / headers.SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        TensorFolder.open(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_to_a_header_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage")
    write(path / headers.SINGLE_FILE, {"x": entry(), "y": entry(8, 16)}, b"\0" * 16)
    content = bytearray((path / headers.SINGLE_FILE).read_bytes())
    at = data.draw(st.integers(0, len(content) - 17))
    content[at] = data.draw(st.integers(0, 255))
    (path / headers.SINGLE_FILE).write_bytes(content)
    try:
        folder = TensorFolder.open(path)
    except CheckpointError:
        return
    assert sum(folder.read(name).nbytes for name in folder.names) == 16


ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("files", "weight_map", "message"),
    [
        ({ONE: ["a"]}, {"a": ONE, "b": TWO}, f"{TWO}: missing; .* lists 1 tensors in it"),
        (
            {ONE: ["a"], TWO: ["c"]},
            {"a": ONE, "b": TWO, "c": TWO},
            f"{TWO}: tensor 'b' is missing",
        ),
        (
            {ONE: ["a", "b"], TWO: ["c"]},
            {"a": ONE, "b": TWO, "c": TWO},
            f"{TWO}: tensor 'b' is missing, .*; it is in {ONE}",
        ),
        ({ONE: ["a", "b"]}, {"a": ONE}, f"{ONE}: {headers.INDEX_FILE} does not list tensor 'b'"),
        (
            {ONE: ["a", "b"], TWO: ["b"]},
            {"a": ONE, "b": TWO},
            f"tensor 'b' is in both {ONE} and {TWO}",
        ),
        ({}, {}, "expected a non-empty object 'weight_map'"),
        ({}, [ONE], "expected a non-empty object 'weight_map'"),
        ({}, {"a": 1}, "tensor 'a': expected a .safetensors file beside it, not 1"),
        ({}, {"a": "../x.safetensors"}, "expected a .safetensors file beside it"),
        ({}, {"a": "pytorch_model.bin"}, "expected a .safetensors file beside it"),
    ],
)
def test_index_and_shards_must_agree(
    tmp_path: Path, files: dict[str, list[str]], weight_map: object, message: str
) -> None:
    shards(tmp_path, files, weight_map)
    with pytest.raises(CheckpointError, match=message):
        TensorFolder.open(tmp_path)


def test_the_truncated_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path, {ONE: ["a"], TWO: ["b"]}, {"a": ONE, "b": TWO})
    content = (tmp_path / TWO).read_bytes()
    (tmp_path / TWO).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{TWO}: truncated or no safetensors file"):
        TensorFolder.open(tmp_path)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / headers.INDEX_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=f"{headers.INDEX_FILE}: not valid JSON"):
        TensorFolder.open(tmp_path)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="expected .*, found pytorch_model.bin"):
        TensorFolder.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        TensorFolder.open(tmp_path / "absent")


def test_a_file_that_shrinks_or_goes_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / headers.SINGLE_FILE
    save_file({"x": sample((8,))}, path)
    folder = TensorFolder.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated at byte"):
        folder.read("x")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        folder.read("x")
