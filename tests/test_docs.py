"""The documentation: its code runs, what it names exists, and the site builds."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import tbo_jax

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
INCLUDED = re.compile(r"--8<--\n(.+)\n--8<--\n")
PROGRAM = re.compile(r"(?<!\S)(python -m tbo_jax\.\w+|python \S+\.py|tbo-jax \w+)([^\n]*)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str
    why_not: str | None  # it is not run

    @property
    def line(self) -> str:
        """The text with folded lines as one: the whole of it in YAML, where commands are folded."""
        joined = self.text.replace("\\\n", " ")
        return joined.replace("\n", " ") if self.language == "yaml" else joined


def blocks_of(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text("utf-8"))
    return [Block(page, m["language"], m["text"], m["why"]) for m in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def programs(page: Path) -> list[str]:
    """The Python of a page to be run: that of the README block by block, of others as one."""
    texts = [
        block.text
        for block in blocks_of(page)
        if block.language == "python" and block.why_not is None and not INCLUDED.match(block.text)
    ]
    return texts if page == README or not texts else ["\n".join(texts)]


def marked_slow(values: list, quick: int = 0) -> list:
    """All but the first `quick` of them are run by `make test-slow` only."""
    return values[:quick] + [pytest.param(*v, marks=pytest.mark.slow) for v in values[quick:]]


PROGRAMS = [(named(page), n) for page in PAGES for n in range(len(programs(page)))]
# The own model is quick, and the first thing that a reader copies.
OWN_MODEL = (named(README), 1)
SHELL = [
    (named(page), n)
    for page in PAGES
    for n, block in enumerate(blocks_of(page))
    if block.language == "bash" and block.why_not is None and PROGRAM.search(block.line)
]


# What every page has to keep to


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_say_what_they_are(page):
    fences = re.findall(r"^ *```.*$", page.read_text("utf-8"), re.M)
    assert len(fences) == 2 * len(blocks_of(page)), "a fence without a language, or indented"
    assert {b.language for b in blocks_of(page)} <= {"python", "bash", "text", "yaml"}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_parses(page):
    for block in blocks_of(page):
        if block.language == "python" and not INCLUDED.match(block.text):
            compile(block.text, named(page), "exec")


def test_whole_files_in_a_page_are_run_there():
    included = [(b.page, INCLUDED.match(b.text)) for b in BLOCKS if b.language == "python"]
    found = [(page, match[1]) for page, match in included if match]
    assert found
    for page, path in found:
        commands = [b.text for b in blocks_of(page) if b.language == "bash" and not b.why_not]
        assert any(f"python {path}" in text for text in commands)


def help_of(program: str) -> str:
    """What a program prints with --help."""
    words = program.split()
    arguments = [words[-1], "--help"]
    output = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit),
    ):
        patch.setenv("COLUMNS", "200")
        if words[0] == "tbo-jax":
            module, _, function = PROJECT["scripts"]["tbo-jax"].partition(":")
            patch.setattr(sys, "argv", ["tbo-jax", *arguments])
            getattr(importlib.import_module(module), function)()
        elif words[1] == "-m":
            importlib.import_module(f"{words[2]}.__main__").main(["--help"], program)
        else:
            path = ROOT / words[1]
            patch.syspath_prepend(str(path.parent))
            patch.setattr(sys, "argv", arguments)
            runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


def test_options_exist():
    """Of all commands, also of those that cannot run here."""
    wanted: dict[str, set[str]] = {}
    for block in BLOCKS:
        if block.language in ("bash", "yaml"):
            for program, rest in PROGRAM.findall(block.line):
                options = re.findall(r"(?<!\S)--[a-z][\w.-]*", rest)
                wanted.setdefault(program, set()).update(options)
    assert {"python examples/decode.py", "tbo-jax decode", "tbo-jax schedule"} <= wanted.keys()
    for program, options in wanted.items():
        known = re.findall(r"--[a-z][\w.-]*", help_of(program)) if options else []
        unknown = options.difference(known)
        assert not unknown, f"{program}: {sorted(unknown)} do not exist"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_is_named_exists(page):
    text = page.read_text("utf-8")
    for path in re.findall(
        r"`((?:tbo_jax|tests|docs|examples|benchmarks|models)/[\w./*-]*)`", text
    ):
        assert list(ROOT.glob(path)), f"{path} does not exist"
    for name in re.findall(r"(?:`|::: )(tbo_jax(?:\.\w+)+)", text):
        assert resolves(name), f"{name} does not exist"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M)) <= targets
    for extras in re.findall(r"pip install .*?(?:tbo-jax|\.)\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def resolves(name: str) -> bool:
    module, attributes = name, []
    while True:
        with contextlib.suppress(ImportError):
            value = importlib.import_module(module)
            break
        module, _, attribute = module.rpartition(".")
        attributes.insert(0, attribute)
    for attribute in attributes:
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True


def test_public_names_are_in_the_reference():
    pages = [path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md")]
    named_there = set(re.findall(r"tbo_jax\.(\w+)$|`(\w+)`", "\n".join(pages), re.M))
    found = {name for pair in named_there for name in pair}
    assert set(tbo_jax.__all__) - {"__version__"} <= found


def test_every_folder_has_its_line():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    folders = {
        path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("tbo_jax/**/__init__.py")
    }
    for folder in folders - {"tbo_jax", "tbo_jax/models"}:
        assert f"\n| `{folder}/` |" in text, f"{folder}/ is not in the layout"


def targets(text: str) -> list[str]:
    """What the links and pictures of a page lead to."""
    found = re.findall(r"\]\(([^)]*)\)|(?:src|href)=[\"']?([^\"' >]+)", FENCE.sub("", text))
    return [target for pair in found for target in pair if target]


def test_readme_holds_on_an_index_page():
    """There a relative link leads nowhere. Relative pictures are left out of its text (setup.py)."""
    readme = README.read_text("utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", readme)
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)
    assert all(target.startswith("https://") for target in set(targets(readme)) - set(pictures))


# What is run


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder with links to those of the repository, and the environment of a reader.

    `make` and `pip` do nothing there: what they are given is checked by the tests above.
    """
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    tools = folder / "bin"
    tools.mkdir()
    scripts = {"python": f'exec "{sys.executable}" "$@"', "make": "exit 0", "pip": "exit 0"}
    if "scripts" in PROJECT:
        module, _, function = PROJECT["scripts"]["tbo-jax"].partition(":")
        code = f"import sys; from {module} import {function}; sys.exit({function}())"
        scripts["tbo-jax"] = f'exec "{sys.executable}" -c \'{code}\' "$@"'
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache" / "xla"),  # also what trains
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }
    environ.pop("USE_TBO", None)
    return folder, environ


