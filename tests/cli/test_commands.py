"""What commands do when something is wrong: one line, an exit status, and nothing left over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tbo_jax.cli import main as entry
from tbo_jax.host.command import run_command

ROOT = Path(__file__).parents[2]


def raising(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("devices is 0"), 2, "name: devices is 0\n"),
        (ImportError("no matplotlib"), 2, "name: no matplotlib\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 bytes\nbuffers:\n..."),
            1,
            "name: XLA cannot compile or run this: RESOURCE_EXHAUSTED: 3 bytes ...\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_is_wrong_is_told_in_one_line(capsys, error, status, said):
    assert run_command("name", raising(error)) == status
    assert capsys.readouterr().err == said


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_command("name", raising(KeyError("x")))


# Prints as a command does, without the seconds that a model takes.
slow = pytest.mark.slow
PRINTS = """
import sys
from tbo_jax.host.command import run_command
def command():
    print("text" * 5000)
    return 0
sys.exit(run_command("name", command))
"""


def shell(redirection: str) -> tuple[int, str]:
    words = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, PRINTS]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        (">/dev/full", 1, "name: [Errno 28] No space left on device\n"),
        pytest.param(
            ">&-", 2, "name: stdout is closed: expected a place to print to\n", marks=slow
        ),
        pytest.param("2>&-", 0, "", marks=slow),
        ("| true; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_where_nothing_can_be_printed(redirection, status, said):
    assert shell(redirection) == (status, said)


@pytest.mark.slow
def test_what_was_printed_before_an_error_is_not_lost():
    code = PRINTS.replace("return 0", 'open("/no/such/file")')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stdout)) == (1, 20001)
    assert done.stderr == "name: [Errno 2] No such file or directory: '/no/such/file'\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "decode --help"])
def test_help_that_cannot_be_printed(words):
    line = f'"$0" -m tbo_jax.cli.main {words} >/dev/full'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith(": [Errno 28] No space left on device\n")
    assert "Traceback" not in done.stderr


def test_a_platform_without_devices_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tbo_jax.cli.main", "decode", "--model", ".", "--prompt", "a"],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cuda"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("tbo-jax decode: JAX finds no device with JAX_PLATFORMS=cuda: ")
    assert done.stderr.count("\n") == 1


def test_commands(capsys):
    assert entry.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name}" in said for name in entry.COMMANDS)
    assert entry.main([]) == 2
    assert entry.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("tbo-jax ")
    assert entry.main(["serv"]) == 2
    assert "'serv' is no command, expected one of\n  decode" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        entry.main(["decode", "--help"])
    assert stopped.value.code == 0
    assert "usage: tbo-jax decode" in capsys.readouterr().out
