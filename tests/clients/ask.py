"""Asks a router through the packages that applications use, and prints their answers as JSON.

Runs in the environment that has these packages: `python ask.py CLIENT URL MODEL`.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "How far is the harbour, and which ferry leaves first in the morning?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
MAX_TOKENS = 12


def ask_anthropic(url: str, model: str) -> dict[str, Any]:
    import anthropic

    asked: dict[str, Any] = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"temperature": 0.0},
    }
    with anthropic.Anthropic(base_url=url, api_key="sk-a", max_retries=0, timeout=60) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
        counted = client.messages.count_tokens(model=model, messages=MESSAGES)
        try:
            client.messages.create(**{**asked, "model": "no-such-model"})
            refusal = ""
        except anthropic.NotFoundError as error:
            refusal = error.body["error"]["type"] if isinstance(error.body, dict) else "no body"
    return {
        "whole": whole.content[0].text,
        "streamed": streamed,
        "prompt_tokens": whole.usage.input_tokens,
        "counted": counted.input_tokens,
        "refusal": refusal,
    }


def ask_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    asked: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "api_key": "sk-a",
        "timeout": 60,
    }
    whole = litellm.completion(model=f"openai/{model}", base_url=f"{url}/v1", **asked)
    chunks = litellm.completion(model=f"openai/{model}", base_url=f"{url}/v1", stream=True, **asked)
    messages = litellm.completion(model=f"anthropic/{model}", base_url=url, **asked)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "messages": messages.choices[0].message.content,
    }


def ask_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    def client(**changes: Any) -> Any:
        return ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="sk-a",
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            max_retries=0,
            timeout=60,
            **changes,
        )

    chat = client()
    return {
        "whole": chat.invoke(QUESTION).text,
        "streamed": "".join(chunk.text for chunk in chat.stream(QUESTION)),
        "responses": client(use_responses_api=True).invoke(QUESTION).text,
    }


CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "anthropic": ask_anthropic,
    "litellm": ask_litellm,
    "langchain": ask_langchain,
}

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2], sys.argv[3])))
