"""`neuronserve train-eagle`: from a target and some text to a head's directory.

    data ─ prompts ─▶ the target's answers ─▶ its features ─▶ draft vocabulary, start, training ─▶ OUT

Every stage keeps its results in the work directory, so the same command goes on where it was broken off. OUT is
written at every report of the training, so a head can be tried while it is trained.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from neuronserve.neuron_worker.errors import ConfigError

from .. import eagle_form
from . import checkpoint, prompts, vocabulary
from .answers import Answer, Say, TransformersWriter, Writer
from .batches import Pair, rows_of
from .corpus import GIVEN, Chat, as_they_stand, collect
from .device_writer import DeviceWriter
from .features import Compute, TorchFeatures, features_of_all
from .head import EagleHead
from .loss import Frozen
from .start import start
from .target import Target
from .training import Recipe, Report, train

SUMMARY = "an EAGLE head for a model, trained on the model's own answers"
WORK = "neuronserve/train-eagle"  # below XDG_CACHE_HOME, by default ~/.cache
_HELD_OUT_EVERY, _MOST_HELD_OUT = 20, 96
_TEXTS = "texts"
_WRITERS, _READERS = ("device", "transformers"), ("device", "torch")


@dataclass(frozen=True)
class Asked:
    """Filled by the command line."""

    target: str
    data: list[Path]
    out: Path
    work: Path | None
    start: Path | None
    draft_vocab: int | None
    prompts: int | None
    cuts: int
    imagine: int
    texts: int
    answers: int | None
    answer_tokens: int
    max_prompt_tokens: int
    answers_by: str
    features_by: str
    recipe: Recipe


def main(words: Sequence[str], say: Say = lambda line: print(line, flush=True)) -> int:
    # The tails of an attention's weights are denormal numbers, by which products take twice as long as without.
    # Threads take this over from the one that starts them, so it comes first.
    torch.set_flush_denormal(True)
    run(parse(words), say)
    return 0


def parse(words: Sequence[str]) -> Asked:
    parser = argparse.ArgumentParser(
        prog="neuronserve train-eagle", description=f"Makes {SUMMARY}.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", required=True, help="The model's directory.")
    add("--data", required=True, nargs="+", type=Path, help="JSONL rows of messages or text, or .txt, one text a line.")
    add("--out", required=True, type=Path, help="The head's directory.")
    add("--work", type=Path, help=f"Answers, features and the training's state; ~/.cache/{WORK}/NAME OF TARGET.")
    add("--start", type=Path, help="A head to start from, with its draft vocabulary unless --draft-vocab is given.")
    add("--draft-vocab", type=int, help="Draft only that many tokens, the most frequent ones; all.")
    add("--prompts", type=int, help="Ask only so many of the data's prompts, its sources evenly; all.")
    add("--cuts", type=int, default=1, help="Cut texts into passages so many times, each time elsewhere; %(default)s.")
    add("--imagine", type=int, default=0, help="Ask so many user turns that the target makes up itself; %(default)s.")
    add("--texts", type=int, default=0, help="Learn from so many pieces of the data as it stands too; %(default)s.")
    add("--answers", type=int, help="Stop after so many answers, their follow-ups not counted; all.")
    add("--answer-tokens", type=int, default=160, help="Most tokens of an answer; %(default)s.")
    add("--max-prompt-tokens", type=int, default=448, help="Longer prompts are left out; %(default)s.")
    add("--answers-by", choices=_WRITERS, help="Who writes them; transformers on a GPU, else the cpu device in int8.")
    add("--features-by", choices=_READERS, help="Who computes them; torch on a GPU, else the cpu device in int8.")
    for field in fields(Recipe):
        kind = type(field.default)
        add("--" + field.name.replace("_", "-"), type=kind, default=field.default, help="Of the recipe; %(default)s.")
    given = vars(parser.parse_args(words))
    recipe = Recipe(**{field.name: given.pop(field.name) for field in fields(Recipe)})
    on_gpu = int(torch.cuda.is_available())
    given["answers_by"] = given["answers_by"] or _WRITERS[on_gpu]
    given["features_by"] = given["features_by"] or _READERS[on_gpu]
    return Asked(**given, recipe=recipe)


def run(asked: Asked, say: Say) -> Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.of(asked.target, device)
    _check(asked, target)
    known = None if asked.start is None else _known(asked, target)
    learnt, held_out = _learnt_and_held_out(asked, target, say)
    kept = _vocabulary(asked, target, [answer for answer, _ in learnt])
    if known is not None and asked.draft_vocab is None:
        kept = known[1]
    if kept is not None:
        covered = vocabulary.coverage([answer for answer, _ in held_out], kept)
        say(f"draft vocabulary of {len(kept)} tokens: {covered:.1%} of those held out")

    frozen = Frozen(target.rows("embeddings"), target.rows("lm_head", kept))
    everything = torch.arange(target.spec.vocab_size) if kept is None else kept
    learnt_rows = rows_of(learnt, everything)
    held_out_rows = rows_of(held_out, everything)
    if not learnt_rows or not held_out_rows:
        raise ConfigError(f"--data gave {len(learnt)} usable answers; at least two are needed, so give more rows")
    beginnings = {
        "--data or --texts": _digest(row.tokens.tobytes() for row in learnt_rows),
        "--draft-vocab": _digest([everything.numpy().tobytes()]),
        "--start": _digest([] if known is None else [w.detach().numpy().tobytes() for w in known[0].parameters()]),
    }
    torch.manual_seed(asked.recipe.seed)
    head = (EagleHead(target.sizes) if known is None else known[0]).to(device)
    if known is None:
        start(head, target.decoder.layers[-1], frozen, learnt_rows)

    def keep() -> None:
        checkpoint.save(asked.out, head, target.sizes, kept)

    state_file = _work(asked) / "state.pt"
    report = train(head, frozen, learnt_rows, held_out_rows, asked.recipe, state_file, say, keep, beginnings)
    keep()  # a run that was complete before reports nothing more, and --out may be another
    say(f"the head is in {asked.out}")
    return report


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _work(asked: Asked) -> Path:
    if asked.work is not None:
        return asked.work
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / WORK / Path(asked.target).name


def _learnt_and_held_out(asked: Asked, target: Target, say: Say) -> tuple[list[Pair], list[Pair]]:
    device = _device(asked, target)  # one for both
    corpus = _corpus(asked, target, device, say)
    compute: Compute = (
        TorchFeatures(target.decoder) if asked.features_by == "torch" else lambda rows: device().read(rows)
    )
    pairs = {
        name: list(zip(rows, features_of_all(_work(asked) / name, rows, compute, say), strict=True))
        for name, rows in corpus.items()
    }
    own = [pair for name in pairs if name != _TEXTS for pair in pairs[name]]
    say(f"{len(own)} answers, {sum(len(answer.answer_ids) for answer, _ in own)} tokens; {len(pairs[_TEXTS])} texts")
    held_out = own[::_HELD_OUT_EVERY][:_MOST_HELD_OUT]
    return [pair for index, pair in enumerate(own) if index % _HELD_OUT_EVERY] + pairs[_TEXTS], held_out


def _vocabulary(asked: Asked, target: Target, learnt: Sequence[Answer]) -> Tensor | None:
    """Of the answers, not of what the data says as it stands."""
    if asked.draft_vocab is None:
        return None
    own = [answer for answer in learnt if answer.kind != GIVEN]
    return vocabulary.frequent(own, asked.draft_vocab, target.spec.vocab_size)


def _known(asked: Asked, target: Target) -> tuple[EagleHead, Tensor | None]:
    """The head to start from, and its draft vocabulary."""
    assert asked.start is not None
    if not (asked.start / eagle_form.CONFIG).is_file():
        raise ConfigError(f"--start {asked.start} has no config.json; give the directory of an EAGLE-1 head")
    head, config, kept = checkpoint.load(asked.start)
    sizes = target.sizes.items()
    differs = [f"{key} {config.get(key)} and not {value}" for key, value in sizes if config.get(key) != value]
    if differs:
        raise ConfigError(f"--start {asked.start} has {', '.join(differs)}; give a head like the one asked for")
    return head, kept


def _device(asked: Asked, target: Target) -> Callable[[], DeviceWriter]:
    """Brought up where something is missing."""
    most = asked.max_prompt_tokens + asked.answer_tokens
    return cache(lambda: DeviceWriter(asked.target, target.spec.hidden_size, most, target.ends))


def _check(asked: Asked, target: Target) -> None:
    if asked.draft_vocab is not None and not 0 < asked.draft_vocab <= target.spec.vocab_size:
        raise ConfigError(
            f"--draft-vocab {asked.draft_vocab}: {asked.target} has {target.spec.vocab_size} tokens; "
            "give at most that many"
        )
    if asked.start is not None and asked.start.resolve() == asked.out.resolve():
        raise ConfigError(
            f"--start and --out are both {asked.out}: the head to start from would be overwritten, and the run could "
            "not go on from where it was broken off; give another --out"
        )


def _corpus(asked: Asked, target: Target, device: Callable[[], DeviceWriter], say: Say) -> dict[str, list[Answer]]:
    rows = list(prompts.read(asked.data))
    chat = Chat(target.tokenizer, asked.max_prompt_tokens)

    def by_transformers() -> Writer:
        return TransformersWriter(target.model, target.tokenizer.pad_token_id or 0, target.ends)

    answers = collect(
        _work(asked),
        str(Path(asked.target).resolve()),
        prompts.ask(rows, asked.recipe.seed, asked.cuts),
        chat,
        device if asked.answers_by == "device" else by_transformers,
        num_imagined=asked.imagine,
        num_prompts=asked.prompts,
        num_answers=asked.answers,
        num_tokens=asked.answer_tokens,
        tools={"--answers-by": asked.answers_by, "--features-by": asked.features_by},
        say=say,
    )
    return {**answers, _TEXTS: as_they_stand(rows, chat, asked.texts)}
