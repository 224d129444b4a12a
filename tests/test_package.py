"""The package: what it says about itself, and what its distributions hold."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from email import message_from_bytes
from pathlib import Path

import pytest

import tbo_jax
from tbo_jax._moved import MOVED

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SOURCE = (
    ".git",
    ".venv",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)


def test_version_is_the_same_everywhere():
    version = tbo_jax.__version__
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tbo_jax.__version__"}
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text()


def test_version_can_be_read_without_importing():
    """As setuptools reads it, where JAX is not installed."""
    tree = ast.parse((ROOT / "tbo_jax" / "__init__.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [ast.literal_eval(value) for value in values] == [tbo_jax.__version__]


def test_public_names():
    assert len(set(tbo_jax.__all__)) == len(tbo_jax.__all__)
    for name in tbo_jax.__all__:
        assert getattr(tbo_jax, name) is not None
    assert issubclass(tbo_jax.CheckpointError, ValueError)
    assert issubclass(tbo_jax.TokenizerError, ValueError)


MOVED_LATER = ["books", "limits", "plan", "rank", "trial"]


def test_old_names_of_modules_still_import():
    assert {f"engine.{name}" for name in MOVED_LATER} <= set(MOVED)
    for old, new in MOVED.items():
        module = importlib.import_module(f"tbo_jax.{old}")
        assert module is importlib.import_module(f"tbo_jax.{new}")
        assert module.__name__ == f"tbo_jax.{new}"


def test_every_folder_is_packaged():
    folders = [path.parent for path in (ROOT / "tbo_jax").rglob("__init__.py")]
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert names | {"tbo_jax.models"} == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_commands_exist():
    for command in PYPROJECT["project"].get("scripts", {}).values():
        module, _, function = command.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_imports_go_one_way():
    """From left to right in the list that CONTRIBUTING.md has."""
    found = re.search(r"from left to right: ([\w, ]+)\.", (ROOT / "CONTRIBUTING.md").read_text())
    assert found is not None
    folders = found[1].split(", ")
    for number, folder in enumerate(folders):
        place = ROOT / folder if folder == "models" else ROOT / "tbo_jax" / folder
        for path in place.rglob("*.py"):
            imported = re.findall(r"^ *(?:from|import) tbo_jax\.(\w+)", path.read_text(), re.M)
            assert not set(imported) & set(folders[:number]), f"{path} imports from the left"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(source)],
        check=True,
        capture_output=True,
        timeout=600,
    )
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_source_distribution_is_complete(distributions):
    """It has every file of a checkout, each once."""
    with tarfile.open(distributions[0]) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    files = [m.name.partition("/")[2] for m in members if m.isfile()]
    assert max(Counter(files).values()) == 1
    for name in ("models/llama.py", "tests/conftest.py", "docs/index.md", "examples/decode.py"):
        assert name in files
    assert "examples/kjv-moe/model.safetensors" in files
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True
        )
        tracked = set(listed.stdout.split("\n")) - {"", ".gitignore", "tbo_jax/models"}
        assert tracked <= set(files)


@pytest.mark.slow
def test_wheel_has_each_file_once(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        files = archive.namelist()
    assert max(Counter(files).values()) == 1
    assert {name.partition("/")[0] for name in files} == {
        "tbo_jax",
        f"tbo_jax-{tbo_jax.__version__}.dist-info",
    }
    for source in (*ROOT.glob("models/*.py"), *ROOT.glob("tbo_jax/schedule/*/*.*")):
        inside = source.relative_to(ROOT).as_posix()
        if not inside.endswith(".pyc"):
            assert files.count(f"tbo_jax/{inside.removeprefix('tbo_jax/')}") == 1
    assert "tbo_jax/py.typed" in files


@pytest.mark.slow
def test_the_index_gets_a_description_that_holds_there(distributions):
    """All of the README but its pictures, which are no part of the index's page."""
    with zipfile.ZipFile(distributions[1]) as archive:
        name = f"tbo_jax-{tbo_jax.__version__}.dist-info/METADATA"
        described = message_from_bytes(archive.read(name))
    assert described["Description-Content-Type"].startswith("text/markdown")
    text, readme = described.get_payload(), (ROOT / "README.md").read_text("utf-8")
    lines = [line for line in readme.splitlines() if not line.startswith("![")]
    assert [one for one in text.splitlines() if one] == [one for one in lines if one]


@pytest.mark.slow
def test_wheel_works_alone(distributions, tmp_path):
    """Installed into a folder of its own; its dependencies are those of this environment."""
    place = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(place), str(distributions[1])], check=True, timeout=300)
    code = (
        "import tbo_jax, tbo_jax.models, importlib.metadata as m; "
        "print(tbo_jax.__file__, tbo_jax.models.__file__, tbo_jax.__version__, "
        "m.version('tbo-jax'), 'llama' in tbo_jax.models.ARCHITECTURES)"
    )
    environ = os.environ | {"PYTHONPATH": str(place), "JAX_PLATFORMS": "cpu"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = run(sys.executable, "-c", code).split()
    assert all(path.startswith(str(place)) for path in found[:2])
    assert found[2:] == [tbo_jax.__version__, tbo_jax.__version__, "True"]
    assert "--target" in run(sys.executable, "-m", "tbo_jax.schedule", "--help")
    assert "h100x" in run(sys.executable, "-m", "tbo_jax.schedule", "--list-targets")
    for command in PYPROJECT["project"].get("scripts", {}):
        assert "schedule" in run(sys.executable, str(place / "bin" / command), "--help")
