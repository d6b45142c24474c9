"""Which of vLLM's parsers reads the tool calls that a model writes.

TGI serves tools on any model; vLLM refuses them until a parser is named. The form of a call stands in the chat template
of a model that was trained to write one. A model of no known form gets the form that works on every tokenizer: where a
call is demanded a grammar holds the model to it, and where it is not, the routes' words ask for it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

ANY_MODEL = "hermes"

_FORMS = (("[TOOL_CALLS]", "mistral", "[TOOL_CALLS]"), ("Environment: ipython", "llama3_json", "<|python_tag|>"))
"""(what stands in the template, the parser, the token that it looks for)."""

_FILES = ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json")


def fetch(name: str, revision: str | None, cache: str | None) -> None:
    """The files that are read here, of a hub model; the server needs them too."""
    from huggingface_hub import hf_hub_download

    for file in _FILES:
        with suppress(Exception):  # the hub's own errors have no common base; the server says which of them matters
            hf_hub_download(name, file, revision=revision, cache_dir=cache)


def parser_for(directory: str, template: str | None = None) -> str:
    """`template`: instead of the model's own."""
    text = own_template(directory) if template is None else template
    for mark, parser, token in _FORMS:
        if mark in text and _has_token(directory, token):
            return parser
    return ANY_MODEL


def own_template(directory: str) -> str:
    """All of them as one text, where there are several by name; empty where the model has none."""
    texts = [_text(directory, "chat_template.jinja")]
    try:
        found = json.loads(_text(directory, "tokenizer_config.json") or "{}").get("chat_template")
    except (ValueError, AttributeError):
        found = None  # transformers says better what is wrong with the file
    texts += [found] if isinstance(found, str) else [str(entry) for entry in found or ()]
    return "\n".join(texts)


def _has_token(directory: str, token: str) -> bool:
    """Without it the server would not start."""
    return json.dumps(token) in _text(directory, "tokenizer.json")


def _text(directory: str, name: str) -> str:
    path = Path(directory) / name
    return path.read_text(errors="replace") if path.is_file() else ""
