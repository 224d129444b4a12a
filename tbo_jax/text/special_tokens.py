"""Special and added tokens as the configuration files of a model folder declare them.

Five files may name tokens: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
`added_tokens.json`, and inside the second `added_tokens_decoder`. The rules of which one counts are
those of `TokenizersBackend` in transformers 5.24:

* `added_tokens_decoder`, where the config has it, replaces `special_tokens_map.json` and
  `added_tokens.json`. Its flags (`special`, `lstrip`, ...) replace those of `tokenizer.json`.
* Without it the map overrides the config for the seven standard names, the config overrides the map
  for names of one model, and a token of `added_tokens.json` is special if a name stands for it.
* A token that has a name but is no added token yet becomes a special one, with the id of the
  vocabulary or, if it is not there, with the next free id.

As there, a token that a file declares with a later id than the next free one gets the next free
one; a warning says so. An id that is not the vocabulary's, which is passed over there, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from tbo_jax.text.files import TokenizerError, read_json_object

_STANDARD_NAMES = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = frozenset({"single_word", "lstrip", "rstrip", "normalized", "special"})
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

_log = logging.getLogger(__name__)

Token = str | tokenizers.AddedToken


@dataclass(frozen=True)
class DeclaredTokens:
    """Tokens that the configuration files of a folder declare.

    Attributes:
        named: the token of each name, such as "bos_token".
        extra: further special tokens, which have no name.
        listed: added tokens by the id that they must have.
        source: the file that declares `listed`, for errors.
    """

    named: Mapping[str, Token]
    extra: Sequence[Token]
    listed: Mapping[int, tokenizers.AddedToken]
    source: str

    @property
    def texts(self) -> dict[str, str]:
        """The text of the token of each name."""
        return {name: str(token) for name, token in self.named.items()}

    def with_model(self, named: Mapping[str, str], special: Sequence[str]) -> DeclaredTokens:
        """The tokens, with those of a SentencePiece model whose names and flags no file declares.

        All are looked for in the text as it is: the model's rules put a space before what they
        normalize, which would be part of a token then.
        """
        extra = [tokenizers.AddedToken(text, special=True) for text in special]
        listed = {
            token_id: tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=token.special,
            )
            for token_id, token in self.listed.items()
        }
        names = {**named, **self.named}
        return replace(self, named=names, extra=[*self.extra, *extra], listed=listed)

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds the tokens to a tokenizer, and changes the flags of those that it has.

        Raises:
            TokenizerError: a token has another id than the declared one.
        """
        tokens: list[Token] = [token for _, token in sorted(self.listed.items())]
        present = {token.content for token in backend.get_added_tokens_decoder().values()}
        present |= {str(token) for token in tokens}
        for token in [*self.named.values(), *self.extra]:
            if str(token) not in present and token not in tokens:
                tokens.append(token)
        named = set(self.texts.values())
        absent = {t.content for t in self.listed.values() if backend.token_to_id(t.content) is None}
        backend.add_tokens([_as_added(token, named) for token in tokens])
        for declared, token in self.listed.items():
            actual = backend.token_to_id(token.content)
            if actual == declared:
                continue
            said = f"{self.source}: {token.content!r} is declared with id {declared}, but"
            if token.content not in absent:
                raise TokenizerError(f"{said} the tokenizer has it at id {actual}")
            _log.warning("%s the next free id is %d, which it gets", said, actual)


def read_declared_tokens(
    folder: Path, config: Mapping[str, Any], present: Mapping[int, tokenizers.AddedToken]
) -> DeclaredTokens:
    """The tokens that the files of a folder declare.

    Args:
        folder: where `special_tokens_map.json` and `added_tokens.json` are, if there are any.
        config: contents of `tokenizer_config.json`.
        present: the added tokens of `tokenizer.json` by id; empty where there is no such file.

    Raises:
        TokenizerError: a token is malformed, or two files give one id to different tokens.
    """
    names = _read_config(folder / _CONFIG, config)
    if "added_tokens_decoder" in config:
        path = folder / _CONFIG
        listed = _read_listed(f"{path}: added_tokens_decoder", config["added_tokens_decoder"])
    else:
        path = folder / _ADDED
        special = _read_map(folder / _MAP, names)
        listed = _read_added(path, special, present) | dict(present)
    by_text = {token.content: token for token in listed.values()}
    standard = {name: by_text.get(str(token), token) for name, token in names.standard.items()}
    named = standard | names.objects | names.strings
    order = [name for name in _STANDARD_NAMES if name in named]
    named = {name: named[name] for name in dict.fromkeys([*order, *named])}
    extra = names.fallback if names.extra is None else names.extra
    return DeclaredTokens(named, extra, listed, str(path))


@dataclass
class _Names:
    """What the config, and then the map, name.

    Attributes:
        standard: tokens of the seven standard names.
        objects: tokens of a model's own names that the config gives as objects, or the map gives.
        strings: those that the config gives as strings; they come before `objects`.
        extra: tokens without a name; None where no file has such a list.
        fallback: tokens without a name under an older key, which count where there is no list.
    """

    standard: dict[str, Token]
    objects: dict[str, Token]
    strings: dict[str, Token]
    extra: list[Token] | None
    fallback: list[Token]


