"""Public-domain English text, a small tokenizer for it, and token batches to train on.

The data side of `train.py`. Run by itself it writes the text and the tokenizer, to be looked at:

    python examples/corpus.py --out corpus                     # King James Version, from Debian
    python examples/corpus.py --out corpus --source novels/    # your own .txt, .md or .gz files
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tyro
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

KJV_SOURCE, KJV_PACKAGES, KJV_CHAPTERS = "debian:bible-kjv", ("bible-kjv", "bible-kjv-text"), 1189
END_OF_TEXT = "<|endoftext|>"
SEPARATOR = "\n\n\n\n"  # between documents in a written corpus; `clean_text` splits there again
SUFFIXES = (".txt", ".md", ".gz")
OTHERWISE = "or give the path of a text file or folder as the source"
MAX_DOCUMENT = 20_000  # characters; whole documents are held out, so one huge one will not do
HEADING_LENGTH = 100  # characters; a shorter piece is a title that belongs to what follows
WRAP_WIDTHS = range(55, 101)  # columns; narrower is verse, wider is not hard-wrapped text

# A contraction, a word or one digit with the space before it, punctuation with the line end after
# it, line ends, other space. One digit at a time, since prose has too few numbers to learn more.
PROSE_PATTERN = (
    r"['\u2019](?:s|t|re|ve|m|ll|d)(?!\p{L})| ?\p{L}+| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAPTER = re.compile(
    r"\n\n(?=[ \t]*(?i:chapter|book|part|canto|letter|act)[ \t]+"
    r"(?:[A-Z][A-Za-z-]*|\d+)(?:[.:\u2014][^\n]*)?\n\n)"
)


class CorpusError(ValueError):
    """The corpus cannot be had, or cannot be used as asked."""


def default_cache_dir() -> Path:
    """Folder for cleaned text, in the user's cache folder (`XDG_CACHE_HOME` is respected)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tbo_jax" / "corpus"


def load_corpus(source: str | Path | None, cache_dir: Path) -> list[str]:
    """Documents of clean text: a heading where there is one, then a paragraph or verse a line.

    `source` None or "debian:bible-kjv" is the King James Version, one document a chapter, from two
    Debian packages that are downloaded but not installed; it is kept, cleaned, in `cache_dir`, and
    later calls need nothing else. Any other is the path of a UTF-8 text file (.gz is unpacked) or
    of a folder of .txt, .md and .gz files, cleaned and split by `clean_text`.
    An unknown source, an unreadable file, no text, or a failed download is a CorpusError.
    """
    if source is None or source == KJV_SOURCE:
        cached = cache_dir / "bible-kjv.txt"
        if not cached.is_file():
            cache_dir.mkdir(parents=True, exist_ok=True)
            partial = cached.with_suffix(".partial")  # so that a half-written file is never used
            partial.write_text(SEPARATOR.join(parse_kjv(_kjv_output(cache_dir))), encoding="utf-8")
            partial.replace(cached)
        return cached.read_text(encoding="utf-8").split(SEPARATOR)
    if isinstance(source, str) and source.startswith("debian:"):
        raise CorpusError(f"unknown source {source!r}: expected {KJV_SOURCE!r} or a path")
    files = [path := Path(source)]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    documents = [document for file in files for document in clean_text(_read_text(file))]
    if not documents:
        raise CorpusError(f"no text in {path}: expected text in {', '.join(SUFFIXES)} files")
    return documents


def clean_text(text: str) -> list[str]:
    """Split plain text into documents and undo its line wrapping.

    Project Gutenberg's header and footer are dropped. Documents begin after three or more newlines
    and at chapter headings; one above `MAX_DOCUMENT` characters is cut between lines. Lines are
    joined where the next word did not fit, as wrapping does, so verse and lists keep theirs.
    """
    text = text.removeprefix("\ufeff").replace("\u00b6", "")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.split(r"(?m)^\*\*\* ?START OF TH.*\*\*\*.*$", text, maxsplit=1)[-1]
    text = re.split(r"(?m)^\*\*\* ?END OF TH.*$", text, maxsplit=1)[0]
    text = re.sub(r"\[Illustration[^\]]*\]", "", text)
    text = re.sub(r"(?m)[ \t\f\v]+$", "", text)
    # A quantile finds the column of wrapping; the longest line of all may be a table's.
    lengths = sorted(len(line) for line in text.split("\n") if line) or [0]
    width = lengths[math.ceil(0.9 * (len(lengths) - 1))]

    documents: list[str] = []
    title = ""
    for piece in re.split(r"\n{3,}", _CHAPTER.sub(SEPARATOR, text)):
        if not (body := _unwrap(piece, width if width in WRAP_WIDTHS else None)):
            continue
        document = title + body
        title = f"{document}\n" if len(document) < HEADING_LENGTH else ""
        if not title:
            documents.extend(_cut(document))
    return [*documents, title.strip()] if title else documents


