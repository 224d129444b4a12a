"""Where things are kept between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """This library's folder in the user's cache, made by whoever writes there.

    In the folder for temporary files where the user has no home: in a container started with a
    number for its user, say.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(root).expanduser() / "tbo_jax"
    except RuntimeError:  # no HOME, and the system does not know the user
        return Path(tempfile.gettempdir()) / f"tbo_jax-{os.getuid()}"
