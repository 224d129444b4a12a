"""Two processes of two devices each, started as a person would start them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tbo_jax import LLM, SamplingParams
from tbo_jax.parallel import processes
from tbo_jax.parallel.processes import connect
from tests.golden_cases import Golden, with_tokenizer

DECODE = Path(__file__).parents[2] / "examples" / "decode.py"
GOLDEN = Golden("qwen3_moe")
PROMPTS = [" ".join(f"w{t}" for t in prompt) for prompt in GOLDEN.prompts]
REGEX = "w[0-9]+( w1?[0-9]){3,5}"
BOUND = 120  # seconds in which a process ends when the other one is dead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def rows(out: bytes) -> list[dict[str, Any]]:
    """What `--json` printed. Gloo, XLA's transport on CPU, prints to the same stream."""
    return [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]


class Pair:
    """Both processes of one command, the first to take requests first."""

    def __init__(
        self,
        *words: object,
        first: tuple[object, ...] = (),
        environs: tuple[dict[str, str], ...] = ({}, {}),
    ):
        together = ("--coordinator", f"localhost:{free_port()}", "--num-processes", 2, *words)
        together += ("--max-batched-tokens", 16)  # fewer sizes are compiled
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "USE_TBO": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(DECODE), *map(str, (*together, "--process-id", i, *own))],
                env=environ | environs[i],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for i, own in enumerate((first, ()))
        ]

    def __enter__(self) -> list[subprocess.Popen[bytes]]:
        return self.processes

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def test_tokens_are_those_of_one_process(folder: Path) -> None:
    """Requests are entered on the first; both compute them, and find the same pages again."""
    prompts = [word for prompt in PROMPTS * 3 for word in ("--prompt", prompt)]
    options = ("--model", folder, "--max-new-tokens", 8, "--page-size", 4, "--json", "--quiet")
    options += ("--max-sequences", 1)
    with Pair(*options, first=tuple(prompts)) as (first, second):
        out, err = first.communicate(timeout=240)
        other, _ = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err.decode()
    *found, last = rows(out)
    assert [row["token_ids"] for row in found] == [g[:8] for g in GOLDEN.greedy] * 3
    stats = last["stats"]
    assert stats["cached_tokens"] > 0
    assert stats["devices"] == 4 and stats["steps_split"] and stats["link_bytes"]
    assert b'"prompt"' not in other


