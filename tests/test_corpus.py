"""The training text, its tokenizer and the batches of `examples/corpus.py`, offline."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

_SPEC = importlib.util.spec_from_file_location(
    "example_corpus", Path(__file__).parents[1] / "examples" / "corpus.py"
)
assert _SPEC is not None and _SPEC.loader is not None
corpus = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(corpus)

DOCUMENTS = [
    f"Chapter {n}\nThe {animal} ran over the hill, and it wasn't seen again.\nSo ended day {n * 7}."
    for n, animal in enumerate(["fox", "hare", "lark", "otter", "stoat", "vole"] * 4, start=1)
]
TOKENIZER = corpus.train_tokenizer(DOCUMENTS, 320)


def bible_output(chapters: int) -> str:
    """What the program `bible` prints, with made-up verses."""
    return "".join(
        f"\nPsalms {n}\n\n  1 Is it day {n} ?  It is:so say\n  2 all of us.\n"
        for n in range(1, chapters + 1)
    )


def fake_debian(folder: Path, output: str) -> str:
    """A PATH whose apt-get and dpkg-deb unpack a program that prints `output`."""
    folder.mkdir()
    (folder / "output").write_text(output)
    for name, script in {
        "apt-get": 'test "$1" = download && echo > "$2_1_all.deb" && echo > "$3_1_all.deb"',
        "dpkg-deb": f"""
            test "$1" = -x && test -f "$2" && mkdir -p "$3/usr/bin" "$3/usr/lib"
            printf '#!/bin/sh\\ncat "{folder}/output"\\n' > "$3/usr/bin/bible"
            chmod +x "$3/usr/bin/bible" """,
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_kjv_is_cleaned_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_debian(tmp_path / "bin", bible_output(1189)))
    documents = corpus.load_corpus(None, tmp_path / "cache with space")
    assert documents[22] == "Psalm 23\nIs it day 23? It is: so say\nall of us."
    assert [f.name for f in (tmp_path / "cache with space").iterdir()] == ["bible-kjv.txt"]

    monkeypatch.setenv("PATH", "")
    assert corpus.load_corpus("debian:bible-kjv", tmp_path / "cache with space") == documents


def test_kjv_cut_short_is_refused_and_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_debian(tmp_path / "bin", bible_output(1188)))
    with pytest.raises(corpus.CorpusError, match="1188 chapters, not 1189"):
        corpus.load_corpus(None, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_kjv_without_apt_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(corpus.CorpusError, match="apt-get and dpkg-deb.*install.*or give the path"):
        corpus.load_corpus(None, tmp_path)


def test_kjv_passes_on_what_apt_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_debian(tmp_path / "bin", "")
    (tmp_path / "bin/apt-get").write_text("#!/bin/sh\necho 'E: no such package' >&2\nexit 100\n")
    monkeypatch.setenv("PATH", path)
    with pytest.raises(corpus.CorpusError, match="(?s)no such package.*apt-get update.*the path"):
        corpus.load_corpus(None, tmp_path)


def test_unexpected_bible_line_is_refused() -> None:
    with pytest.raises(corpus.CorpusError, match="unexpected line.*Segmentation"):
        corpus.parse_kjv("\nGenesis 1\n\nSegmentation fault\n")


@pytest.mark.parametrize("source", ["debian:other", "missing.txt"])
def test_bad_source_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(corpus.CorpusError, match=source):
        corpus.load_corpus(source, tmp_path)


@pytest.mark.parametrize(("name", "data"), [("a.txt", b"caf\xe9"), ("a.gz", b"not gzip")])
def test_unreadable_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(corpus.CorpusError, match=f"{name} as UTF-8"):
        corpus.load_corpus(tmp_path / name, tmp_path)


def test_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/d.txt").write_text("third\r\nline")
    assert corpus.load_corpus(tmp_path, tmp_path) == ["first", "second", "third\nline"]


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(corpus.CorpusError, match="no text in"):
        corpus.load_corpus(tmp_path, tmp_path)


PROSE = "It was a bright cold day in April, and the clocks were all striking as they should. " * 5


def test_gutenberg_book_becomes_chapters() -> None:
    body = textwrap.fill(PROSE, 72)
    text = (
        "The Project Gutenberg eBook of X\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n"
        f"X\n\n\n\n\nCHAPTER I.\nThe Start\n\n\n{body}\n\n"
        f"    Indented verse {'.' * 70}\n    kept as verse.\n\n"
        f"CHAPTER II. On\n\n[Illustration: a\nhat]\n{body}"
        "\n\n*** END OF THE PROJECT GUTENBERG EBOOK X ***\n\nLicense"
    ).replace("cold", "_cold_")
    assert corpus.clean_text(text) == [
        f"X\nCHAPTER I.\nThe Start\n{PROSE.strip()}\nIndented verse {'.' * 70}\nkept as verse.",
        f"CHAPTER II. On\n{PROSE.strip()}",
    ]


@given(st.lists(st.lists(st.text("abcdefgh", min_size=1, max_size=12), min_size=40), min_size=2))
@settings(max_examples=30, deadline=None)
def test_wrapping_is_undone(paragraphs: list[list[str]]) -> None:
    prose = [" ".join(words) for words in paragraphs]
    wrapped = "\n\n".join(textwrap.fill(paragraph, 76) for paragraph in prose)
    assert "\n".join(corpus.clean_text(wrapped)) == "\n".join(prose)


@given(st.text(st.sampled_from("aB.-_ \n\t\r\u00a0\u2014\ufeff*")))
@settings(max_examples=300, deadline=None)
@example("B\r_ B_")
def test_any_text_gives_documents_without_blank_lines(text: str) -> None:
    for document in corpus.clean_text(text):
        assert all(line.strip() == line != "" for line in document.split("\n"))


def test_huge_document_is_cut_between_lines() -> None:
    lines = [f"{n} " + "word " * 30 + "end." for n in range(400)]
    documents = corpus.clean_text("\n\n".join(lines))
    assert "\n".join(documents).split("\n") == lines
    assert max(map(len, documents)) < 1.1 * corpus.MAX_DOCUMENT


@given(st.text())
@settings(deadline=None)
def test_tokenizer_loses_nothing(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_tokens_do_not_cross_words_digits_or_contractions() -> None:
    tokenizer = corpus.train_tokenizer(["It wasn't so, on day 77.\nOf the"] * 9, 400)
    tokens = tokenizer.encode("It wasn't so, on day 77.\nOf").tokens
    assert tokens == ["It", "Ġwasn", "'t", "Ġso", ",", "Ġon", "Ġday", "Ġ7", "7", ".Ċ", "Of"]


def test_tokenizer_folder(tmp_path: Path) -> None:
    trained = corpus.train_tokenizer(DOCUMENTS, 300, tmp_path / "new")
    read = Tokenizer.from_file(str(tmp_path / "new/tokenizer.json"))
    config = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert read.get_vocab() == trained.get_vocab() and trained.get_vocab_size() == 300
    assert read.token_to_id(config["eos_token"]) == read.token_to_id(config["pad_token"]) == 0
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(corpus.CorpusError, match="256: expected at least 257"):
        corpus.train_tokenizer(DOCUMENTS, 256)


@given(st.floats(0, 0.9), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_streams_hold_every_document_once(fraction: float, seed: int) -> None:
    training, validation = corpus.encode_corpus(DOCUMENTS, TOKENIZER, fraction, seed)
    parts = [
        TOKENIZER.decode(stream.tolist(), skip_special_tokens=False).split(corpus.END_OF_TEXT)[:-1]
        for stream in (training, validation)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(DOCUMENTS)
    assert all(part == [d for d in DOCUMENTS if d in part] for part in parts)
    assert training.dtype == validation.dtype == np.uint16
    longest = 1 + max(len(TOKENIZER.encode(document).ids) for document in DOCUMENTS)
    wanted = fraction * (training.size + validation.size)
    assert wanted <= validation.size <= wanted + longest


def test_seed_chooses_what_is_held_out() -> None:
    first, again, other = (corpus.encode_corpus(DOCUMENTS, TOKENIZER, 0.2, s)[1] for s in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(corpus.CorpusError, match="expected 0 <= f < 1"):
        corpus.encode_corpus(DOCUMENTS, TOKENIZER, fraction)


def test_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(corpus.CorpusError, match="1 of 1 documents held out"):
        corpus.encode_corpus(DOCUMENTS[:1], TOKENIZER)


@given(st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_batches_are_windows_and_resume(seed: int, start: int, batch: int, length: int) -> None:
    tokens = np.arange(1000, 1021, dtype=np.uint16)
    whole = list(itertools.islice(corpus.batches(tokens, batch, length, seed), start + 2))
    resumed = next(corpus.batches(tokens, batch, length, seed, start_step=start + 1))
    assert np.array_equal(whole[start + 1], resumed)
    for windows in whole:
        assert windows.shape == (batch, length + 1) and windows.dtype == np.int32
        assert (np.diff(windows) == 1).all()  # consecutive tokens
        assert windows.min() >= 1000 and windows.max() <= 1020


def test_batches_reach_both_ends_and_differ_by_step() -> None:
    tokens = np.arange(6, dtype=np.uint16)
    steps = [tuple(b[:, 0]) for b in itertools.islice(corpus.batches(tokens, 4, 3, seed=0), 20)]
    assert {start for step in steps for start in step} == {0, 1, 2}
    assert len(set(steps)) > 10


@pytest.mark.parametrize(
    ("size", "batch", "length", "seed", "step"),
    [(4, 1, 4, 0, 0), (9, 0, 4, 0, 0), (9, 1, 0, 0, 0), (9, 1, 4, -1, 0), (9, 1, 4, 0, -1)],
)
def test_impossible_batches_are_refused_at_once(
    size: int, batch: int, length: int, seed: int, step: int
) -> None:
    with pytest.raises(corpus.CorpusError):
        corpus.batches(np.zeros(size, np.uint16), batch, length, seed, step)


def test_command_writes_corpus_and_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.txt"
    padded = [f"{document}\n{'And so it was. ' * 8}".strip() for document in DOCUMENTS]
    source.write_text(corpus.SEPARATOR.join(padded))
    corpus.main(tmp_path / "out", str(source), vocab_size=290)
    assert corpus.load_corpus(tmp_path / "out/corpus.txt", tmp_path) == padded
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert f"24 documents, {sum(map(len, padded)):,} characters" in capsys.readouterr().out
