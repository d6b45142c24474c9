"""What the target is asked: which instructions texts become, and what is asked about its answers."""

from __future__ import annotations

from collections import Counter

from neuronserve.speculative.train_eagle.prompts import QUESTION, Prompt, Row, ask, follow_ups

TEXT = " ".join(f"w{number}" for number in range(40_000))
LONG = 300  # words


def asked(cuts: int = 1) -> list[Prompt]:
    return ask([Row("texts", TEXT)], seed=0, cuts=cuts)


def words_of(prompt: Prompt) -> list[str]:
    return [word for word in prompt.messages[0]["content"].split() if word[0] == "w" and word[1:].isdigit()]


def test_every_kind_of_instruction_and_some_long_texts() -> None:
    kinds = Counter(prompt.kind for prompt in asked())
    assert set(kinds) == {"summary", "to_german", QUESTION, "explain", "rewrite", "extract", "continue", "correct"}
    long = Counter(prompt.kind for prompt in asked() if len(prompt.about.split()) >= LONG)
    assert set(long) == {"summary", QUESTION}
    assert 0.1 < long.total() / kinds.total() < 0.3


def test_texts_are_cut_elsewhere_each_time() -> None:
    once, thrice = asked(), asked(cuts=3)
    assert 2.5 < len(thrice) / len(once) < 3.5
    assert len({prompt.about for prompt in thrice}) > 0.99 * len(thrice)


def test_a_question_about_a_long_text_is_asked_of_a_part_and_answered_from_the_whole() -> None:
    [first, *_] = [p for p in asked() if p.kind == QUESTION and len(p.about.split()) >= LONG]
    assert 100 < len(words_of(first)) < LONG
    assert set(words_of(first)) < set(first.about.split())
    bare, with_text = follow_ups(first, "What is w5?\nAnd more.")
    assert bare.messages[0]["content"] == "What is w5?"
    assert first.about in with_text.messages[0]["content"]
    assert "What is w5?" in with_text.messages[0]["content"]


def test_german_is_translated_back() -> None:
    [back] = follow_ups(Prompt.of("to_german", "Translate to German: a house"), "ein Haus")
    assert back.messages[0]["content"] == "Translate German to English: ein Haus"
