"""Text in and out of a model: tokenizer, chat templates, streaming detokenisation, stop strings."""

from __future__ import annotations

from tbo_jax.text.chat import Message, check_template_arguments
from tbo_jax.text.detokenizer import IncrementalDetokenizer, WholeTokens
from tbo_jax.text.end_of_sequence import end_of_sequence_ids
from tbo_jax.text.files import TokenizerError
from tbo_jax.text.generation_config import DefaultSampling, default_sampling
from tbo_jax.text.stream import TextStream
from tbo_jax.text.token_bytes import TokenBytes, token_bytes
from tbo_jax.text.tokenizer import Tokenizer

__all__ = [
    "DefaultSampling",
    "IncrementalDetokenizer",
    "Message",
    "TextStream",
    "TokenBytes",
    "Tokenizer",
    "TokenizerError",
    "WholeTokens",
    "check_template_arguments",
    "default_sampling",
    "end_of_sequence_ids",
    "token_bytes",
]
