"""Text in and out of a model: tokenizer, chat templates, streaming detokenisation, stop strings."""

from __future__ import annotations

from tbo_jax.text.chat import Message
from tbo_jax.text.detokenizer import IncrementalDetokenizer
from tbo_jax.text.end_of_sequence import end_of_sequence_ids
from tbo_jax.text.files import TokenizerError
from tbo_jax.text.stream import TextStream
from tbo_jax.text.tokenizer import Tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "Message",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "end_of_sequence_ids",
]
