from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import train_byte_level

from tbo_jax.text import Tokenizer, TokenizerError

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
    ],
)
def test_template_errors_are_passed_on(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "expected a list of messages, got str"),
        ({"role": "user", "content": "x"}, "expected a list of messages, got dict"),
        (["hello"], r"messages\[0\]: expected .* got str"),
        ([*HELLO, {"role": "user"}], r"messages\[1\]: expected .* got the keys 'role'"),
        ([{**HELLO[0], "name": "x"}], r"messages\[0\]: .*'content', 'name', 'role'"),
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
