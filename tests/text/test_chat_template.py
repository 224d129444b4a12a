from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import train_byte_level

from tbo_jax.text import Tokenizer, TokenizerError, check_template_arguments, template_client

Write = Callable[[str, str], None]
HELLO = [{"role": "user", "content": "hello"}]
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "image_token": "<img>"}


def render(template: str, messages: Any = HELLO, add_generation_prompt: bool = True) -> str:
    tokenizer = Tokenizer(train_byte_level(), SPECIAL, template)
    return tokenizer.render_chat(messages, add_generation_prompt)


def test_a_conversation_is_rendered() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [{"role": "system", "content": "be kind"}, *HELLO]
    expected = "[system] be kind<eos>[user] hello<eos>"
    assert render(template, messages) == expected + "[assistant]"
    assert render(template, messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ image_token }}|{{ pad_token }}", "<bos><img>|"),
        ("{{ tools is none and documents is none }}", "True"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahellob"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=true) }}", None),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
    ],
)
def test_names_that_templates_rely_on(template: str, expected: str | None) -> None:
    assert render(template) == (expected or r'{"a": 1, "b": "\u00e9"}')


def test_assignment_in_a_generation_block_stays_inside() -> None:
    template = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(template) == "21"


def test_strftime_now_is_the_current_time() -> None:
    before = datetime.now().year
    assert before <= int(render("{{ strftime_now('%Y') }}")) <= datetime.now().year


def test_chat_is_encoded_with_one_bos() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer(train_byte_level(), SPECIAL, template)
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode("hello")
    assert tokenizer.encode_chat(HELLO).count(0) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system message') }}", "refused the messages: no system message"),
        ("{{ messages[0].content + 1 }}", "failed with TypeError"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", r"does not compile.*\(line 1\)"),
        ("{{ x | no_such_filter }}", r"does not compile.*no_such_filter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 // 0 }}", "failed with ZeroDivisionError"),
        (
            "{{ messages[0].content.encode('ascii', 'x' * 9).decode('no') }}",
            "failed with LookupErr",
        ),
        ("{{ 'a' * 10 ** 10 }}", "needs too much memory"),
        ("{{ '%9999999999d' % 1 }}", "needs too much memory|failed with"),
        (
            "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
            "wrote more than .* characters",
        ),
        ("{{ '(' * 5000 }}{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
    ],
)
def test_template_errors_are_passed_on(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        render(template)
    assert render("next") == "next"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 7 ** (9 ** 9) % 3 }}",
        "{{ ('a' * 40) | replace('a', 'b' * 9999) | list | sort | length }}" * 400,
    ],
)
def test_a_template_that_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    assert render("first") == "first"
    monkeypatch.setattr(template_client, "_SECONDS", 0.5)
    with pytest.raises(TokenizerError, match=r"longer than 0.5 seconds"):
        render(template)
    monkeypatch.undo()
    assert render("next") == "next"


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[str]]:
    """A process of its own that renders, which nobody ends but the test."""
    with template_client._TemplateProcess()._start() as process:
        yield process
        process.kill()


def test_a_template_that_nobody_ends_ends_itself(idle: subprocess.Popen[str]) -> None:
    """As after the process that asked was killed; the time is that of one text."""
    assert idle.stdin is not None and idle.stdout is not None
    for template in ("first", "{{ 7 ** (9 ** 9) % 3 }}"):
        assert idle.poll() is None
        request = {"source": template, "variables": {}, "seconds": 0.4}
        idle.stdin.write(json.dumps(request) + "\n")
        idle.stdin.flush()
        if template == "first":
            assert json.loads(idle.stdout.readline()) == {"text": "first"}
            time.sleep(0.6)
    assert idle.wait(timeout=20) == -signal.SIGALRM


def test_the_process_ends_with_its_standard_input(idle: subprocess.Popen[str]) -> None:
    assert idle.stdin is not None
    idle.stdin.close()
    assert idle.wait(timeout=20) == 0


def test_a_process_that_died_while_idle_costs_nothing() -> None:
    assert render("first") == "first"
    process = template_client._PROCESS._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody looked yet
    assert render("next") == "next"


@pytest.mark.parametrize("last_words", ["", '{"text": "hal'])
def test_a_process_that_dies_at_work_is_said_to_have_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last_words: str
) -> None:
    script = tmp_path / "template_process.py"
    script.write_text(f"print('ready', flush=True); input(); print({last_words!r}, end='')")
    process = template_client._TemplateProcess()
    monkeypatch.setattr(template_client, "__file__", str(script))
    with pytest.raises(TokenizerError, match="template failed: the process ended with status 0"):
        process.render("x", {})
    monkeypatch.undo()
    assert process.render("next", {}) == "next"
    process.close()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (subprocess, "Popen", BlockingIOError(11, "no more processes")),
        (threading.Thread, "start", RuntimeError("no more threads")),
    ],
)
def test_a_process_that_cannot_start_costs_one_text(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    process = template_client._TemplateProcess()
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(TokenizerError, match="the start of the process .* failed: .*no more"):
        process.render("x", {})
    monkeypatch.undo()
    assert process.render("next", {}) == "next"
    process.close()


def test_templates_are_rendered_from_several_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: render(f"{{{{ {n} + 1 }}}}"), range(40)))
    assert texts == [str(n + 1) for n in range(40)]


