from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import logging, warnings
from tbo_jax.host.quiet import silence_libraries
if {quiet}:
    silence_libraries()
for name in ("jax._src.xla_bridge", "absl", "huggingface_hub.file_download", "tbo_jax.text.x"):
    logging.getLogger(name).warning("logged by %s", name)
warnings.warn("a warning")
logging.getLogger("jax._src.xla_bridge").error("an error")
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_only_errors_are_left(quiet: bool) -> None:
    code = CODE.format(quiet=quiet)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "an error" in done.stderr
    assert done.stderr.count("logged by") == (0 if quiet else 4)
    assert ("a warning" in done.stderr) is not quiet
