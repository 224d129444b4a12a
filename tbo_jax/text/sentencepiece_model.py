"""Tokenizers of folders that have a SentencePiece `tokenizer.model` in place of `tokenizer.json`.

The model is turned into a tokenizer of the tokenizers library, by SentencePiece's own description
of itself (`sentencepiece_model.proto`), so that special tokens, streams and chat templates work as
with any other. The tokens of a text between two special tokens are those that
`SentencePieceProcessor.encode` gives for it; only where a unigram model has two best ways to cut a
text, which are equally probable, the other one may be taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tbo_jax.text.files import TokenizerError

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_CLASSES = (None, "Ernie4_5_Tokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


def read_sentencepiece_model(
    path: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str], list[str]]:
    """The tokenizer of a `tokenizer.model`, still without its special tokens.

    Args:
        path: of the file.
        config: contents of the `tokenizer_config.json` beside it.

    Returns:
        The tokenizer, its special tokens by name ("bos_token", ...), and all its special tokens.

    Raises:
        TokenizerError: a library is missing, the file is no SentencePiece model, or it is of a kind
            or for a tokenizer class that is not supported.
    """
    name = config.get("tokenizer_class")
    if name not in _CLASSES:
        raise TokenizerError(
            f"{path}: a SentencePiece model of the tokenizer class {name!r:.80} is not supported; "
            f"expected {', '.join(filter(None, _CLASSES))}, or a folder with a tokenizer.json"
        )
    proto, processor = _read_model(path)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    kind, suffix = trainer.model_type, trainer.treat_whitespace_as_suffix
    if kind not in (_UNIGRAM, _BPE) or suffix:
        what = "whitespace as a suffix" if suffix else f"model type {kind}"
        raise TokenizerError(
            f"{path}: {what} is not supported; expected a BPE or unigram model with whitespace as "
            "a prefix"
        )
    user_defined = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    whole = [re.escape(piece) for piece in sorted(user_defined, key=len, reverse=True)]
    if trainer.byte_fallback and (user_defined or kind == _UNIGRAM):
        # A text that spells the name of a byte, such as "<0x41>", is not that byte.
        whole.append("<(?=0x[0-9A-F]{2}>)")
    backend = tokenizers.Tokenizer(_model(proto, bool(user_defined)))
    # The serialised form of a tokenizer lacks such a normalizer; nothing here serialises one.
    backend.normalizer = normalizers.Normalizer.custom(_OwnNormalizer(processor))
    if whole:
        pattern = tokenizers.Regex("|".join(whole))
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    if trainer.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if rules.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    special = [p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)]
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    names = {name: proto.pieces[index].piece for name, index in ids.items() if index >= 0}
    return backend, names, special


def _read_model(path: Path) -> tuple[Any, Any]:
    """The description of a model, and SentencePiece's own processor of it."""
    # Imported here because few folders need them.
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor
        from sentencepiece import sentencepiece_model_pb2 as description
    except ImportError as error:
        raise TokenizerError(
            f"{path} is a SentencePiece model, and reading it needs sentencepiece and protobuf "
            f"({error}): pip install 'tbo-jax[sentencepiece]'"
        ) from error
    proto: Any = description.ModelProto()  # type: ignore[attr-defined]
    try:
        raw = path.read_bytes()
        proto.ParseFromString(raw)
        if not proto.pieces:
            raise RuntimeError("it has no pieces")
        return proto, SentencePieceProcessor(model_proto=raw)
    except (OSError, DecodeError, RuntimeError) as error:
        raise TokenizerError(f"{path}: expected a SentencePiece model: {error}") from error


def _model(proto: Any, has_user_defined: bool) -> models.Model:
    trainer = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if trainer.model_type == _UNIGRAM:
        return models.Unigram(pieces, trainer.unk_id, byte_fallback=trainer.byte_fallback)
    normal = {p.piece: (-p.score, i) for i, p in enumerate(proto.pieces) if p.type == _NORMAL}
    merges = [
        (order, text[:cut], text[cut:])
        for text, order in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    merges.sort(key=lambda merge: merge[0])
    return models.BPE(
        vocab={text: index for index, (text, _) in enumerate(pieces)},
        merges=[(left, right) for _, left, right in merges],
        unk_token=proto.pieces[trainer.unk_id].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
        ignore_merges=has_user_defined,  # these are never merged from others
    )


class _OwnNormalizer:
    """The model's own rules for characters and spaces, which SentencePiece applies itself.

    The `Precompiled` normalizer of the tokenizers library gives other text for some combining
    characters.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def normalize(self, text: tokenizers.NormalizedString) -> None:
        normalized = self._processor.normalize(text.normalized)
        text.replace(tokenizers.Regex(r"(?m)\A.*\z"), normalized)