@pytest.mark.slow
def test_options_of_requests_are_those_of_one_process(folder: Path) -> None:
    """Their rows are on the devices of both, and their log-probabilities are read by both."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = ("--model", folder, "--max-new-tokens", 8, "--page-size", 4, "--json", "--quiet")
    asked = ("--repetition-penalty", 1.3, "--frequency-penalty", 1, "--logprobs", 2, "--n", 2)
    asked += ("--bad-words", "w7 w8", "--min-tokens", 2, "--temperature", 1, "--seed", 3)
    asked += ("--regex", REGEX)
    asked += ("--prompt-logprobs", 1)
    with Pair(*options, *asked, first=tuple(prompts)) as (first, second):
        out, err = first.communicate(timeout=240)
        second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err.decode()
    *found, _ = rows(out)
    small = dict(max_sequences=4, max_batched_tokens=16, page_size=4, num_pages=64)
    llm = LLM(folder, devices=1, prompt_logprobs=True, **small)
    shared = dict(max_new_tokens=8, temperature=1.0, n=2, min_tokens=2, bad_words=["w7 w8"])
    shared["regex"] = REGEX
    shared |= dict(prompt_logprobs=1)
    penalties = dict(repetition_penalty=1.3, frequency_penalty=1.0)
    params = [SamplingParams(seed=3 + i, logprobs=2, **shared, **penalties) for i in range(3)]  # type: ignore[arg-type]
    each = [one for c in llm.generate(PROMPTS, params) for one in (c, *c.others)]
    assert [row["token_ids"] for row in found] == [c.token_ids for c in each]
    assert all(re.fullmatch(REGEX, row["text"]) for row in found)
    for row, completion in zip(found, each):
        assert completion.logprobs is not None
        ours = [known["logprob"] for known in row["logprobs"]]
        assert np.allclose(ours, [known.logprob for known in completion.logprobs], atol=1e-4)
        assert completion.prompt_logprobs is not None
        ours = [known["logprob"] for known in row["prompt_logprobs"][1:]]
        theirs = [known.logprob for known in completion.prompt_logprobs[1:]]
        assert np.allclose(ours, theirs, atol=1e-4) and len(ours) > 0


@pytest.mark.slow
def test_a_cache_that_only_the_first_process_has(folder: Path, tmp_path: Path) -> None:
    """JAX writes to it in process 0 alone: the second start loads there, and compiles elsewhere."""
    caches = tmp_path / "first", tmp_path / "second"
    environs = tuple(
        {"JAX_COMPILATION_CACHE_DIR": str(c), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for c in caches
    )
    options = ("--model", folder, "--max-new-tokens", 4, "--json", "--quiet")
    told = []
    for _ in range(2):
        with Pair(*options, first=("--prompt", "w1 w2"), environs=environs) as processes:
            said = [process.communicate(timeout=BOUND) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        told += [r["token_ids"] for r in rows(said[0][0]) if "token_ids" in r]
        programs = [len(list(cache.glob("*-cache"))) for cache in caches]
        assert programs[0] > 3 and programs[1] == 0
    assert len(told[0]) == 4 and told == told[:1] * 2


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (("--prompt", "w1", "--speculate", 2), b"speculate is 0 here, 2 there"),
        ((), b"nothing to decode"),
    ],
)
def test_what_is_wrong_is_said_by_all(
    folder: Path, first: tuple[object, ...], error: bytes
) -> None:
    """Options that differ, and a first process without requests: nobody waits for ever."""
    with Pair("--model", folder, "--quiet", first=first) as processes:
        said = [process.communicate(timeout=BOUND)[1] for process in processes]
        assert [process.returncode for process in processes] == [2, 2], said
        assert error in said[1]


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)])
def survivor(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


@pytest.mark.slow
def test_when_one_is_killed_the_other_ends(folder: Path, survivor: int) -> None:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = ("--model", folder, "--max-new-tokens", 90, "--page-size", 4)
    with Pair(*options, "--quiet", first=tuple(prompts)) as processes:
        stdout = processes[0].stdout
        assert stdout is not None and stdout.read(1)  # they are generating
        processes[1 - survivor].kill()
        processes[survivor].communicate(timeout=BOUND)
        assert processes[survivor].returncode != 0


@pytest.mark.parametrize(
    ("address", "options", "error"),
    [
        ("auto", {"num_processes": 2}, "counted by the cluster"),
        ("nonsense", {"num_processes": 2, "process_id": 0}, "'nonsense': expected HOST:PORT"),
        ("host:99999", {"num_processes": 2, "process_id": 0}, "'host:99999': expected HOST:PORT"),
        ("localhost:1", {"num_processes": 2}, "num_processes is 2 and process_id None"),
        ("localhost:1", {"num_processes": 2, "process_id": 2}, "from 0 to num_processes - 1"),
    ],
)
def test_what_cannot_be_connected(address: str, options: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        connect(address, **options)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"cannot listen on port {port}: Address already in use"
        ):
            connect(f"localhost:{port}", 2, 0)


def test_a_coordinator_that_nobody_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WAIT_TO_START", 0.3)
    with pytest.raises(ValueError, match=r"'a\.invalid:80': not reached for 0.3 sec.*Name or serv"):
        connect("a.invalid:80", 2, 1)
    port = free_port()
    with pytest.raises(ValueError, match=rf"'localhost:{port}': not reached for 0.3 seconds"):
        connect(f"localhost:{port}", 2, 1)


def test_what_cannot_be_told_is_an_error_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for word: they get one."""
    sent: list[np.ndarray] = []

    def broadcast(value: np.ndarray) -> np.ndarray:
        sent.append(value)
        return value

    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", broadcast)
    assert processes.from_first({"a": [1, 2]}) == {"a": [1, 2]}
    sent.clear()
    with pytest.raises(ValueError, match="cannot be told to the other processes: TypeError: "):
        processes.from_first({1: 0}.keys())
    assert len(sent) == 2  # a size and what the others read
