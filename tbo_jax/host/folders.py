"""Where things are kept between runs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """This library's folder in the user's cache, made by whoever writes there.

    In the folder for temporary files where the user has no home: in a container started with a
    number for its user, say. There it is made here, for this user alone.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(root).expanduser() / "tbo_jax"
    except RuntimeError:  # no HOME, and the system does not know the user
        return _own_folder(Path(tempfile.gettempdir()) / f"tbo_jax-{os.getuid()}")


@functools.cache
def _own_folder(path: Path) -> Path:
    """`path`, or where somebody else could write there, a folder for this process.

    Anybody can make a folder among the temporary files, and programs are loaded from this one.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not shared:
        return path
    folder = Path(tempfile.mkdtemp(prefix="tbo_jax-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
