import json
from pathlib import Path

import pytest

from kvferry.engine.api.prompts import ChatTemplate, template_message
from kvferry.engine.api.schema import ChatMessage
from kvferry.errors import ConfigError, RequestRefused

HELLO = [{"role": "user", "content": "hello"}]


def test_the_template_comes_from_the_tokenizer_config(model: Path) -> None:
    text = ChatTemplate.load(model).render(HELLO, None, {})
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_variables_of_the_request_reach_the_template(model: Path) -> None:
    assert (
        not ChatTemplate.load(model)
        .render(HELLO, None, {"add_generation_prompt": False})
        .endswith("assistant\n")
    )


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "bos_token": {"content": "<s>"}})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}file{% for m in messages %}{% break %}{% endfor %}"
    )
    assert ChatTemplate.load(tmp_path).render(HELLO, None, {}) == "<s>file"


def test_a_named_template_is_used_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template.render(HELLO, None, {}) == "plain"
    assert template.render(HELLO, [{"a": "<é>"}], {}) == '[{"a": "<é>"}]'


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="no chat template"):
        ChatTemplate.load(tmp_path).render(HELLO, None, {})


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
        ChatTemplate({"default": source}, {}).render(HELLO, None, {})


@pytest.mark.parametrize(
    "config", ["{", "[]", '{"chat_template": 5}', '{"chat_template": "{% if %}"}']
)
def test_a_broken_config_is_the_operators_fault(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError):
        ChatTemplate.load(tmp_path)


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
