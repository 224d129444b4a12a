"""`tbo-jax serve`: what it says when it cannot start, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tbo_jax.cli import serve
from tbo_jax.server.run import listen

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "kjv-moe")


def refused(capsys, *words: str) -> str:
    """The one line of a command that does not start."""
    assert serve.main([*words, "--quiet"], "tbo-jax serve") == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1, out.err
    return out.err


@pytest.fixture(autouse=True)
def silenced(monkeypatch):
    monkeypatch.setattr(serve, "silence_libraries", lambda: None)
    monkeypatch.setattr(serve, "use_most_memory", lambda: None)


def test_what_is_wrong_is_told_in_one_line(capsys, monkeypatch, tmp_path):
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        said = refused(capsys, MODEL, "--port", port)
        assert said == (
            f"tbo-jax serve: port {port} of 127.0.0.1 is in use: expected a free one (--port)\n"
        )
    assert "--port is 70000" in refused(capsys, MODEL, "--port", "70000")
    assert "--host is 'no.such.host.invalid'" in refused(
        capsys, MODEL, "--host", "no.such.host.invalid"
    )
    assert "no such folder" in refused(capsys, str(tmp_path / "nothing"), "--port", "0")
    assert "API key is empty" in refused(capsys, MODEL, "--api-key", "")
    assert "needs USE_TBO=1" in refused(capsys, MODEL, "--micro-batches", "2", "--port", "0")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "tbo_jax.server.run")
    said = refused(capsys, MODEL)
    assert "uvicorn is missing: expected what `pip install 'tbo-jax[serve]'` installs" in said


@pytest.mark.slow
def test_serve_and_end():
    """SIGTERM lets a stream end that has begun, and the exit status is 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tbo_jax.cli.main", "serve", MODEL, "--port", "0"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TBO_API_KEY": "k", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"is served at (http://\S+)", line):
                break
        else:
            pytest.fail("it has ended")
        body = {"prompt": "In the beginning God", "max_tokens": 200, "stream": True}
        headers = {"authorization": "Bearer k"}
        url = f"{found[1]}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