def test_a_broken_template_costs_no_tokenizer(folder: Path, write: Write) -> None:
    write("chat_template.jinja", "{% for %}")
    assert Tokenizer.from_folder(folder).encode("a")


def test_arguments_reach_the_template() -> None:
    template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ x.y[1] }}"
    tokenizer = Tokenizer(train_byte_level(), SPECIAL, template)
    assert (
        tokenizer.render_chat(HELLO, arguments={"enable_thinking": False, "x": {"y": [1, "é"]}})
        == "Falseé"
    )
    ids = tokenizer.encode_chat(HELLO, arguments={"enable_thinking": True, "x": {"y": [0, 1]}})
    assert tokenizer.decode(ids) == "True1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "'messages': the template has it already"),
        ({"tools": []}, "'tools': the template has it already"),
        ({"add_generation_prompt": False}, "'add_generation_prompt': the template has it already"),
        ({"bos_token": "x"}, "'bos_token': the template has it already"),
        ({"self": 1}, "'self': the template has it already"),
        ({"a b": 1}, "expected a name, got 'a b'"),
        ({"x": {1, 2}}, "'x': expected a JSON value"),
        ({"x": float("nan")}, "'x': expected a JSON value"),
        ([1], r"expected an object of names and values, got \[1\]"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        check_template_arguments(arguments)


def test_a_special_token_of_the_folder_is_no_argument() -> None:
    tokenizer = Tokenizer(train_byte_level(), SPECIAL, "x")
    with pytest.raises(TokenizerError, match="'image_token': the template has it already"):
        tokenizer.render_chat(HELLO, arguments={"image_token": "y"})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "expected a list of messages, got str"),
        ({"role": "user", "content": "x"}, "expected a list of messages, got dict"),
        (["hello"], r"messages\[0\]: expected .* got str"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]: expected .* got the keys 'role'"),
        ([{**HELLO[0], "image": "x"}], r"messages\[0\]: .*'content', 'image', 'role'"),
        ([{**HELLO[0], "name": {1j}}], r"messages\[0\]\['name'\]: expected a JSON value"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            r"\['content'\]: expected a str, got l",
        ),
        ([{"role": None, "content": "x"}], r"\['role'\]: expected a str, got NoneType"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        render("x", messages)


def test_template_file_comes_before_the_config(folder: Path, write: Write) -> None:
    write("tokenizer_config.json", json.dumps({"chat_template": "config"}))
    assert Tokenizer.from_folder(folder).render_chat(HELLO) == "config"
    write("chat_template.jinja", "file")
    assert Tokenizer.from_folder(folder).render_chat(HELLO) == "file"


def test_default_of_named_templates_is_taken(folder: Path, write: Write) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write("tokenizer_config.json", json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(folder).render_chat(HELLO) == "plain"


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "rag", "template": "x"}]}])
def test_absent_template_is_an_error_when_used(
    folder: Path, write: Write, config: dict[str, Any]
) -> None:
    write("tokenizer_config.json", json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(TokenizerError, match=r'no chat template; expected .*"default"'):
        tokenizer.render_chat(HELLO)


@pytest.mark.parametrize("entry", [3, {"default": "x"}, ["x"], [{"name": "default"}]])
def test_template_of_another_type_is_refused(folder: Path, write: Write, entry: Any) -> None:
    write("tokenizer_config.json", json.dumps({"chat_template": entry}))
    with pytest.raises(TokenizerError, match=r"chat_template.*expected"):
        Tokenizer.from_folder(folder)


def test_a_forked_process_renders_by_itself():
    """In a process without JAX, whose threads forbid a fork."""
    code = """
import os, sys
from tbo_jax.text.template_client import _PROCESS, render
assert render("{{ x }}", {"x": "first"}) == "first"
parent = _PROCESS._process.pid
child = os.fork()
if not child:
    texts = [render("{{ x }}", {"x": f"child {i}"}) for i in range(20)]
    own = _PROCESS._process.pid != parent
    _PROCESS.close()
    os._exit(not (own and texts == [f"child {i}" for i in range(20)]))
texts = [render("{{ x }}", {"x": f"parent {i}"}) for i in range(20)]
_, status = os.waitpid(child, 0)
assert texts == [f"parent {i}" for i in range(20)]
assert _PROCESS._process.pid == parent
sys.exit(status)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_tools_and_calls(folder: Path) -> None:
    template = (
        "{{ tools[0].function.name }} {% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(folder)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    messages = [
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "7"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.render_chat(messages, tools=tools) == 'f a{"x": [1]}b7'
    with pytest.raises(TokenizerError, match="tools: expected a list of objects, got str"):
        tokenizer.render_chat(messages, tools="f")
    with pytest.raises(TokenizerError, match=r"tools\[0\]: expected a JSON value"):
        tokenizer.render_chat(messages, tools=[{"f": 1j}])
