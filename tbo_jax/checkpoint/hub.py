"""Turns what a user calls a model, a folder or a hub id, into a folder on this machine."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tbo_jax.checkpoint.tensors import CheckpointError

CONFIG_PATTERNS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "*.safetensors.index.json",
)
WEIGHT_PATTERNS = ("*.safetensors",)
# "*" also matches "/", and some repositories keep the same weights a second time, in a folder or
# in the layout of their author's own code.
IGNORE_PATTERNS = ("*/*", "consolidated*.safetensors")

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(f"{_PART}/{_PART}")
_MAX_ID = 96  # characters, the hub's own limit


def fetch_config(name_or_path: str, quiet: bool = False) -> Path:
    """Return the folder of a model, without its weights when it comes from the hub ("org/name").

    So a model that is not supported is refused before much is downloaded; `fetch_weights` gets the
    rest. An existing folder wins over a hub id of the same name. A download goes through
    `huggingface_hub.snapshot_download` and its cache, and obeys its environment variables
    (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, ...). Only files of the top folder are fetched.

    Args:
        name_or_path: a folder, or the id of a model on the hub.
        quiet: no progress bars and no warnings of the hub's client.

    Raises:
        CheckpointError: a path that is not a folder, a name that is no hub id, or a download that
            failed; the message says what would work.
    """
    folder = _local_folder(name_or_path)
    return _download(name_or_path, CONFIG_PATTERNS, None, quiet) if folder is None else folder


def fetch_weights(name_or_path: str, folder: Path, quiet: bool = False) -> Path:
    """Return the folder that `fetch_config` gave for a name, now with the safetensors files.

    Args:
        name_or_path: as it was given to `fetch_config`.
        folder: what that returned. The weights are those of the same commit.
        quiet: no progress bars and no warnings of the hub's client.

    Raises:
        CheckpointError: a download failed.
    """
    if _local_folder(name_or_path) is not None:
        return folder
    # The hub's cache keeps a commit in snapshots/COMMIT.
    revision = folder.name if folder.parent.name == "snapshots" else None
    return _download(name_or_path, WEIGHT_PATTERNS, revision, quiet)


def _local_folder(name_or_path: str) -> Path | None:
    """The folder of this name, or None for a hub id."""
    path = os.path.expanduser(name_or_path)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(f"model {name_or_path!r} is a file, expected its folder")
    if name_or_path in (".", "..") or name_or_path.startswith(("./", "../", "/", "~")):
        raise CheckpointError(f"model {name_or_path!r}: no such folder")
    if (
        not _HUB_ID.fullmatch(name_or_path)
        or len(name_or_path) > _MAX_ID
        or "--" in name_or_path
        or ".." in name_or_path
        or name_or_path.endswith(".git")
    ):
        raise CheckpointError(
            f"model {name_or_path!r}: neither an existing folder nor a hub id like 'org/name'"
        )
    return None


def _download(hub_id: str, patterns: Sequence[str], revision: str | None, quiet: bool) -> Path:
    # Imported here because it takes longer than all the rest of a start from a folder.
    from huggingface_hub import snapshot_download

    try:
        with _quietly() if quiet else nullcontext():
            folder = snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(IGNORE_PATTERNS),
            )
    # The hub's client lets errors of its transports through, whose classes change with its version.
    except Exception as error:
        raise CheckpointError(
            f"model {hub_id!r} is not a folder, and fetching it from the hub failed: "
            f"{_advice(error)}. A path to a folder with the model works without the hub. "
            f"The hub's client said: {error}"
        ) from error
    return Path(folder)


@contextmanager
def _quietly() -> Iterator[None]:
    """Switches off what the hub's client writes beside its errors, and on again."""
    from huggingface_hub import utils

    bars, verbosity = not utils.are_progress_bars_disabled(), utils.logging.get_verbosity()
    if bars:
        utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        utils.logging.set_verbosity(verbosity)
        if bars:
            utils.enable_progress_bars()


def _advice(error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # GatedRepoError is a RepositoryNotFoundError, so it is asked for first.
    if isinstance(error, GatedRepoError):
        return "it is gated: ask for access on its page, then log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "it does not exist or is private: check the name, or log in with `hf auth login`"
    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        return "offline mode is on and it is not in the cache: unset HF_HUB_OFFLINE to download it"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub was not reached and it is not (all) in the cache: check the network"
    return f"{type(error).__name__}, check the network, the disk and `hf auth whoami`"
