"""Messages and shared memory, without a second process."""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from neuronserve.neuron_worker.device import errors, registry, wire
from neuronserve.neuron_worker.device.base import (
    Capabilities,
    DecodePart,
    DeviceOptions,
    DeviceOutput,
    DraftRequest,
    ModelFacts,
    PackedBatch,
    PrefillPart,
    PromptScores,
    RowSampling,
    StepShape,
)
from neuronserve.neuron_worker.device.errors import DeviceError, DoesNotFit
from neuronserve.neuron_worker.device.remote import Deadlines
from neuronserve.neuron_worker.device.step_memory import SharedMemory, StepLimits, StepMemory, bytes_of
from neuronserve.neuron_worker.device.wire import BadMessage, Channel, ChannelClosed, Message, Status, Verb

LIMITS = StepLimits(block_size=8, prompts_per_call=3, vocab_size=50, max_prompt_logprobs=5, num_drafts=4)
SHAPES = [StepShape(4, 1, 0, 20), StepShape(2, 3, 0, 64), StepShape(0, 1, 30, 64), StepShape(4, 2, 10, 9)]

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, tick=0.05), theirs


def on_the_wire(message: Message) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours).send(*message)
        return theirs.recv(1 << 16)


SEAL: Message = (Verb.SEAL, Status.REQUEST, 7, b'{"a": 1}')

# -- framing


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    channel, other = ends
    second = (*SEAL[:2], 8, b"")
    other.sendall(on_the_wire(SEAL) + on_the_wire(second))
    assert [channel.receive(), channel.receive()] == [SEAL, second]


def test_a_message_in_pieces_survives_the_timeout_between_them(ends: Ends) -> None:
    channel, other = ends
    sent = on_the_wire(SEAL)
    for piece in (sent[:5], sent[5:20]):
        other.sendall(piece)
        with pytest.raises(TimeoutError):
            channel.receive()
    other.sendall(sent[20:])
    assert channel.receive() == SEAL


@pytest.mark.parametrize("garbage", [b"Compiler status PASS\n", b"NSDP" + b"\xff" * 12, b".", b"NSD?"])
def test_garbage_is_told_apart(ends: Ends, garbage: bytes) -> None:
    channel, other = ends
    other.sendall(garbage)
    with pytest.raises(BadMessage):
        channel.receive()


def test_a_closed_end_is_told_apart(ends: Ends) -> None:
    channel, other = ends
    other.sendall(on_the_wire(SEAL)[:10])
    other.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send(*SEAL)


