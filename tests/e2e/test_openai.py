"""What the OpenAI client asks of a server, one behaviour a test. The server is real, its model is SmolLM2-135M."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from ..tools.prompts import Prompt, read_prompts
from ..tools.reference import Reference
from .conftest import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "Name three rivers."}]
PROMPT = "The old harbour was quiet"

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "lives_in": {"enum": ["Porto", "Oslo"]},
    },
    "required": ["name", "age", "lives_in"],
    "additionalProperties": False,
}

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,  # without it vLLM accepts any JSON for arguments
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Porto", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **parameters: Any) -> Any:
    defaults = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    return client.completions.create(prompt=prompt, **{**defaults, **parameters})


def text_of(client: openai.OpenAI, prompt: Any = PROMPT, **parameters: Any) -> str:
    return str(complete(client, prompt, **parameters).choices[0].text)


def tokens_of(client: openai.OpenAI, prompt: Any = PROMPT, **parameters: Any) -> list[int]:
    body = {"return_token_ids": True, **parameters.pop("extra_body", {})}
    return list(complete(client, prompt, extra_body=body, **parameters).choices[0].token_ids)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> dict[str, Prompt]:
    return {prompt.id: prompt for prompt in read_prompts(smollm2)}


class TestPlain:
    def test_models(self, client: openai.OpenAI) -> None:
        models = client.models.list().data
        assert [(model.id, model.max_model_len) for model in models] == [(MODEL, 1024)]  # type: ignore[attr-defined]

    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def test_the_chat_template_is_the_model_s(self, client: openai.OpenAI) -> None:
        """A chat is the completion of its template's text; this template puts a system line before the question."""
        text = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n"
        )
        chat = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)
        assert chat.choices[0].message.content == text_of(client, text, max_tokens=12)

    def test_completion_is_transformers_own(
        self, client: openai.OpenAI, prompts: dict[str, Prompt], reference: Reference
    ) -> None:
        asked = [prompts[id] for id in ("harbour", "table", "ja-letter")]
        answer = complete(client, [prompt.text for prompt in asked], extra_body={"return_token_ids": True})
        reference.check((prompt.tokens, choice.token_ids) for prompt, choice in zip(asked, answer.choices, strict=True))

    def test_token_ids_are_a_prompt_too(self, client: openai.OpenAI, prompts: dict[str, Prompt]) -> None:
        prompt = prompts["harbour"]
        assert text_of(client, list(prompt.tokens)) == text_of(client, prompt.text)

    def test_streaming_says_the_same(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
        options: Any = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stream=True, stream_options=options
        )
        events = list(stream)
        pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert len([piece for piece in pieces if piece]) > 1
        assert [event.choices[0].finish_reason for event in events if event.choices][-1] == whole.choices[
            0
        ].finish_reason
        assert events[-1].usage == whole.usage

    def test_echo(self, client: openai.OpenAI) -> None:
        assert text_of(client, echo=True) == PROMPT + text_of(client)

    def test_no_tokens_at_all(self, client: openai.OpenAI) -> None:
        answer = complete(client, max_tokens=0, echo=True)
        assert answer.choices[0].text == PROMPT


class TestEnding:
    def test_stop_string_is_not_part_of_the_text(self, client: openai.OpenAI) -> None:
        whole = text_of(client, "1, 2, 3, 4,", max_tokens=16)
        assert " 7" in whole
        stopped = complete(client, "1, 2, 3, 4,", stop=[" 7"]).choices[0]
        assert stopped.text == whole[: whole.index(" 7")]
        assert stopped.finish_reason == "stop"

    def test_max_tokens(self, client: openai.OpenAI) -> None:
        answer = complete(client, max_tokens=3, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"

    def test_min_tokens_and_ignore_eos(self, client: openai.OpenAI) -> None:
        chat = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 60,
            "temperature": 0,
        }
        plain = client.chat.completions.create(**chat)  # type: ignore[call-overload]
        assert plain.choices[0].finish_reason == "stop"
        least = plain.usage.completion_tokens + 5
        longer = client.chat.completions.create(**chat, extra_body={"min_tokens": least})  # type: ignore[call-overload]
        assert longer.usage.completion_tokens >= least

    def test_stop_token(self, client: openai.OpenAI) -> None:
        tokens = tokens_of(client)
        stopped = complete(client, extra_body={"stop_token_ids": [tokens[4]], "return_token_ids": True}).choices[0]
        assert stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]
        assert stopped.stop_reason == tokens[4]


