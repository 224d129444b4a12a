"""Two-batch overlap for Flax decoders, and the decode engine that proves it."""

from tbo_jax.batch import ForwardBatch, SplitRule, batch_dataclass, batch_field
from tbo_jax.buffers import AttentionBuffers, allocate_attention_buffers
from tbo_jax.config import OverlapConfig
from tbo_jax.engine.engine import TokenEvent
from tbo_jax.engine.llm import LLM, Completion
from tbo_jax.inputs import Inputs
from tbo_jax.runner import ModelRunner
from tbo_jax.sampling_params import SamplingParams
from tbo_jax.shapes import Bucket, CacheConfig
from tbo_jax.split import gather_tokens, split_batch_decoder_layers
from tbo_jax.stages import StackedLayers, Stage, run_layers

__all__ = [
    "LLM",
    "AttentionBuffers",
    "Bucket",
    "CacheConfig",
    "Completion",
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
