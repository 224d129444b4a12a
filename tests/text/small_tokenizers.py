"""Small tokenizers of the kinds that checkpoints use, built here so that tests need no files."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tbo_jax.text import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Ein süßer Bär aß Öl; l'été dernier, ça allait déjà mieux.",
    "Smile 😀, family 👩‍👩‍👧, price 5 €, and again 😀😀 naïve café.",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def word_tokenizer(
    decoder: decoders.Decoder | None, tokens: Sequence[str], special: Sequence[str] = ("</s>",)
) -> Tokenizer:
    """A tokenizer with this vocabulary, in this order, for tests that decode only."""
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


def train_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>", "<eos>"],
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return backend


def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(train_byte_level(), {"bos_token": "<bos>", "eos_token": "<eos>"})


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a space mark and byte fallback (ids 0 to 255), decoded as Llama 2 does."""
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    words = ["▁", "▁▁", "a", "b", "▁the", "▁é", "né", ".", "\ufffd", "▁end"]
    return word_tokenizer(decoder, [*BYTE_TOKENS, *words])
