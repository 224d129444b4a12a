"""Two-batch overlap for Flax decoders, and a decode engine built on it."""

from tbo_jax import _moved
from tbo_jax.attention.buffers import AttentionBuffers, allocate_attention_buffers
from tbo_jax.checkpoint.tensors import CheckpointError
from tbo_jax.engine.async_llm import AsyncLLM, TokenStream
from tbo_jax.engine.config import EngineConfig
from tbo_jax.engine.generation import Completion, Score
from tbo_jax.engine.llm import LLM
from tbo_jax.engine.running import TokenEvent
from tbo_jax.moe.expert_weights import ExpertWeights
from tbo_jax.moe.experts import apply_experts
from tbo_jax.moe.routing import top_k_softmax
from tbo_jax.overlap.batch import ForwardBatch, SplitRule, batch_dataclass, batch_field
from tbo_jax.overlap.config import OverlapConfig, Strategy
from tbo_jax.overlap.split import gather_tokens, split_batch_decoder_layers
from tbo_jax.overlap.stages import Chunks, StackedLayers, Stage, run_layers
from tbo_jax.parallel.exchange import make_exchange
from tbo_jax.parallel.sharding import RANKS, make_mesh
from tbo_jax.sampling.logprobs import TokenLogprobs
from tbo_jax.sampling.params import SamplingParams
from tbo_jax.step.inputs import Inputs
from tbo_jax.step.runner import ModelRunner
from tbo_jax.step.shapes import Bucket, CacheConfig
from tbo_jax.text import TokenizerError

__version__ = "0.2.0"  # here only: pyproject.toml reads it from this line

_moved.install()

__all__ = [
    "LLM",
    "RANKS",
    "AsyncLLM",
    "AttentionBuffers",
    "Bucket",
    "CacheConfig",
    "CheckpointError",
    "Chunks",
    "Completion",
    "EngineConfig",
    "ExpertWeights",
    "ForwardBatch",
    "Inputs",
    "ModelRunner",
    "OverlapConfig",
    "SamplingParams",
    "Score",
    "SplitRule",
    "StackedLayers",
    "Stage",
    "Strategy",
    "TokenEvent",
    "TokenLogprobs",
    "TokenStream",
    "TokenizerError",
    "__version__",
    "allocate_attention_buffers",
    "apply_experts",
    "batch_dataclass",
    "batch_field",
    "gather_tokens",
    "make_exchange",
    "make_mesh",
    "run_layers",
    "split_batch_decoder_layers",
    "top_k_softmax",
]
