"""Which format a checkpoint's weights have, by what its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tbo_jax.checkpoint.int4 import GroupedInt4Weights
from tbo_jax.checkpoint.mxfp4 import BLOCK as MXFP4_BLOCK
from tbo_jax.checkpoint.mxfp4 import Mxfp4Weights
from tbo_jax.checkpoint.mxfp4_matrices import Mxfp4Matrices
from tbo_jax.checkpoint.quantized import BlockScaledWeights, PlainWeights, WeightFormat
from tbo_jax.checkpoint.scaled import ScaledWeights
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.host.json_files import read_json_object

MODELOPT_FILE = "hf_quant_config.json"  # of NVIDIA's Model Optimizer
Maker = Callable[[TensorFolder], WeightFormat]
_MXFP4 = "mxfp4-pack-quantized"
_COMPRESSED = "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", _MXFP4
_MODELOPT_BLOCK = 128, 128


def read_quantization(folder: Path) -> object:
    """What the folder says of quantisation: `quantization_config` of its config.json, or None.

    ModelOpt says it in a file of its own.

    Raises:
        CheckpointError: it is said in another place, whose formats are not supported.
    """
    values = _read_json(folder / "config.json")
    text = values.get("text_config")
    found: Any = values.get("quantization_config")
    if isinstance(text, Mapping) and text.get("quantization_config") is not None:
        if found is not None and found != text["quantization_config"]:
            raise CheckpointError(
                f"{folder}: config.json has a quantization_config and another in its text_config"
            )
        found = text["quantization_config"]
    if values.get("compression_config") is not None:
        raise CheckpointError(
            f"{folder}: config.json: compression_config is not supported, expected "
            "quantization_config or none"
        )
    modelopt = folder / MODELOPT_FILE
    if modelopt.exists():
        said = _read_json(modelopt).get("quantization")
        said = said if isinstance(said, Mapping) else {"quantization": said}
        used = {k: v for k, v in said.items() if v and k != "exclude_modules"}
        if used and found is None:
            return {"quant_method": "modelopt", **used}
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def find_format(folder: Path, quantization: object) -> Maker:
    """What makes the format that `quantization_config` of a config.json tells of; None: plain.

    Raises:
        CheckpointError: a method, or an option of it, that is not supported.
    """
    if quantization is None:
        return PlainWeights
    said = _Said(f"{folder}: quantization_config", quantization)
    method = said.expect("quant_method", *_METHODS)
    return _METHODS[method](said)


class _Said:
    """A part of a configuration, `where`, that is an object."""

    def __init__(self, where: str, values: object):
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} must be an object, got {values!r}")
        self.where, self.values = where, values

    def expect(self, key: str, *accepted: Any) -> Any:
        """The value of a key, which is one of those that are accepted."""
        value = self.values.get(key)
        if not any(type(value) is type(one) and value == one for one in accepted):
            allowed = ", ".join(repr(one) for one in accepted if one is not None) or "none"
            raise CheckpointError(
                f"{self.where}: {key}={value!r} is not supported, expected {allowed}"
            )
        return value

    def refuse(self, *keys: str) -> None:
        """Raise CheckpointError for a key that says anything; empty objects say nothing."""
        for key in keys:
            if self.values.get(key):
                self.expect(key, None)

    def inner(self, key: str) -> _Said:
        """The object under a key."""
        return _Said(f"{self.where}: {key}", self.values.get(key))

    def pair(self, key: str) -> tuple[int, int]:
        """Two sizes under a key."""
        sizes = self.values.get(key)
        sizes = sizes if isinstance(sizes, list) else []
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise CheckpointError(
                f"{self.where}: {key}={self.values.get(key)!r} is not supported, expected two "
                "sizes, [128, 128]"
            )
        return sizes[0], sizes[1]


def _block_fp8(said: _Said) -> Maker:
    said.expect("fmt", "e4m3", None)
    said.expect("activation_scheme", "dynamic", None)  # another adds tensors for the activations
    return partial(BlockScaledWeights, block=said.pair("weight_block_size"))


def _compressed(said: _Said) -> Maker:
    """compressed-tensors: one group, or several that are held alike."""
    said.expect("format", *_COMPRESSED)
    said.expect("kv_cache_scheme", None)
    said.expect("quantization_status", "compressed", None)
    said.refuse("sparsity_config", "transform_config")
    groups = said.inner("config_groups")
    if said.values["format"] == _MXFP4:
        for name in groups.values:
            weights = groups.inner(name).inner("weights")
            weights.expect("num_bits", 4)
            weights.expect("type", "float")
            weights.expect("group_size", MXFP4_BLOCK)
        return partial(Mxfp4Matrices, numbers="weight_packed")
    blocks = set()
    for name in groups.values:
        weights = groups.inner(name).inner("weights")
        packed = said.values["format"] == "pack-quantized"
        weights.expect("num_bits", *((4, 8) if packed else (8,)))
        weights.expect("type", *(("int",) if packed else ("int", "float")))
        strategy = weights.expect("strategy", "tensor", "channel", "group", "block")
        weights.expect("dynamic", False, None)
        blocks.add(weights.pair("block_structure") if strategy == "block" else None)
    if len(blocks) != 1:
        raise CheckpointError(
            f"{groups.where} have blocks of {sorted(map(str, blocks))}: expected one kind"
        )
    return partial(ScaledWeights, block=blocks.pop())


def _modelopt(said: _Said) -> Maker:
    said.expect("kv_cache_quant_algo", None)
    algorithm = said.expect("quant_algo", *_MODELOPT)
    return _MODELOPT[algorithm]


def _gptq(said: _Said) -> Maker:
    said.expect("bits", 4)
    said.expect("desc_act", False, None)
    said.expect("lm_head", False, None)
    said.refuse("dynamic", "meta_quant")
    form = said.expect("checkpoint_format", "gptq", "gptq_v2", None)
    symmetric = said.expect("sym", True, False)
    less = 0 if form == "gptq_v2" else 1
    return partial(GroupedInt4Weights, group=_group(said), less=less, symmetric=symmetric)


def _awq(said: _Said) -> Maker:
    said.expect("bits", 4)
    said.expect("version", "gemm", "GEMM")
    zeros = said.expect("zero_point", True, False)
    return partial(GroupedInt4Weights, group=_group(said), awq=True, symmetric=not zeros)


def _group(said: _Said) -> int | None:
    """Inputs that share a factor; -1 says all."""
    size = said.values.get("group_size")
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(
            f"{said.where}: group_size={size!r} is not supported, expected -1, or a size such as "
            "128"
        )
    return None if size == -1 else size


# By the names that ModelOpt 0.47 writes.
_MODELOPT: Mapping[str, Maker] = {
    "FP8": ScaledWeights,
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledWeights,
    "fp8_pb_wo": partial(ScaledWeights, block=_MODELOPT_BLOCK),
    "W8A8_SQ_PER_CHANNEL": ScaledWeights,
    "mxfp4": partial(Mxfp4Matrices, numbers="weight"),
}

_METHODS: Mapping[str, Callable[[_Said], Maker]] = {
    "fp8": _block_fp8,
    "mxfp4": lambda said: Mxfp4Weights,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
}