def _read_config(path: Path, config: Mapping[str, Any]) -> _Names:
    names = _Names({}, {}, {}, None, [])
    for name, value in config.items():
        where = f"{path}: {name}"
        if name in _STANDARD_NAMES:
            if value is not None:
                names.standard[name] = _token(where, value)
        elif not name.endswith("_token"):
            continue
        elif isinstance(value, str):
            names.strings[name] = value
        elif isinstance(value, Mapping) and value.get("__type") == "AddedToken":
            names.objects[name] = _token(where, value)
    key, older = "extra_special_tokens", "additional_special_tokens"
    if not config.get(key) and older in config:
        key = older
    elif older in config:
        names.fallback = _tokens(f"{path}: {older}", config[older])
    if isinstance(config.get(key), Mapping):
        names.strings |= _named_tokens(f"{path}: {key}", config[key])
    elif key in config:
        names.extra = _tokens(f"{path}: {key}", config[key])
    return names


def _read_map(path: Path, names: _Names) -> set[str]:
    """Adds what the map names; gives the texts that are special where `added_tokens.json` is read.

    Those are not the tokens that the config gives as objects, nor those of the older key.
    """
    special = {name: token for name, token in names.standard.items() if isinstance(token, str)}
    special_extra = [token for token in names.extra or [] if isinstance(token, str)]
    for name, value in (read_json_object(path) or {}).items():
        where = f"{path}: {name}"
        if name in _STANDARD_NAMES:
            names.standard.pop(name, None)
            special.pop(name, None)
            if value is not None:
                names.standard[name] = _token(where, value, special=True)
                special[name] = str(names.standard[name])
        elif name == "additional_special_tokens":
            names.fallback = _tokens(where, value, special=True)
        elif name == "extra_special_tokens" and isinstance(value, Mapping):
            names.strings |= _named_tokens(where, value)
            names.extra, special_extra = None, []
        elif name == "extra_special_tokens" and value is not None:
            extra = names.extra or []
            more = [token for token in _tokens(where, value, special=True) if token not in extra]
            names.extra = extra + more
            special_extra += [str(token) for token in more]
        elif name.endswith("_token") and isinstance(value, str | Mapping):
            names.objects[name] = _token(where, value, special=True)
    return {*special.values(), *special_extra}


def _read_listed(where: str, value: Any) -> dict[int, tokenizers.AddedToken]:
    expected = f"{where}: expected an object of ids and tokens"
    if not isinstance(value, Mapping):
        raise TokenizerError(f"{expected}, got {value!r:.80}")
    listed = {}
    for key, entry in value.items():
        if not key.isdecimal() or not key.isascii():
            raise TokenizerError(f"{expected}, got the id {key!r:.80}")
        if not isinstance(entry, Mapping):
            raise TokenizerError(f"{where}[{key}]: expected an object, got {entry!r:.80}")
        token = _token(f"{where}[{key}]", entry)
        assert isinstance(token, tokenizers.AddedToken)
        listed[int(key)] = token
    return listed


def _read_added(
    path: Path, special: set[str], present: Mapping[int, tokenizers.AddedToken]
) -> dict[int, tokenizers.AddedToken]:
    listed: dict[int, tokenizers.AddedToken] = {}
    for text, token_id in (read_json_object(path) or {}).items():
        if type(token_id) is not int or token_id < 0:
            raise TokenizerError(f"{path}: {text!r}: expected a token id, got {token_id!r:.80}")
        other = present.get(token_id, listed.get(token_id))
        if other is not None and other.content != text:
            raise TokenizerError(
                f"{path}: {text!r} is declared with id {token_id}, which {other.content!r} has"
            )
        is_special = text in special
        listed[token_id] = tokenizers.AddedToken(
            text, special=is_special, normalized=not is_special, lstrip=False, rstrip=False
        )
    return listed


def _named_tokens(where: str, value: Mapping[str, Any]) -> dict[str, Token]:
    return {name: _token(f"{where}[{name!r}]", token) for name, token in value.items()}


def _tokens(where: str, value: Any, special: bool | None = None) -> list[Token]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TokenizerError(f"{where}: expected a list of tokens, got {value!r:.80}")
    return [_token(f"{where}[{index}]", item, special) for index, item in enumerate(value)]


def _token(where: str, value: Any, special: bool | None = None) -> Token:
    """A token as JSON has it: text, or an object with flags, of which `special` sets one."""
    if isinstance(value, str):
        return value
    fields = dict(value) if isinstance(value, Mapping) else {}
    fields.pop("__type", None)
    content = fields.pop("content", None)
    if not isinstance(content, str):
        raise TokenizerError(f'{where}: expected a str or {{"content": str}}, got {value!r:.80}')
    for key, flag in fields.items():
        if key not in _FLAGS or not isinstance(flag, bool):
            raise TokenizerError(
                f"{where}: expected {', '.join(sorted(_FLAGS))}, each true or false, "
                f"got {key!r}: {flag!r:.80}"
            )
    if special is not None:
        fields["special"] = special
    return tokenizers.AddedToken(content, **fields)


def _as_added(token: Token, named: set[str]) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    if token.content in named:
        token.special = True
    return token
