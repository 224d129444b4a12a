"""The log of a server, on stderr."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Show what the package and uvicorn log, whatever other libraries made of the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("tbo_jax", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
