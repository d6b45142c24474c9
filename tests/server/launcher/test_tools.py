"""The parser of a model's tool calls, by its own files."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from vllm.tool_parsers import ToolParserManager

from neuronserve.server.launcher.tools import ANY_MODEL, fetch, parser_for

QWEN = "{%- if tools %}within <tool_call></tool_call> XML tags{%- endif %}"
LLAMA = "{%- if tools is not none %}Environment: ipython{%- endif %}"
MISTRAL = "{%- if message.tool_calls %}[TOOL_CALLS]{%- endif %}"
PLAIN = "{{ message['content'] }}"


def model(directory: Path, template: object, *tokens: str, file: str = "tokenizer_config.json") -> str:
    text = template if file.endswith("jinja") else json.dumps({"chat_template": template})
    (directory / file).write_text(str(text))
    added = [{"id": number, "content": token} for number, token in enumerate(tokens)]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return str(directory)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    ("template", "tokens", "parser"),
    [
        (QWEN, ("<tool_call>",), "hermes"),
        (LLAMA, ("<|python_tag|>",), "llama3_json"),
        (MISTRAL, ("[TOOL_CALLS]",), "mistral"),
        (PLAIN, ("[TOOL_CALLS]", "<|python_tag|>"), ANY_MODEL),
        (LLAMA, (), ANY_MODEL),  # whose parser would not start without its token
        (MISTRAL, (), ANY_MODEL),
    ],
)
def test_the_form_stands_in_the_template(
    template: str, tokens: tuple[str, ...], parser: str, file: str, tmp_path: Path
) -> None:
    assert parser_for(model(tmp_path, template, *tokens, file=file)) == parser
    assert parser in ToolParserManager.list_registered()


def test_one_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": MISTRAL}]
    assert parser_for(model(tmp_path, several, "[TOOL_CALLS]")) == "mistral"


def test_a_template_of_the_user_s_own(tmp_path: Path) -> None:
    assert parser_for(model(tmp_path, QWEN, "[TOOL_CALLS]"), MISTRAL) == "mistral"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"chat_template": null}'])
def test_files_that_say_nothing(text: str, tmp_path: Path) -> None:
    assert parser_for(str(tmp_path)) == ANY_MODEL
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert parser_for(str(tmp_path)) == ANY_MODEL


def test_of_a_hub_model_three_files_are_fetched_and_none_of_them_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(*given: str, **where: str) -> str:
        asked.append((*given, where))
        raise OSError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    fetch("org/model", "v2", "/cache")
    where = {"revision": "v2", "cache_dir": "/cache"}
    files = ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json")
    assert asked == [("org/model", file, where) for file in files]


def test_the_demo_model(smollm2: Path) -> None:
    assert parser_for(str(smollm2)) == ANY_MODEL