def test_nothing_on_the_wire_is_executed() -> None:
    for path in Path(wire.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not names & {"pickle", "marshal", "shelve"}, path


# -- types


def test_types_cross_as_they_are() -> None:
    options = DeviceOptions(4, 64, 8, 2, neuron_config={"on_device_generation": {"top_k": [1, 2]}}, threads=3)
    facts = ModelFacts("Llama", 50, 2, 1, 8, 128, 1000, "float32", notes=("one", "two"))
    capabilities = replace(registry.capabilities("arithmetic"), tensor_parallel_degrees=(1, 2, 8))
    for kind, value in ((DeviceOptions, options), (ModelFacts, facts), (Capabilities, capabilities)):
        crossed = json.loads(json.dumps(wire.type_to_json(value)))
        assert wire.type_from_json(kind, crossed) == value  # type: ignore[type-var]


def test_a_type_with_other_fields_is_refused() -> None:
    with pytest.raises(BadMessage, match="ModelFacts"):
        wire.type_from_json(ModelFacts, {"vocab_size": 3})


@pytest.mark.parametrize("kind", ["DeviceError", "LoadError", "UnsupportedModel", "UncompiledShape", "DoesNotFit"])
def test_errors_keep_their_class_and_message(kind: str) -> None:
    crossed = wire.error_from_json(wire.error_to_json(getattr(errors, kind)("value 7 is too large")))
    assert type(crossed) is getattr(errors, kind)
    assert str(crossed) == "value 7 is too large"


def test_a_backends_own_error_becomes_the_nearest_one() -> None:
    class CompilerFailed(errors.LoadError):
        pass

    assert type(wire.error_from_json(wire.error_to_json(CompilerFailed("x")))) is errors.LoadError


def test_a_backends_defect_is_an_error_that_names_it() -> None:
    crossed = wire.error_from_json(wire.error_to_json(IndexError("index 9")))
    assert type(crossed) is DeviceError
    assert "IndexError: index 9" in str(crossed)


# -- a step's arrays


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.create()
    yield memory
    memory.close()


def pair(memory: SharedMemory, shape: StepShape) -> tuple[StepMemory, StepMemory]:
    """The caller's and the device's view of one shape, the latter through a mapping of its own."""
    memory.grow(bytes_of(shape, LIMITS))
    other = SharedMemory(os.dup(memory.descriptor))
    views = StepMemory(shape, LIMITS, memory), StepMemory(shape, LIMITS, other)
    other.close()
    return views


def random_batch(shape: StepShape, prompt_logprobs: int = 0) -> PackedBatch:
    random = np.random.default_rng(3)
    rows, width, tokens = shape.decode_rows, shape.decode_width, shape.prefill_tokens
    prompts = LIMITS.prompts_per_call if tokens else 0
    blocks, count = -(-shape.context // LIMITS.block_size), rows + prompts

    def ints(*sizes: int) -> np.ndarray:
        return random.integers(0, 99, sizes, dtype=np.int32)

    def floats(*sizes: int) -> np.ndarray:
        return random.random(sizes, dtype=np.float32)

    return PackedBatch(
        shape,
        DecodePart(ints(rows, width), ints(rows), ints(rows), ints(rows, blocks)) if rows else None,
        PrefillPart(ints(tokens), ints(prompts), ints(prompts), ints(prompts), ints(prompts, blocks), ints(tokens))
        if tokens
        else None,
        RowSampling(
            ints(count), floats(count), ints(count), floats(count), floats(count), random.random((count, width))
        ),
        prompt_logprobs,
    )


def assert_equal(found: object, expected: object) -> None:
    assert (found is None) == (expected is None)
    for name, value in vars(expected).items() if expected is not None else ():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_device_sees_what_the_caller_wrote(memory: SharedMemory, shape: StepShape) -> None:
    ours, theirs = pair(memory, shape)
    batch = random_batch(shape, prompt_logprobs=2)
    ours.write(batch)
    seen = theirs.batch(2)
    assert (seen.shape, seen.prompt_logprobs) == (shape, 2)
    for part in ("decode", "prefill", "sampling"):
        assert_equal(getattr(seen, part), getattr(batch, part))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_caller_sees_what_the_device_gave(memory: SharedMemory, shape: StepShape) -> None:
    ours, theirs = pair(memory, shape)
    random = np.random.default_rng(5)
    rows = shape.decode_rows + (LIMITS.prompts_per_call if shape.prefill_tokens else 0)
    tokens = random.integers(0, 50, (rows, shape.decode_width), dtype=np.int32)
    logits = random.random((rows, LIMITS.vocab_size), dtype=np.float32)
    scores = None
    if total := shape.prefill_tokens:
        numbers, ids = random.random((total, 3), dtype=np.float32), random.integers(0, 50, (total, 3), dtype=np.int32)
        scores = PromptScores(numbers[:, 0], ids[:, 0], ids, numbers)
    output = ours.read(*theirs.publish(DeviceOutput(tokens, logits, scores, 0.25)))
    np.testing.assert_array_equal(output.tokens, tokens)
    np.testing.assert_array_equal(output.logits, logits)  # type: ignore[arg-type]
    assert_equal(output.prompt_scores, scores)
    assert output.device_seconds == 0.25


def test_what_the_device_did_not_give_is_none(memory: SharedMemory) -> None:
    ours, theirs = pair(memory, SHAPES[0])
    output = ours.read(*theirs.publish(DeviceOutput(np.zeros((4, 1), np.int32))))
    assert (output.logits, output.prompt_scores) == (None, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_draft_finds_the_step_where_it_was(memory: SharedMemory, shape: StepShape) -> None:
    ours, theirs = pair(memory, shape)
    batch = random_batch(shape)
    ours.write(batch)
    rows = len(batch.sampling.want)
    theirs.publish(DeviceOutput(np.zeros((rows, shape.decode_width), np.int32), np.ones((rows, 50), np.float32)))
    request = DraftRequest(np.arange(shape.decode_rows, dtype=np.int32), np.arange(rows, dtype=np.int32) + 7)
    ours.write_request(request)
    assert_equal(theirs.draft_request, request)
    for part in ("decode", "prefill", "sampling"):
        assert_equal(getattr(theirs.batch(0), part), getattr(batch, part))
    theirs.drafts[...] = np.arange(rows * 4).reshape(rows, 4)
    np.testing.assert_array_equal(ours.drafts, theirs.drafts)


def test_a_draft_request_of_another_step_is_refused(memory: SharedMemory) -> None:
    ours, _ = pair(memory, SHAPES[0])
    with pytest.raises(DeviceError, match=r"int32\(2,\).*int32\(4,\)"):
        ours.write_request(DraftRequest(np.zeros(2, np.int32), np.zeros(2, np.int32)))


def test_a_wrong_size_is_refused_and_not_stretched(memory: SharedMemory) -> None:
    ours, _ = pair(memory, SHAPES[0])
    batch = random_batch(SHAPES[0])
    assert batch.decode is not None
    narrow = replace(batch, decode=replace(batch.decode, positions=np.zeros(1, np.int32)))
    with pytest.raises(DeviceError, match=r"int32\(1,\).*int32\(4,\)"):
        ours.write(narrow)
    with pytest.raises(DeviceError, match="parts"):
        ours.write(replace(batch, decode=None))


def test_more_alternatives_than_loaded_for_are_refused(memory: SharedMemory) -> None:
    ours, _ = pair(memory, SHAPES[2])
    with pytest.raises(DoesNotFit, match=r"prompt_logprobs=6.*max_prompt_logprobs=5"):
        ours.write(random_batch(SHAPES[2], prompt_logprobs=6))


def test_a_larger_shape_leaves_the_smaller_ones_views_valid(memory: SharedMemory) -> None:
    small, _ = pair(memory, SHAPES[0])
    large, _ = pair(memory, StepShape(64, 1, 512, 64))
    large.write(random_batch(large.shape))
    batch = random_batch(SHAPES[0])
    small.write(batch)
    assert_equal(small.batch(0).decode, batch.decode)


# -- the page that describes all this


def rows_of_the_page() -> list[list[str]]:
    page = Path(__file__).parents[2] / "docs" / "device-protocol.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("verb", Verb, ids=lambda verb: verb.name.lower())
def test_the_page_has_every_verb_with_its_number_and_deadline(verb: Verb) -> None:
    name = verb.name.lower()
    rows = [row[:2] for row in rows_of_the_page()]
    assert [name, str(int(verb))] in rows
    assert [name, f"{Deadlines().of(verb):g}"] in rows


def test_the_page_has_the_silence() -> None:
    rows = [row[:2] for row in rows_of_the_page()]
    preparing = [verb for verb in Verb if Deadlines().silence_of(verb) == Deadlines().long_silence]
    *names, last = [verb.name.lower() for verb in preparing]
    assert [f"silence, in {', '.join(names)} and {last}", f"{Deadlines().long_silence:g}"] in rows
    assert ["silence, in any other verb and while idle", f"{Deadlines().silence:g}"] in rows