def parse_kjv(output: str) -> list[str]:
    """Chapters from what the program `bible` prints: "Genesis 1", then a verse a line, unnumbered.

    A line that is neither a heading nor a verse, or less than the whole Bible, is a CorpusError.
    """
    chapters: list[str] = []
    for line in filter(None, output.split("\n")):
        if re.fullmatch(r"(?:[1-3] )?[A-Z][A-Za-z ]+ \d+", line):
            chapters.append(re.sub("^Psalms", "Psalm", line))
        elif (verse := re.fullmatch(r" +\d+ (.+)", line)) and chapters:
            words = " ".join(verse[1].split())
            words = re.sub(r" (?=[,.;:?!])", "", words)  # slips of the source: "accounted of ?"
            chapters[-1] += "\n" + re.sub(r"(?<=[,;:?!])(?=[A-Za-z])", " ", words)  # "God:for"
        else:
            raise CorpusError(f"unexpected line from the program bible: {line[:80]!r}")
    if len(chapters) != KJV_CHAPTERS:
        raise CorpusError(f"the program bible gave {len(chapters)} chapters, not {KJV_CHAPTERS}")
    return chapters


def train_tokenizer(
    documents: Sequence[str], vocab_size: int = 2048, out_dir: Path | None = None
) -> Tokenizer:
    """Train a lossless byte-level BPE tokenizer (Sennrich et al. 2016; on bytes as in GPT-2).

    Id 0 is "<|endoftext|>", both end of sequence and padding; all 256 bytes are tokens, so
    `vocab_size` is at least 257 (a short text may fill less), else CorpusError. If `out_dir` is
    given, tokenizer.json and tokenizer_config.json go there as transformers' AutoTokenizer reads.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise CorpusError(f"vocab_size is {vocab_size}: expected at least {len(alphabet) + 1}")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PROSE_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, show_progress=False)
    trainer.special_tokens, trainer.initial_alphabet = [AddedToken(END_OF_TEXT)], alphabet
    tokenizer.train_from_iterator(documents, trainer)
    if out_dir is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}
        config |= {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
        config |= {"clean_up_tokenization_spaces": False}  # decoding must give the text back
        out_dir.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(out_dir / "tokenizer.json"))
        (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def encode_corpus(
    documents: Sequence[str], tokenizer: Tokenizer, validation_fraction: float = 0.02, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Token streams to train on [T1] and to validate on [T2], end of text after each document.

    Whole documents are drawn at random for validation until they hold the fraction of all tokens
    (none at 0). uint16 where the vocabulary fits, else int32; both in the order of `documents`.
    A fraction outside [0, 1), or one that leaves nothing to train on, is a CorpusError.
    """
    if not 0 <= validation_fraction < 1:
        raise CorpusError(f"validation_fraction is {validation_fraction}: expected 0 <= f < 1")
    if (end := tokenizer.token_to_id(END_OF_TEXT)) is None:
        raise CorpusError(f"the tokenizer has no token {END_OF_TEXT!r}")
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32
    encodings = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    streams = [np.array([*encoding.ids, end], dtype) for encoding in encodings]
    order = np.random.default_rng(seed).permutation(len(streams))
    drawn = np.cumsum([0] + [streams[i].size for i in order])  # tokens in the first n of `order`
    count = int(np.searchsorted(drawn, validation_fraction * drawn[-1]))
    if count >= len(streams):
        raise CorpusError(f"{count} of {len(streams)} documents held out: expected more documents")
    held_out = set(order[:count].tolist())
    training = [stream for i, stream in enumerate(streams) if i not in held_out]
    validation = [stream for i, stream in enumerate(streams) if i in held_out]
    return np.concatenate(training), np.concatenate([np.zeros(0, dtype), *validation])


