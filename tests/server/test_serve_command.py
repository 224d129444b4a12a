"""`tbo-jax serve` as a whole: its processes, the death of one, and the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine.engines import wait_for
from tests.server.serve_command import command, served

MODEL = Path(__file__).resolve().parents[2] / "examples" / "kjv-moe"
SMALL = ["--max-sequences", "4", "--max-batched-tokens", "16", "--max-context", "300"]
PROMPT = "In the beginning God"
WANTED = dict(model=str(MODEL), prompt=PROMPT, max_tokens=250, temperature=0)


def children(process: subprocess.Popen[bytes], name: str) -> list[int]:
    """Ids of the processes of a module that a process started."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", name], capture_output=True, text=True
    )
    return list(map(int, found.stdout.split()))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_outlives_the_engine(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    with served(MODEL, log, *SMALL, "--api-workers", str(workers)) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)
        whole = client.completions.create(**WANTED).choices[0].text
        text, killed = "", 0
        for chunk in client.completions.create(**WANTED, stream=True):
            text += "".join(choice.text for choice in chunk.choices)
            if not killed and len(text) > 20:
                (killed,) = children(process, "engine_process")
                os.kill(killed, signal.SIGKILL)
        assert killed and text == whole
        for name in ("tbo:http_responses_total", "vllm:request_success_total"):
            lines = re.findall(rf"^{name}{{.*}} (\d+)", httpx.get(f"{address}/metrics").text, re.M)
            assert sum(map(int, lines)) >= 2  # of all API processes together
        (engine,), api = children(process, "engine_process"), children(process, "api_process")
        assert engine != killed and len(api) == (workers if workers > 1 else 0)
        # Requests under way are finished; others are told that it ends.
        stream = client.completions.create(**WANTED, stream=True)
        rest = next(stream).choices[0].text
        process.terminate()
        rest += "".join(choice.text for chunk in stream for choice in chunk.choices)
        assert rest == whole
        assert process.wait(30) == 0
        wait_for(lambda: not any(map(is_alive, [engine, *api])))
    assert PROMPT not in log.read_text()


@pytest.mark.slow
def test_an_api_process_that_dies_is_replaced(tmp_path: Path) -> None:
    with served(MODEL, tmp_path / "log", *SMALL, "--api-workers", "2") as (process, address):
        first, second = children(process, "api_process")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(set(children(process, "api_process")) - {first}) == 2)
        os.kill(second, signal.SIGKILL)

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{address}/v1/models", timeout=5).status_code == 200
            return False

        wait_for(answers)


def fails(*options: str) -> tuple[int, str]:
    started = time.monotonic()
    done = subprocess.run(
        command(MODEL, *SMALL, *options), capture_output=True, text=True, timeout=120
    )
    assert time.monotonic() - started < 120 and done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, told = fails("--port", port)
    assert (status, told) == (
        2, f"tbo-jax serve: port {port} of 127.0.0.1 is in use: expected a free one (--port)\n"
    )  # fmt: skip
    status, told = fails("--num-processes", "2")
    assert (status, told) == (
        2, "tbo-jax serve: --num-processes and --process-id need --coordinator\n"
    )  # fmt: skip
    status, told = fails("--port", "0", "--devices", "3", "-q")  # 8 experts do not divide
    assert status == 2 and "tbo-jax serve: " in told and "3" in told
