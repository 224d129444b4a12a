"""Write a model as a Hugging Face folder: the inverse of `load_model`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from tbo_jax.checkpoint.names import parameter_sources, published_layout
from tbo_jax.layers.decoder import CausalLM
from tbo_jax.models import find_architecture
from tbo_jax.models.hf_config import HfConfig
from tbo_jax.quantized.array import decoded


def save_model(model: CausalLM, config: Mapping[str, Any], folder: Path, dtype: Any) -> None:
    """Write config.json and model.safetensors, with plain weights where those here are quantised.

    Args:
        model: the model; its weights are gathered to the host.
        config: contents of config.json, from which `model` was made.
        folder: made if it does not exist.
        dtype: of the written tensors.
    """
    architecture = find_architecture(config.get("model_type"))
    parsed = architecture.parse_config(HfConfig(config, "config"), model.config.dtype)
    layout = published_layout(architecture)
    tensors: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = np.asarray(decoded(variable.get_value(), dtype))
        for source in parameter_sources(path, variable, parsed, layout):
            part = value[source.at]
            part = part[..., source.column : source.column + source.shape[-1]]
            if source.alternating:
                part = np.stack(np.split(part, 2, axis=-1), axis=-1).reshape(part.shape)
            whole = source.part(tuple(slice(0, n) for n in source.shape))
            if source.name not in tensors:
                tensors[source.name] = np.empty(source.tensor_shape, dtype)
            tensors[source.name][whole] = np.swapaxes(part, -1, -2) if source.transpose else part
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.dumps(_described(config, dtype), indent=2)
    (folder / "config.json").write_text(text + "\n", "utf-8")


def _described(config: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """`config` for plain weights of `dtype`; also what is in it of the language model."""
    key = "dtype" if "dtype" in config else "torch_dtype"  # of transformers 5, and before
    written = {k: v for k, v in config.items() if k != "quantization_config"}
    if isinstance(text := written.get("text_config"), Mapping):
        written["text_config"] = _described(text, dtype)
    return written | {key: np.dtype(dtype).name}