def batches(
    tokens: np.ndarray, batch: int, length: int, seed: int, start_step: int = 0
) -> Iterator[np.ndarray]:
    """Endless int32 [B, L + 1] random windows of `tokens` [T], B = `batch` and L = `length`.

    Inputs are `[:, :-1]`, targets `[:, 1:]`. The batch of a step depends on `seed` and the step
    number alone, so training resumes with `start_step`, the number of steps already done.
    A number out of range or T <= L is a CorpusError, at the call.
    """
    if batch < 1 or length < 1 or seed < 0 or start_step < 0:
        raise CorpusError(f"{batch=}, {length=} must be above 0; {seed=}, {start_step=} not below")
    if tokens.ndim != 1 or tokens.size <= length:
        raise CorpusError(f"tokens have shape {tokens.shape}: expected [T] with T > {length}")

    def windows(step: int) -> Iterator[np.ndarray]:
        while True:
            starts = np.random.default_rng([seed, step]).integers(tokens.size - length, size=batch)
            yield tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
            step += 1

    return windows(start_step)


def _kjv_output(cache_dir: Path) -> str:
    """Download the two packages, unpack them, and let their own program print the whole text."""
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        needs = f"{KJV_SOURCE} needs {' and '.join(missing)}: install apt and dpkg (Debian, Ubuntu)"
        raise CorpusError(f"{needs}, {OTHERWISE}")
    with tempfile.TemporaryDirectory(dir=cache_dir) as name:
        folder = Path(name).resolve()
        _run(["apt-get", "download", *KJV_PACKAGES], folder, "maybe `apt-get update` first")
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg-deb", "-x", package.name, "root"], folder, "try again")
        # The program looks for its text in the current folder. Wide columns: a verse on one line.
        command = [str(folder / "root/usr/bin/bible"), "-l100000", "gen1:1-rev22:21"]
        return _run(command, folder / "root/usr/lib", "it needs the package libreadline8")


def _run(command: list[str], folder: Path, hint: str) -> str:
    try:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, input=b"")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip()[-500:]
        raise CorpusError(f"{error} {reason}\n{hint}, {OTHERWISE}") from error
    return done.stdout.decode("ascii", errors="replace")


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {file} as UTF-8 text: {error}") from error


def _unwrap(piece: str, width: int | None) -> str:
    lines: list[str] = []
    for paragraph in re.split(r"\n{2,}", piece.strip("\n")):
        previous = ""
        for line in paragraph.split("\n"):
            indented = line[:1].isspace()
            if previous and width and not indented and len(f"{previous} {line.split()[0]}") > width:
                lines[-1] += ("" if previous.endswith(("\u2014", "--")) else " ") + line
            else:
                lines.append(line)
            previous = line
    text = "\n".join(filter(None, (" ".join(line.split()) for line in lines)))
    return re.sub(r"(?<!\w)_(?! )([^_\n]+)(?<! )_(?!\w)", r"\1", text)  # emphasis


def _cut(document: str) -> list[str]:
    """About equal parts, cut between lines, as many as keep to around MAX_DOCUMENT characters."""
    count = math.ceil(len(document) / MAX_DOCUMENT)
    parts = [""] * count
    done = 0
    for line in document.split("\n"):
        parts[done * count // len(document)] += line + "\n"
        done += len(line) + 1
    return [part.strip() for part in parts if part]


def main(
    out: Path, source: str | None = None, vocab_size: int = 2048, cache_dir: Path | None = None
) -> None:
    """Write a cleaned corpus and its tokenizer, and report their sizes.

    Args:
        out: folder for corpus.txt, tokenizer.json and tokenizer_config.json.
        source: debian:bible-kjv (the default), or a .txt, .md or .gz file, or a folder of them.
        vocab_size: vocabulary of the tokenizer, at least 257.
        cache_dir: where downloaded text is kept; the default is in your cache folder.
    """
    try:
        documents = load_corpus(source, cache_dir or default_cache_dir())
        tokenizer = train_tokenizer(documents, vocab_size, out)
        training, validation = encode_corpus(documents, tokenizer)
    except CorpusError as error:
        raise SystemExit(f"error: {error}") from error
    (out / "corpus.txt").write_text(SEPARATOR.join(documents) + "\n", encoding="utf-8")
    characters, tokens = sum(map(len, documents)), training.size + validation.size
    vocabulary = tokenizer.get_vocab_size()
    print(f"{len(documents):,} documents, {characters:,} characters")
    print(f"{training.size:,} tokens to train on, {validation.size:,} to validate on")
    print(f"{characters / tokens:.2f} characters a token, vocabulary of {vocabulary:,}")


if __name__ == "__main__":
    tyro.cli(main)
