"""The tokenizer of a Hugging Face model folder: text to token ids and back, and chat prompts."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from tbo_jax.text.chat import ChatTemplate, Message, read_chat_template
from tbo_jax.text.files import TokenizerError, read_json_object
from tbo_jax.text.sentencepiece_model import read_sentencepiece_model
from tbo_jax.text.special_tokens import read_declared_tokens
from tbo_jax.text.tiktoken_model import missing_bytes, read_tiktoken_model, with_reserved


class Tokenizer:
    """A `tokenizers.Tokenizer` together with its special tokens and its chat template.

    Decoding gives the exact text of the tokens: `clean_up_tokenization_spaces`, which removes
    spaces that the model wrote, is not applied (nor does transformers apply it to BPE).

    Args:
        backend: the tokenizer; its truncation and padding are switched off.
        special_tokens: names such as "bos_token" and "eos_token" with their text.
        chat_template: jinja2 text, or None.
        missing_bytes: bytes of UTF-8 that have no token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        missing_bytes: frozenset[int] = frozenset(),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        self._missing_bytes = missing_bytes
        self._byte_level: dict[tuple[int, bool], bytes] = {}  # of the ids that were asked for
        # What `decode` leaves out, and `text.stream` takes as a stop string all the same.
        self.skipped_tokens = frozenset(_skipped_tokens(backend))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a model folder.

        `tokenizer.json` is taken where it is present, else `tiktoken.model`, else the SentencePiece
        `tokenizer.model`. `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`
        and `chat_template.jinja` are read where present; `text.special_tokens` says which of them
        counts. As in transformers 5, `tokenizer.json` alone decides which special tokens `encode`
        puts around a text; without it, `add_bos_token` and `add_eos_token` of the config do.

        Raises:
            TokenizerError: there is no tokenizer, its file is corrupt, or another file holds values
                of the wrong type.
        """
        folder = Path(folder)
        config = read_json_object(folder / "tokenizer_config.json") or {}
        missing: frozenset[int] = frozenset()
        if (path := folder / "tokenizer.json").is_file():
            with _library_errors(
                f"{folder}: tokenizer.json is corrupt; expected a file that the tokenizers library "
                f"{tokenizers.__version__} can read"
            ):
                backend = tokenizers.Tokenizer.from_file(str(path))
            read_json_object(path)  # refuses keys that occur twice, of which the library takes one
            tokens = read_declared_tokens(folder, config, backend.get_added_tokens_decoder())
        elif (path := folder / "tiktoken.model").is_file():
            backend = read_tiktoken_model(path, config)
            missing = missing_bytes(backend)
            tokens = read_declared_tokens(folder, config, {})
            tokens = with_reserved(tokens, backend.get_vocab_size())
        elif (path := folder / "tokenizer.model").is_file():
            backend, named, special = read_sentencepiece_model(path, config)
            tokens = read_declared_tokens(folder, config, {}).with_model(named, special)
        else:
            raise TokenizerError(
                f"{folder}: no tokenizer.json found, nor a tiktoken.model or tokenizer.model; "
                "expected the folder of a Hugging Face model"
            )
        with _library_errors(f"{folder}: the special tokens cannot be added"):
            tokens.add_to(backend)
        if path.name != "tokenizer.json":
            _add_around(backend, folder, config, tokens.texts)
        backend.encode_special_tokens = _flag(folder, config, "split_special_tokens")
        return cls(backend, tokens.texts, read_chat_template(folder, config), missing)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        """Whether it can read conversations."""
        return self._chat_template is not None

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template (jinja2 text)."""
        return Tokenizer(self._backend, self._special_tokens, source, self._missing_bytes)

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence, where the folder names one."""
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence, where the folder names one."""
        return self._special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`, or None where there is no such token.

        Raises:
            TokenizerError: `eos_token` is named but is not in the vocabulary.
        """
        if self.eos_token is None:
            return None
        token_id = self._backend.token_to_id(self.eos_token)
        if token_id is None:
            raise TokenizerError(f"eos_token {self.eos_token!r} is not in the vocabulary")
        return token_id

    def digest(self) -> str:
        """A number that tokenizers share only if they give the same ids and text."""
        parts = [self._backend.to_str(), self._chat_template or "", repr(self._special_tokens)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @cached_property
    def decoder_description(self) -> Mapping[str, Any] | None:
        """The decoder in the JSON format of the tokenizers library; None where there is none."""
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def token(self, token_id: int, skip_special_tokens: bool = True) -> str | None:
        """The vocabulary entry that `decode` sees for an id; None where it skips the id.

        Skipped are ids outside the vocabulary (models pad their vocabulary) and special tokens.

        Raises:
            TokenizerError: the id is not an integer from 0 to 2**32 - 1.
        """
        token = self._backend.id_to_token(_checked_id(token_id))
        if skip_special_tokens and token in self.skipped_tokens:
            return None
        return token

    def byte_level_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What a byte-level decoder makes of an id; nothing of one that `decode` skips.

        Raises:
            TokenizerError: the id is not an integer from 0 to 2**32 - 1.
        """
        key = token_id, skip_special_tokens
        known = self._byte_level.get(key)
        if known is None:
            known = _byte_level_bytes(self.token(token_id, skip_special_tokens) or "")
            self._byte_level[key] = known
        return known

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, never truncated or padded.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: let the tokenizer put its special tokens (such as BOS) around it.

        Raises:
            TokenizerError: `text` is not a str or cannot be written as UTF-8.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text: expected a str, got {type(text).__name__}")
        with _library_errors(f"text {text!r:.80} cannot be encoded"):
            # The library's own message for a lone surrogate is that the text is not a string.
            raw = text.encode("utf-8")
            # Not with an empty set: a look at each byte of a long text holds Python's lock.
            missing = self._missing_bytes and self._missing_bytes.intersection(raw)
            if missing:
                raise ValueError(f"the vocabulary has no token for the byte {min(missing):#x}")
            # As a batch: the library's `encode` holds Python's lock, for half a second a megabyte.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary have no text.

        Raises:
            TokenizerError: an id is not an integer from 0 to 2**32 - 1, or the decoder fails.
        """
        checked = [_checked_id(token_id) for token_id in ids]
        with _library_errors("the decoder of the tokenizer failed"):
            return self._backend.decode(checked, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Text of a conversation under the folder's chat template.

        Args:
            messages: at least one {"role": str, "content": str}; other keys as `ChatTemplate`
                takes them.
            add_generation_prompt: end with the header of an assistant message.
            arguments: further variables that the template sees, of JSON types.
            tools: what the model may call, of JSON types.

        Raises:
            TokenizerError: there is no template, it is broken, refused the messages, or took too
                much time or memory; a message has another shape; or an argument's name is taken.
        """
        return self._chat.render(messages, add_generation_prompt, arguments, tools)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the folder's chat template.

        The template writes the special tokens itself, so none is added: never a double BOS. As in
        transformers, a special token written in a message's content becomes that token.

        Raises:
            TokenizerError: as `render_chat`.
        """
        text = self.render_chat(messages, add_generation_prompt, arguments, tools)
        return self.encode(text, add_special_tokens=False)

    @property
    def _chat(self) -> ChatTemplate:
        if self._chat_template is None:
            raise TokenizerError(
                "this tokenizer has no chat template; expected chat_template.jinja, or "
                "chat_template in tokenizer_config.json as a string or as a list with an entry "
                'named "default"'
            )
        return ChatTemplate(self._chat_template, self._special_tokens)


def _add_around(
    backend: tokenizers.Tokenizer,
    folder: Path,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> None:
    """Lets `encode` put the special tokens around a text that the config asks for."""
    template, used = ["$A"], []
    for name, at in (("bos_token", 0), ("eos_token", len(template))):
        if _flag(folder, config, f"add_{name}"):
            if name not in special_tokens:
                path = folder / "tokenizer_config.json"
                raise TokenizerError(f"{path}: add_{name} is true, but there is no {name}")
            text = special_tokens[name]
            template.insert(at and len(template), text)
            used.append((text, backend.token_to_id(text)))
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _flag(folder: Path, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        path = folder / "tokenizer_config.json"
        raise TokenizerError(f"{path}: {key}: expected true or false, got {value!r:.80}")
    return value


def _skipped_tokens(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """Tokens that the backend leaves out of a text when it skips special tokens.

    The flag alone does not tell: a token that was special once is still skipped after another flag
    was given to it.
    """
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special or (backend.decode([token_id]) != backend.decode([token_id], False)):
            yield token.content


@contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Turns what the tokenizers library raises, plain Exception or a Rust panic, into our error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError):
        raise
    except BaseException as error:  # A panic derives from BaseException and cannot be imported.
        raise TokenizerError(f"{message}: {error}") from error


def _letters_of_bytes() -> Iterator[tuple[str, int]]:
    """The letter that stands for each byte in a byte-level vocabulary.

    A byte that is a printable letter of Latin-1 stands for itself, the others take letters from 256
    on (openai/gpt-2, encoder.py).
    """
    hidden = 256
    for byte in range(256):
        if chr(byte).isprintable() and not chr(byte).isspace():
            yield chr(byte), byte
        else:
            yield chr(hidden), byte
            hidden += 1


_BYTE_OF = dict(_letters_of_bytes())


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of a token; of an added one, which is no byte-level text, those of its UTF-8."""
    try:
        return bytes([_BYTE_OF[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8")


def _checked_id(token_id: int) -> int:
    try:
        value = operator.index(token_id)
    except TypeError:
        value = -1
    if not 0 <= value < 2**32:
        raise TokenizerError(f"token id: expected an integer from 0 to 2**32 - 1, got {token_id!r}")
    return value