class TestLogprobs:
    def test_of_chosen_tokens_are_transformers_own(
        self, client: openai.OpenAI, prompts: dict[str, Prompt], reference: Reference
    ) -> None:
        prompt = prompts["harbour"]
        choice = complete(client, prompt.text, max_tokens=8, logprobs=5, extra_body={"return_token_ids": True}).choices[
            0
        ]
        theirs = reference.logits(prompt.tokens, choice.token_ids).log_softmax(-1)
        ours = choice.logprobs.token_logprobs
        assert ours == pytest.approx(
            [float(row[id]) for row, id in zip(theirs, choice.token_ids, strict=True)], abs=1e-3
        )
        # The choice is the most likely token, so it is among the five.
        assert [len(top) for top in choice.logprobs.top_logprobs] == [5] * 8
        assert [max(top.values()) for top in choice.logprobs.top_logprobs] == pytest.approx(ours)

    def test_do_not_change_the_answer(self, client: openai.OpenAI) -> None:
        assert text_of(client, logprobs=2) == text_of(client)

    def test_in_a_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
        )
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content
        assert content is not None
        assert "".join(token.token for token in content) == answer.choices[0].message.content
        for token in content:
            values = [top.logprob for top in token.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert values[0] == token.logprob
            assert sum(map(math.exp, values)) <= 1.0001

    @pytest.mark.parametrize("name", ["table", "rust-parse"])
    def test_of_a_prompt_are_transformers_own(
        self, name: str, client: openai.OpenAI, prompts: dict[str, Prompt], reference: Reference
    ) -> None:
        """The second is read in two chunks."""
        tokens = prompts[name].tokens
        answer = complete(client, list(tokens), max_tokens=1, extra_body={"prompt_logprobs": 3})
        ours = answer.choices[0].prompt_logprobs
        theirs = reference.logits(tokens[:1], tokens[1:]).log_softmax(-1)
        assert ours[0] is None
        assert len(ours) == len(tokens)
        for row, (token, scores) in zip(theirs, zip(tokens[1:], ours[1:], strict=True), strict=True):
            assert scores[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-3)
            best = max(scores.values(), key=lambda score: score["logprob"])
            assert best["logprob"] == pytest.approx(float(row.max()), abs=2e-3)
            assert scores[str(token)]["rank"] == pytest.approx(int((row > row[token]).sum()) + 1, abs=5, rel=0.02)


class TestSampling:
    def test_n_answers(self, client: openai.OpenAI) -> None:
        answer = complete(client, n=2, temperature=1.0, seed=7, max_tokens=24)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text != answer.choices[1].text
        assert answer.usage.completion_tokens <= 48

    def test_a_seed_gives_the_same_answer_again(self, client: openai.OpenAI) -> None:
        first, again = (text_of(client, temperature=1.0, seed=11, max_tokens=24) for _ in range(2))
        other = text_of(client, temperature=1.0, seed=12, max_tokens=24)
        assert first == again != other

    def test_no_seed_gives_another_answer(self, client: openai.OpenAI) -> None:
        assert text_of(client, temperature=1.0, max_tokens=24) != text_of(client, temperature=1.0, max_tokens=24)

    def test_a_top_k_of_one_is_greedy(self, client: openai.OpenAI) -> None:
        assert text_of(client, temperature=1.5, extra_body={"top_k": 1}) == text_of(client)

    def test_a_tiny_top_p_is_greedy(self, client: openai.OpenAI) -> None:
        assert text_of(client, temperature=1.5, top_p=1e-6) == text_of(client)

    def test_a_min_p_of_one_is_greedy(self, client: openai.OpenAI) -> None:
        assert text_of(client, temperature=1.5, extra_body={"min_p": 1.0}) == text_of(client)

    def test_logit_bias_forbids_and_forces(self, client: openai.OpenAI) -> None:
        tokens = complete(client, max_tokens=4, extra_body={"return_token_ids": True}).choices[0].token_ids
        without = complete(
            client, max_tokens=4, logit_bias={str(tokens[0]): -100}, extra_body={"return_token_ids": True}
        )
        assert tokens[0] not in without.choices[0].token_ids
        forced = complete(client, max_tokens=4, logit_bias={"1000": 100}, extra_body={"return_token_ids": True})
        assert forced.choices[0].token_ids == [1000] * 4

    @pytest.mark.parametrize(
        "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 1.8}}]
    )
    def test_penalties_break_a_repetition(self, penalty: dict[str, Any], client: openai.OpenAI) -> None:
        ticks = "tick tock" + " tick tock" * 9
        assert text_of(client, ticks, max_tokens=12).count("tick") >= 4
        assert text_of(client, ticks, max_tokens=12, **penalty).count("tick") < 4

    def test_allowed_token_ids(self, client: openai.OpenAI) -> None:
        assert set(tokens_of(client, temperature=1.0, extra_body={"allowed_token_ids": [1000, 2000]})) <= {1000, 2000}

    def test_bad_words(self, client: openai.OpenAI) -> None:
        word = text_of(client).split()[0]
        assert word not in text_of(client, extra_body={"bad_words": [word]}).split()


class TestStructure:
    def test_json_schema(self, client: openai.OpenAI) -> None:
        kind: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe Anna, 34, from Porto, as JSON."}],
            response_format=kind,
            max_tokens=200,
            temperature=0,
        )
        person = json.loads(answer.choices[0].message.content or "")
        assert set(person) == {"name", "age", "lives_in"}
        assert isinstance(person["name"], str)
        assert 0 <= person["age"] <= 120
        assert person["lives_in"] in ("Porto", "Oslo")

    def test_json_schema_in_a_stream_at_high_temperature(self, client: openai.OpenAI) -> None:
        kind: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        stream = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format=kind,
            max_tokens=300,
            temperature=1.2,
            seed=3,
            stream=True,
        )
        text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
        assert set(json.loads(text)) == {"name", "age", "lives_in"}

    def test_regex(self, client: openai.OpenAI) -> None:
        pattern = r"[A-C]{3}-\d{4}"
        text = text_of(client, temperature=1.0, seed=5, extra_body={"structured_outputs": {"regex": pattern}})
        assert re.fullmatch(pattern, text)

    def test_choice(self, client: openai.OpenAI) -> None:
        assert text_of(client, extra_body={"structured_outputs": {"choice": ["left", "right"]}}) in ("left", "right")

    def test_grammar(self, client: openai.OpenAI) -> None:
        grammar = 'root ::= "(" number (" + " number)* ")"\nnumber ::= [1-9] [0-9]?'
        text = text_of(
            client, temperature=1.0, seed=5, max_tokens=200, extra_body={"structured_outputs": {"grammar": grammar}}
        )
        assert re.fullmatch(r"\([1-9]\d?( \+ [1-9]\d?)*\)?", text)

    def test_named_tool(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How will the weather be in Oslo for three days?"}],
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=100,
            temperature=0,
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Porto", "Oslo")
        assert 1 <= arguments["days"] <= 7

    def test_required_tool(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How will the weather be in Porto tomorrow?"}],
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=200,
            temperature=0,
        )
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert {call.function.name for call in calls if call.type == "function"} == {"get_weather"}

    def test_a_tool_call_is_parsed_from_text(self, client: openai.OpenAI) -> None:
        # The model is too small to choose a tool by itself, so a pattern holds it to the form its parser reads.
        arguments = r'\{"city": "(Porto|Oslo)", "days": [1-7]\}'
        call = r'<tool_call>\n\{"name": "get_weather", "arguments": ' + arguments + r"\}\n</tool_call>"
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "How will the weather be in Porto tomorrow?"}],
            tools=[WEATHER],
            tool_choice="auto",
            max_tokens=100,
            temperature=0,
            extra_body={"structured_outputs": {"regex": call}},
        )
        (choice,) = answer.choices
        (made,) = choice.message.tool_calls or ()
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert made.type == "function"
        assert made.function.name == "get_weather"
        assert json.loads(made.function.arguments)["city"] in ("Porto", "Oslo")
