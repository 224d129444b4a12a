"""Load a Hugging Face folder: every tensor goes from its file straight to its shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tbo_jax.checkpoint.formats import find_format, read_quantization
from tbo_jax.checkpoint.held import hold
from tbo_jax.checkpoint.names import (
    HEAD,
    Layout,
    Source,
    count_layers,
    find_layout,
    parameter_sources,
)
from tbo_jax.checkpoint.quantized import PlainWeights, WeightFormat
from tbo_jax.checkpoint.quantizing import QUANTIZE, Quantize, QuantizingWeights
from tbo_jax.checkpoint.read import read_parameters
from tbo_jax.checkpoint.tensors import CheckpointError, TensorFolder
from tbo_jax.host.json_files import read_json_object
from tbo_jax.layers.config import DecoderConfig
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.models import find_architecture
from tbo_jax.models.architecture import Architecture
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.parallel.exchange import check_divisible
from tbo_jax.parallel.sharding import TENSOR

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all
# Of each weight, by name, the tensors that hold it and their shapes.
Stored = Mapping[str, Mapping[str, tuple[int, ...]]]
_COMPARED = 8 << 20  # bytes of two tensors that are compared at a time


def read_config(folder: Path, dtype: Any) -> tuple[DecoderConfig, Architecture]:
    """Read config.json of a Hugging Face folder.

    Raises:
        CheckpointError: it is missing, is not JSON, or asks for something that is not supported.
    """
    path = folder / "config.json"
    try:
        values = read_json_object(path)
        architecture = find_architecture(values.get("model_type"))
        return architecture.parse_config(HfConfig(values, str(path)), dtype), architecture
    except ValueError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise CheckpointError(message) from error


def load_model(
    folder: str | Path,
    *,
    mesh: Mesh,
    dtype: Any,
    scanned: bool = False,
    quantize: Quantize = "stored",
    progress: Progress | None = None,
) -> CausalLM:
    """Load the checkpoint in `folder` onto the devices of `mesh`.

    Of what is not placed yet the host holds at most two of the largest parameter. Each part of a
    weight is read once, however many devices have it.

    Args:
        folder: Hugging Face folder with config.json and safetensors.
        mesh: of `make_mesh`, which tells what is sharded over which axis.
        dtype: of the loaded weights; the file's may differ.
        scanned: stack equal layers for a scan.
        quantize: "stored" keeps the matrices of layers and head as the checkpoint has them, "none"
            decodes what is quantised, "fp8" and "int8" quantise a checkpoint that is not, with a
            factor for each output.
        progress: called with (bytes done, bytes in all), bytes of the files.

    Raises:
        CheckpointError: unreadable or unsupported configuration or quantisation, broken files, a
            tensor that is missing, left over or of another shape, experts or heads that do not
            divide over the devices.
    """
    folder = Path(folder)
    config, architecture = read_config(folder, dtype)
    tensors = TensorFolder.open(folder)
    weights = _quantize(folder, find_format(folder, read_quantization(folder))(tensors), quantize)
    layout = find_layout(tensors.names, config, architecture)
    # Before anything is built: a wrong number may be large.
    if (found := count_layers(tensors.names, layout)) < config.num_layers:
        raise CheckpointError(
            f"{folder}: config.json has {config.num_layers:,} layers, the tensors are of {found:,}"
        )
    config = _untied_if_different(tensors, config, layout)
    try:
        if config.num_experts:
            check_divisible(config.num_experts, mesh.size)
        config.of_device(mesh.shape[TENSOR])
        abstract = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0), scanned=scanned))
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    graph, state = nnx.split(abstract)
    flat = nnx.to_flat_state(state)
    sources = {path: parameter_sources(path, variable, config, layout) for path, variable in flat}
    wanted = [s for found in sources.values() for s in found]
    # Once: some formats read tensors to check them.
    stored = {s.name: weights.stored(s.name, s.tensor_shape) for s in wanted}
    _check_tensors(tensors, weights, stored, config, architecture, layout)

    total = sum(_file_bytes(tensors, stored, source) for source in wanted)
    held = {
        path: hold(path, v, sources[path], weights, mesh, decode=quantize == "none")
        for path, v in flat
    }
    parts = {(path, part): w for path, h in held.items() for part, w in h.parts.items()}
    read: dict[Any, dict[str, Any]] = {path: {} for path, _ in flat}
    loaded, done = {}, 0
    for (path, part), value in read_parameters(parts):
        read[path][part] = value
        if len(read[path]) < len(held[path].parts):
            continue
        loaded[path] = held[path].together(read.pop(path))
        done += sum(_file_bytes(tensors, stored, source) for source in sources[path])
        if progress is not None:
            progress(done, total)
    placed = [(path, variable.replace(loaded[path])) for path, variable in flat]
    return nnx.merge(graph, nnx.from_flat_state(placed))


def _quantize(folder: Path, weights: WeightFormat, quantize: Quantize) -> WeightFormat:
    """The weights as they are to be held."""
    if quantize == "stored" or quantize == "none":
        return weights
    if quantize not in QUANTIZE:
        raise ValueError(f"quantize is {quantize!r}: expected one of {', '.join(QUANTIZE)}")
    if type(weights) is not PlainWeights:
        raise CheckpointError(
            f"{folder}: quantize={quantize!r}, but config.json has a quantization_config already: "
            'expected "stored" or "none"'
        )
    return QuantizingWeights(weights.tensors, quantize)


def _untied_if_different(
    tensors: TensorFolder, config: DecoderConfig, layout: Layout
) -> DecoderConfig:
    """Without the tie of embedding and head, if both are there and not the same.

    Transformers 5 does so, whatever config.json says.
    """
    if not config.tie_word_embeddings or not {HEAD, layout.embedding} <= set(tensors.names):
        return config
    if layout.embedding == HEAD or _are_equal(tensors, HEAD, layout.embedding):
        return config
    logger.warning(
        "%s: config.json ties %s to %s, but both are there and differ: both count",
        tensors.folder, HEAD, layout.embedding,
    )  # fmt: skip
    return replace(config, tie_word_embeddings=False)


def _are_equal(tensors: TensorFolder, first: str, second: str) -> bool:
    """Whether two tensors have the same shape, dtype and values, read a part at a time."""
    one, other = tensors.info(first), tensors.info(second)
    if (one.shape, one.dtype) != (other.shape, other.dtype) or not one.shape:
        return False
    rows = max(1, one.shape[0] * _COMPARED // max(one.nbytes, 1))
    for start in range(0, one.shape[0], rows):
        part = (slice(start, start + rows),)
        if not np.array_equal(tensors.read(first, part), tensors.read(second, part)):
            return False
    return True


def _file_bytes(tensors: TensorFolder, stored: Stored, source: Source) -> int:
    """Bytes of the part of a weight that a parameter takes."""
    whole = sum(tensors.info(name).nbytes for name in stored[source.name])
    return whole * math.prod(source.shape) // math.prod(source.tensor_shape)


def _check_tensors(
    tensors: TensorFolder,
    weights: WeightFormat,
    stored: Stored,
    config: DecoderConfig,
    architecture: Architecture,
    layout: Layout,
) -> None:
    wanted = {name: shape for of in stored.values() for name, shape in of.items()}
    present = set(tensors.names)
    missing = sorted(wanted.keys() - present)
    if missing:
        raise CheckpointError(f"{tensors.folder}: {_listed(missing)} missing")

    def passed_over(name: str) -> bool:
        if weights.passes_over(name):
            return True
        return _redundant(name, config) or architecture.ignores(layout.behind_prefix(name), config)

    extra = sorted(name for name in present - wanted.keys() if not passed_over(name))
    if extra:
        raise CheckpointError(
            f"{tensors.folder}: {_listed(extra)} not part of a {config.model_type} model "
            f"of this configuration"
        )
    for name, expected in wanted.items():
        shape = tensors.info(name).shape
        if shape != expected:
            raise CheckpointError(
                f"{tensors.folder}: tensor {name} has shape {list(shape)}, "
                f"expected {list(expected)}"
            )


def _redundant(name: str, config: DecoderConfig) -> bool:
    """Tensors that older exports write although they follow from the configuration or others."""
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"tensors {shown} are" if len(names) > 1 else f"tensor {shown} is"
