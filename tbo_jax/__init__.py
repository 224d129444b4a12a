"""Two-batch overlap for Flax decoders, and the decode engine that proves it."""

from importlib.metadata import PackageNotFoundError, version

from tbo_jax import _moved
from tbo_jax.attention.buffers import AttentionBuffers, allocate_attention_buffers
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.engine import TokenEvent
from tbo_jax.engine.llm import LLM, Completion
from tbo_jax.overlap.batch import ForwardBatch, SplitRule, batch_dataclass, batch_field
from tbo_jax.overlap.config import OverlapConfig
from tbo_jax.overlap.split import gather_tokens, split_batch_decoder_layers
from tbo_jax.overlap.stages import StackedLayers, Stage, run_layers
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig

_moved.install()

try:
    __version__ = version("tbo-jax")
except PackageNotFoundError:  # run from a folder, not installed
    __version__ = "unknown"

__all__ = [
    "LLM",
    "AttentionBuffers",
    "Bucket",
    "CacheConfig",
    "Completion",
    "EngineConfig",
    "ForwardBatch",
    "Inputs",
    "ModelRunner",
    "OverlapConfig",
    "SamplingParams",
    "SplitRule",
    "StackedLayers",
    "Stage",
    "TokenEvent",
    "allocate_attention_buffers",
    "batch_dataclass",
    "batch_field",
    "gather_tokens",
    "run_layers",
    "split_batch_decoder_layers",
]