def run(workplace, command: list[str]) -> str:
    """What a command prints; it must end well."""
    folder, environ = workplace
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_shell(workplace, block: Block) -> str:
    with socket.socket() as listener:  # another port than the printed one, which may be taken
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    text = block.text.replace("localhost:12345", f"localhost:{port}")
    return run(workplace, ["bash", "-euc", f"{text}\nwait"])


@pytest.mark.parametrize(
    ("page", "number"), [OWN_MODEL, *marked_slow([p for p in PROGRAMS if p != OWN_MODEL])]
)
def test_python_runs(workplace, page, number):
    assert run(workplace, [sys.executable, "-c", programs(ROOT / page)[number]])


def test_own_model_of_the_readme(workplace):
    assert "run_layers" in programs(README)[OWN_MODEL[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), SHELL)
def test_commands_run(workplace, page, number):
    block = blocks_of(ROOT / page)[number]
    out = run_shell(workplace, block)
    if block.page == README:  # the text is the printed one, with and without overlap
        printed = next(b.text for b in blocks_of(README) if b.text.startswith(">>>"))
        prompt, text = printed.removesuffix(", ...\n").split("\n", 1)
        assert out.count(f"{prompt}\n{text}") == 2


@pytest.mark.slow
def test_site_builds(workplace, tmp_path):
    """No broken link, and nothing that a page loads is from elsewhere."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs the extra docs")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        env=workplace[1] | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=300,
    )
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(
            r"<(?:script|img|link|source|iframe)\b[^>]*?(?:src|href)=\"([^\"]*)", text
        )
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)]
