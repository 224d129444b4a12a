"""Resolving a model's name: folders, hub ids, and errors that say what would work."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from tbo_jax.checkpoint.hub import resolve_model
from tbo_jax.checkpoint.tensors import CheckpointError

RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=403)


class Hub:
    """Stands in for snapshot_download: records its calls, returns a folder or raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append((repo_id, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    stand_in = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    monkeypatch.chdir(tmp_path)
    return stand_in


@pytest.mark.parametrize("name", ["org/name", "./org/name", "../{here}/org", ".", "~/org"])
def test_an_existing_folder_is_returned_without_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    name = name.format(here=tmp_path.name)
    expected = name.replace("~", str(tmp_path))
    assert resolve_model(name).samefile(expected)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["./absent", "../absent/x", "/absent/model", "~/absent/model"])
def test_a_path_that_is_not_there_is_not_looked_up(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as error:
        resolve_model(name)
    assert name in str(error.value)
    assert hub.calls == []


def test_a_file_is_not_a_folder(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file, expected its folder"):
        resolve_model("model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "name",
        "a/b/c",
        "org/",
        "org/na me",
        "-org/x",
        "org/x.",
        "a--b/c",
        "a/b..c",
        "a/b.git",
    ]
    + ["o/" + "x" * 95, "org/na\0me", "org/name\n", "C:\\models\\x", "https://host/org/name"],
)
def test_what_is_no_hub_id_is_refused(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match="hub id like 'org/name'"):
        resolve_model(name)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["org/name", "Org-1/Name_2.5-B", "o/x", "o/" + "x" * 94])
def test_a_hub_id_is_fetched(hub: Hub, name: str) -> None:
    assert resolve_model(name) == hub.folder
    assert [repo_id for repo_id, _ in hub.calls] == [name]


def test_only_what_a_decoder_needs_is_fetched(hub: Hub) -> None:
    resolve_model("org/name")
    needed = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    other = [
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "consolidated.safetensors",
        "model.gguf",
        "modeling_custom.py",
    ]
    _, options = hub.calls[0]

    def fetched(file: str) -> bool:
        allowed = any(fnmatch(file, pattern) for pattern in options["allow_patterns"])
        return allowed and not any(fnmatch(file, pattern) for pattern in options["ignore_patterns"])

    assert [file for file in needed + other if fetched(file)] == needed


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("no", response=RESPONSE), "gated: .*`hf auth login`"),
        (
            errors.RepositoryNotFoundError("no", response=RESPONSE),
            "does not exist or is private: .*`hf auth login`",
        ),
        (errors.OfflineModeIsEnabled("no"), "offline mode is on .*unset HF_HUB_OFFLINE"),
        (errors.LocalEntryNotFoundError("no"), "hub was not reached .*check the network"),
        (errors.HfHubHTTPError("no", response=RESPONSE), "HfHubHTTPError, check the network"),
        (OSError("no space left"), "OSError, check .*the disk"),
        (RuntimeError("proxy"), "RuntimeError, check the network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_of_the_hub_say_what_would_work(hub: Hub, error: Exception, message: str) -> None:
    hub.error = error
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model("org/name")
    text = str(caught.value)
    assert "'org/name'" in text and "path to a folder" in text and text.endswith(str(error))
    assert caught.value.__cause__ is error


def test_an_interrupt_is_not_turned_into_an_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("org/name")


def test_the_real_client_offline_with_an_empty_cache(tmp_path: Path) -> None:
    code = """
import sys
from tbo_jax.checkpoint.hub import resolve_model
assert "huggingface_hub" not in sys.modules
try:
    resolve_model("org/name")
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "offline mode is on" in done.stdout
