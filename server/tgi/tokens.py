"""Token ids and text: what is given to the engine, and what each of its tokens says. Knows no HTTP and no engine.

A `Vocabulary` is the model's tokenizer as the routes need it; a `TokenReader` follows one answer.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from .schemas import SimpleToken

_LONG = 2_000  # characters; what is shorter is encoded sooner than another thread is woken


class Vocabulary:
    """One per API process, with a tokenizer of its own: vLLM's threads change the settings of theirs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._special = frozenset(self._tokenizer.all_special_ids)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tgi-tokenizer")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(await self._do(self._encode, text, add_special_tokens))

    async def encode_with_places(self, text: str, *, add_special_tokens: bool) -> list[SimpleToken]:
        """Each token with the slice of `text` it stands for, in bytes; what was added has none."""
        return list(await self._do(self._encode_with_places, text, add_special_tokens))

    async def apply_template(self, text: str, **arguments: Any) -> str:
        """A chat as the text that the model reads. `text` only tells how long the work may take."""
        return str(await self._do(lambda _: self._tokenizer.apply_chat_template(tokenize=False, **arguments), text))

    async def _do(self, work: Any, text: str, *arguments: Any) -> Any:
        if len(text) < _LONG:
            return work(text, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, text, *arguments)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return encoded["input_ids"]  # type: ignore[no-any-return]

    def _encode_with_places(self, text: str, add_special_tokens: bool) -> list[SimpleToken]:
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "verbose": False}
        if not self._tokenizer.is_fast:
            ids = self._tokenizer(text, **options)["input_ids"]
            return [SimpleToken(id=id, text="", start=0, stop=0) for id in ids]
        encoded = self._tokenizer(text, return_offsets_mapping=True, **options)
        byte = list(accumulate((len(character.encode()) for character in text), initial=0))
        return [
            SimpleToken(id=id, text=text[start:stop], start=byte[start], stop=byte[stop])
            for id, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def is_special(self, id: int) -> bool:
        return id in self._special

    def alone(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as prompts and alternatives are shown."""
        return [self._tokenizer.decode([id], skip_special_tokens=False) for id in ids]

    def reader(self, prompt: Sequence[int]) -> TokenReader:
        return TokenReader(self, prompt)

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """vLLM's own, so the text is what its OpenAI routes say."""
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        request = SimpleNamespace(sampling_params=params, prompt_token_ids=list(prompt), request_id="tgi")
        request.prompt_embeds = None
        return IncrementalDetokenizer.from_new_request(self._tokenizer, request)  # type: ignore[arg-type]


class TokenReader:
    """Texts of one answer's tokens as they come; half a character is "" until its other half is there."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._all = vocabulary.detokenizer(prompt, skip_special_tokens=False)
        self._ids: list[int] = []
        self._has_special = False
        self.text = ""
        """All token texts, special ones included: what stop sequences are looked for in."""

    def read(self, id: int) -> str:
        self._ids.append(id)
        self._has_special |= self._vocabulary.is_special(id)
        piece = _next(self._all, id)
        self.text += piece
        return piece

    def generated_text(self) -> str:
        """Without special tokens."""
        if not self._has_special:
            return self.text
        plain = self._vocabulary.detokenizer(self._prompt, skip_special_tokens=True)
        return "".join(_next(plain, id) for id in self._ids)


def _next(detokenizer: IncrementalDetokenizer, id: int) -> str:
    detokenizer.update([id], False)
    return detokenizer.get_next_output_text(False, True)
