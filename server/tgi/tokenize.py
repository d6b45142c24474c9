"""/tokenize, /chat_tokenize: what the model reads, as tokens with their places in the text."""

from __future__ import annotations

from typing import Any

import jinja2

from .errors import TemplateError
from .schemas import ChatRequest, ChatTokenizeResponse, SimpleToken
from .service import TgiService


async def tokenize(service: TgiService, inputs: str) -> list[SimpleToken]:
    return await service.vocabulary.encode_with_places(inputs, add_special_tokens=True)


async def chat_tokenize(service: TgiService, asked: ChatRequest) -> ChatTokenizeResponse:
    text = await templated(service, asked)
    tokens = await service.vocabulary.encode_with_places(text, add_special_tokens=False)
    return ChatTokenizeResponse(tokenize_response=tokens, templated_text=text)


async def templated(service: TgiService, asked: ChatRequest) -> str:
    """The chat as the model reads it; an unfinished message of the assistant's is left open."""
    messages = [{**message.model_dump(), "content": flat(message.content)} for message in asked.messages]
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    try:
        return await service.vocabulary.apply_template(
            "".join(str(message["content"]) for message in messages),
            conversation=messages,
            tools=asked.tools,
            chat_template=service.chat_template,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
    except jinja2.TemplateError as error:
        raise TemplateError(f"syntax error: {error} (in <string>:{getattr(error, 'lineno', 1)})") from None
    except (ValueError, TypeError) as error:
        missing = "chat_template" in str(error) or "chat template" in str(error)
        raise TemplateError("template not found" if missing else str(error)) from None


def flat(content: Any) -> Any:
    """A message's parts as one text; an image becomes the link that it is."""
    if not isinstance(content, list):
        return content
    return "".join(_text(part) for part in content)


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "image_url":
        image = part.get("image_url")
        return f"![]({image.get('url', '') if isinstance(image, dict) else image})"
    return str(part.get("text", "")) if isinstance(part, dict) else ""
