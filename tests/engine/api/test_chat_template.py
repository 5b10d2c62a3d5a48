import json
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from kvferry.engine.api import template_process
from kvferry.engine.api.chat_template import ChatTemplate
from kvferry.engine.api.prompts import template_message
from kvferry.engine.api.schema import ChatMessage
from kvferry.errors import ConfigError, RequestRefused

HELLO = [{"role": "user", "content": "hello"}]


def rendered(template: ChatTemplate, tools: list[object] | None = None, **variables: object) -> str:
    with closing(template):
        return template.render(HELLO, tools, variables, max_chars=100_000)


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if template_process.__name__ in child.cmdline()]


def test_the_template_comes_from_the_tokenizer_config(model: Path) -> None:
    assert (
        rendered(ChatTemplate.load(model))
        == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_variables_of_the_request_reach_the_template(model: Path) -> None:
    text = rendered(ChatTemplate.load(model), add_generation_prompt=False)
    assert not text.endswith("assistant\n")


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "bos_token": {"content": "<s>"}})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}file{% for m in messages %}{% break %}{% endfor %}"
    )
    assert rendered(ChatTemplate.load(tmp_path)) == "<s>file"


def test_a_named_template_is_used_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(ChatTemplate.load(tmp_path)) == "plain"
    assert rendered(ChatTemplate.load(tmp_path), [{"a": "<é>"}]) == '[{"a": "<é>"}]'


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="no chat template"):
        rendered(ChatTemplate.load(tmp_path))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_does_not_take_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestRefused, match="rejects these messages"):
        rendered(ChatTemplate({"default": source}, {}))


MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"
TOO_LONG, TOO_LARGE = "computes for too long", "MiB of memory"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (MANY * 3 + END * 3, TOO_LONG),
        ("{{ (10**9 + tools|length) ** (10**8) }}", TOO_LONG),
        ("{{ lipsum(n=10**9, min=10**6, max=10**7) }}", TOO_LONG),
        ("{{ 'a' * 10**10 }}", TOO_LARGE),
        ("{{ [1] * 10**10 }}", TOO_LARGE),
        ("{{ '%1000000000d' % 1 }}", TOO_LARGE),
        ("{{ '{:1000000000d}'.format(1) }}", TOO_LARGE),
        ("{{ '%1000000000d'|format(1) }}", TOO_LARGE),
        ("{{ 'a'|center(10**9) }}", TOO_LARGE),
        ("{{ [1]|tojson(indent=10**9) }}", TOO_LARGE),
        ("{% set x %}" + MANY + "{{ 'x' * 10000 }}" + END + "{% endset %}", TOO_LARGE),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{{ lipsum.__globals__.os }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('x' * 10**7) }}", "x" * 1000 + "$"),
    ],
)
def test_a_hostile_template_is_refused_and_the_next_request_is_served(
    source: str, reason: str
) -> None:
    guarded = "{% if tools %}" + source + "{% else %}fine{% endif %}"
    with closing(ChatTemplate({"default": guarded}, {})) as template:
        with pytest.raises(
            RequestRefused, match=f"the model's chat template .*{reason}"
        ) as refusal:
            template.render(HELLO, [{}], {}, max_chars=100_000)
        assert len(str(refusal.value)) < 1200
        if reason != "recursion" or "macro" in source:
            assert template.render(HELLO, None, {}, max_chars=100_000) == "fine"


@pytest.mark.parametrize("source", [MANY * 2 + "{{ 'x' * 9999 }}" + END * 2, "{{ 'x' * 10**7 }}"])
def test_of_a_text_that_is_too_long_only_the_start_is_returned(source: str) -> None:
    assert rendered(ChatTemplate({"default": source}, {})) == "x" * 100_001


def test_a_process_that_was_killed_is_replaced_and_a_closed_one_leaves_nothing(
    model: Path,
) -> None:
    with closing(ChatTemplate.load(model)) as template:
        [process] = processes()
        process.kill()
        psutil.wait_procs([process])
        with pytest.raises(RequestRefused, match="has ended"):
            template.render(HELLO, None, {}, max_chars=100)
        assert "hello" in template.render(HELLO, None, {}, max_chars=100)
    assert processes() == []


def test_a_template_sees_no_secret_and_odd_values_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", "s")
    with closing(ChatTemplate({"default": "{{ x|tojson }}"}, {})) as template:
        odd = {"x": [2**63, float("inf"), "é\U0001f600", "\ud800", None, {"": True}]}
        text = template.render(HELLO, None, odd, max_chars=1000)
        assert text == '[9223372036854775808, Infinity, "é\U0001f600", "?", null, {"": true}]'
        [process] = processes()
        assert not [name for name in process.environ() if name.startswith("KVFERRY")]
        nested: list[object] = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(RequestRefused, match="nested"):
            template.render(HELLO, None, {"x": nested}, max_chars=1000)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("tokenizer_config.json", text.encode())
            for text in ("{", "[]", "[" * 100_000, '{"chat_template": 5}')
        ),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("chat_template.jinja", "{{ messages }}".encode("utf-16")),
        ("chat_template.jinja", b"caf\xe9"),
        ("chat_template.jinja", b"x" * 2_000_000),
        ("chat_template.jinja", b"{{ (9 ** (9**9) }}"),
    ],
)
def test_a_broken_file_is_the_operators_fault(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        ChatTemplate.load(tmp_path)
    assert processes() == []


def test_text_parts_are_joined_and_tool_arguments_are_objects() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    shown = template_message(ChatMessage(role="assistant", content=parts, tool_calls=[call]), 0)
    assert shown["content"] == "one\ntwo"
    assert shown["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize("content", [[{"type": "image_url"}], [5], [{"type": "text"}], [None]])
def test_other_parts_are_refused(content: list[object]) -> None:
    with pytest.raises(RequestRefused, match=r"messages\[3\]"):
        template_message(ChatMessage(role="user", content=content), 3)
