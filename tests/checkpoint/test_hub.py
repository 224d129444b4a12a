"""Resolving a model's name: folders, hub ids, and errors that say what would work."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from tbo_jax import LLM
from tbo_jax.checkpoint.hub import fetch_config, fetch_weights
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
    assert fetch_config(name).samefile(expected)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["./absent", "../absent/x", "/absent/model", "~/absent/model"])
def test_a_path_that_is_not_there_is_not_looked_up(hub: Hub, name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as error:
        fetch_config(name)
    assert name in str(error.value)
    assert hub.calls == []


def test_a_file_is_not_a_folder(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file, expected its folder"):
        fetch_config("model.safetensors")


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
        fetch_config(name)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["org/name", "Org-1/Name_2.5-B", "o/x", "o/" + "x" * 94])
def test_a_hub_id_is_fetched(hub: Hub, name: str) -> None:
    assert fetch_config(name) == hub.folder
    assert [repo_id for repo_id, _ in hub.calls] == [name]


def test_only_what_a_decoder_needs_is_fetched_in_two_steps(hub: Hub) -> None:
    fetch_weights("org/name", fetch_config("org/name"))
    small = [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tiktoken.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ]
    weights = ["model.safetensors", "model-00001-of-00002.safetensors"]
    other = [
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "original/tokenizer.model",
        "consolidated.safetensors",
        "model.gguf",
        "modeling_custom.py",
        "tokenization_custom.py",
    ]

    def fetched(file: str, options: dict[str, Any]) -> bool:
        allowed = any(fnmatch(file, pattern) for pattern in options["allow_patterns"])
        return allowed and not any(fnmatch(file, pattern) for pattern in options["ignore_patterns"])

    files = small + weights + other
    steps = [[file for file in files if fetched(file, options)] for _, options in hub.calls]
    assert steps == [small, weights]


def test_the_weights_are_those_of_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    hub.folder = tmp_path / "models--org--name" / "snapshots" / "0a1b2c"
    fetch_weights("org/name", fetch_config("org/name"))
    assert [options["revision"] for _, options in hub.calls] == [None, "0a1b2c"]


def test_the_weights_of_a_folder_are_there_already(hub: Hub, tmp_path: Path) -> None:
    assert fetch_weights(str(tmp_path), fetch_config(str(tmp_path))) == tmp_path
    assert hub.calls == []


@pytest.mark.parametrize("quiet", [True, False])
def test_the_client_says_nothing_when_asked(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    quiet: bool,
) -> None:
    def talk(*_: Any, **__: Any) -> str:
        warnings.warn("unauthenticated", stacklevel=1)
        huggingface_hub.utils.logging.get_logger("huggingface_hub.test").warning("slow")
        for _ in huggingface_hub.utils.tqdm(range(3), desc="Fetching"):
            pass
        return str(hub.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", talk)
    before = huggingface_hub.utils.logging.get_verbosity()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fetch_config("org/name", quiet)
    said = f"{capfd.readouterr().err} {caplog.text} {[str(item.message) for item in caught]}"
    assert [word in said for word in ("unauthenticated", "slow", "Fetching")] == [not quiet] * 3
    assert huggingface_hub.utils.logging.get_verbosity() == before
    assert not huggingface_hub.utils.are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": '{"model_type": "t5"}'}, "t5"),
        ({"config.json": "{"}, "config.json"),
    ],
)
def test_what_is_not_supported_is_refused_before_weights_are_fetched(
    hub: Hub, files: dict[str, str], message: str
) -> None:
    hub.folder.mkdir()
    for name, text in files.items():
        (hub.folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        LLM("org/name", compilation_cache=False)
    assert len(hub.calls) == 1


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
        fetch_config("org/name")
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
        fetch_config("org/name")


def test_the_real_client_offline_with_an_empty_cache(tmp_path: Path) -> None:
    code = """
import sys
from tbo_jax.checkpoint.hub import fetch_config, fetch_weights
assert "huggingface_hub" not in sys.modules
try:
    fetch_config("org/name")
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "offline mode is on" in done.stdout
