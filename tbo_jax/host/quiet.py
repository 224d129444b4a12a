"""Silence of the libraries that a command uses, for its `--quiet`."""

from __future__ import annotations

import logging
import os
import warnings

_LOGGERS = ("jax", "absl", "flax", "huggingface_hub", "tbo_jax")


def silence_libraries() -> None:
    """Leaves nothing but errors of what libraries write on stderr, from here on in this process.

    It counts for what XLA writes from C++ only if no device is in use yet. For a command; a library
    that calls this would take the choice from its user.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA: 2 is errors
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_VERBOSITY"] = "error"
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
