"""The native device as a whole: the same bits in every schedule, nothing allocated, nothing left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import DeviceOptions, DraftRequest, StepShape, Want
from neuronserve.neuron_worker.device.cpu import library
from neuronserve.neuron_worker.device.cpu.device import CAPABILITIES, CpuDevice, create
from neuronserve.neuron_worker.device.cpu.native_ops import Bound
from neuronserve.neuron_worker.device.errors import DeviceError, DoesNotFit, LoadError, UncompiledShape
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice

from ..driver import Driver, Sampling, Stream, decode, prefill
from ..models import LONGEST, Reference, random_tokens
from .harness import every_int8_set, instruction_sets

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the kernels cannot be compiled here")


@pytest.fixture
def start(reference: Callable[[str], Reference]) -> Callable[..., Driver]:
    def load(
        name: str = "llama", block_size: int = 8, threads: int = 2, draft: str | None = None, **options: object
    ) -> Driver:
        device = CpuDevice()
        given = DeviceOptions(8, LONGEST, block_size, 4, threads=threads, **options)  # type: ignore[arg-type]
        device.load(str(reference(name).directory), given, draft)
        num_blocks = 1 + 8 * LONGEST // block_size
        return Driver(
            device,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=LONGEST,
            num_drafts=given.num_drafts,
        )

    return load


@pytest.mark.parametrize("across_processes", [False, True])
def test_threads_stay_awake_behind_a_step_for_another_process_alone(
    start: Callable[..., Driver], across_processes: bool
) -> None:
    driver, stream = start(across_processes=across_processes), Stream(random_tokens(80, 0))
    session = driver.device._session
    for _ in range(200):  # a thread that wakes late finds nothing to do, and sleeps on
        stream.computed = 0
        driver.step([prefill(stream, 8)])
        for _ in range(60):
            driver.step([decode(stream, 1)])
        if session.num_joined > 1:  # what it did behind the one before is known
            break
    assert session.num_joined > 1
    assert (session.num_lingered > 0) == across_processes


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


def logits_of(driver: Driver, stream: Stream, steps: list[list]) -> np.ndarray:
    """All logits of `stream` from steps of (kind, count), beside whatever else is in them."""
    found = []
    for rows in steps:
        results = driver.step(rows)
        found += [result.logits for row, result in zip(rows, results, strict=True) if row.stream is stream]
    return np.concatenate(found)


@every_int8_set
@pytest.mark.parametrize(("quantization", "activations"), [(None, "float32"), ("int8", "float32"), ("int8", "int8")])
@pytest.mark.parametrize("name", ["llama-odd", "mistral-window", "gpt2", "qwen3"])
def test_a_request_gets_the_same_bits_alone_and_in_company(
    isa: str, quantization: str | None, activations: str, name: str, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    how = {"quantization": quantization, "quantize_head": True, "activations": activations}
    mine = Stream(random_tokens(40, 0))
    driver = start(name, threads=1, **how)
    driver.step([prefill(mine, 20)])
    alone = logits_of(driver, mine, [[decode(mine)] for _ in range(20)])
    driver.device.close()

    again, others = Stream(random_tokens(40, 0)), [Stream(random_tokens(60, seed)) for seed in (1, 2, 3)]
    driver = start(name, threads=3, **how)
    driver.step([prefill(others[0], 33), prefill(again, 7)])
    driver.step([decode(others[0]), prefill(again, 13), prefill(others[1], 5)])
    together = logits_of(
        driver,
        again,
        [
            [decode(again, 3), decode(others[0])],
            [decode(others[1]), decode(again), prefill(others[2], 40)],
            *([decode(others[2]), decode(again), decode(others[0])] for _ in range(6)),
            [prefill(others[1], 12), prefill(again, 1)],
            [decode(again, 4)],
            [decode(others[0]), decode(again, 5), prefill(others[1], 9)],
        ],
    )
    driver.device.close()
    assert np.array_equal(bits(together), bits(alone))


FORMS = {
    "float32": {},
    "int8 weights": {"quantization": "int8"},
    "int8": {"quantization": "int8", "activations": "int8"},
    "int8, head too": {"quantization": "int8", "activations": "int8", "quantize_head": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "llama-odd", "gpt2"])
def test_scores_of_a_long_prompt_are_those_of_its_logits(name: str, form: str, start) -> None:
    """Many positions are scored slice by slice, over the same memory."""
    tokens = random_tokens(94, 0)
    driver = start(name, threads=1, **FORMS[form])
    [scored] = driver.step([prefill(Stream(list(tokens)), 93, scored=True)])
    slow = Stream(list(tokens))
    logits = logits_of(driver, slow, [[prefill(slow, 1)], *([decode(slow, 4)] for _ in range(23))]).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    driver.device.close()
    np.testing.assert_allclose(scored.target_logprobs, expected[np.arange(93), tokens[1:94]], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama-odd", "mistral-window", "gpt2", "qwen3"])
def test_a_scored_prompt_changes_no_bit(name: str, form: str, start) -> None:
    """Without scores the last layer goes on with the rows that give something alone."""
    found = []
    for is_scored in (False, True):
        driver = start(name, threads=2, **FORMS[form])
        mine, silent, other = (Stream(random_tokens(60, seed)) for seed in range(3))
        driver.step([prefill(other, 9, scored=is_scored), prefill(silent, 30, want=Want.NOTHING)])
        rows = [decode(other, 3), prefill(mine, 20, scored=is_scored), prefill(silent, 11, want=Want.NOTHING)]
        logits = [result.logits for result in driver.step(rows) if result.logits is not None]
        logits.append(logits_of(driver, mine, [[decode(mine, 2), decode(other), decode(silent)]]))
        logits.append(logits_of(driver, silent, [[decode(silent)]]))
        found.append(np.concatenate(logits))
        driver.device.close()
    assert np.array_equal(bits(found[0]), bits(found[1]))


def test_rows_that_give_nothing_stop_in_the_last_layer(start) -> None:
    driver = start()
    shape = StepShape(0, 1, 24, LONGEST)
    driver.compile(shape)
    program = driver.device._programs[shape]

    def products(bound: Bound) -> int:
        """Of all tokens."""
        ops = bound.ops
        return int(((ops["kind"] == library.KINDS.index("linear")) & (ops["rows"] == 0)).sum())

    full, lean = program._full[0], program._lean[0]
    assert library.ROW_SETS[0] == "tokens"
    assert products(full) - products(lean) == 3  # attention's output, and two of the MLP
    driver.device.close()


class Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd"))
    _fields_ += tuple((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"))


def heap_bytes() -> int:
    """In use in the C library's heap, mapped blocks among them."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library does not tell")
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def test_a_steady_step_allocates_no_memory(start) -> None:
    driver = start()
    streams = [Stream(random_tokens(LONGEST, seed)) for seed in range(4)]
    how = Sampling(0.8, top_k=20, top_p=0.95, uniforms=(0.3,))
    shape = StepShape(4, 1, 8, LONGEST)
    driver.step([prefill(stream, 30) for stream in streams])
    driver.compile(shape)
    driver.device.seal()
    rows = [decode(stream, want=Want.TOKEN, sampling=how) for stream in streams[:2]]
    rows.append(prefill(streams[2], 1, want=Want.LOGITS, scored=True))
    for stream in streams:
        driver.give_blocks(stream, 60)
    batch = driver.pack(rows, shape, prompt_logprobs=3)
    assert driver.device.run(batch).prompt_scores is not None
    num_maps, heap = library.load().ns_maps(), heap_bytes()
    for _ in range(50):
        driver.device.run(batch)
    grown = heap_bytes() - heap
    assert library.load().ns_maps() == num_maps
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(50):
        driver.device.run(batch)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    driver.device.close()
    assert grown < 50 * 512, "four rows of the hidden state a step"
    assert peak < 4096, "views and other small objects, no arrays of numbers"


def test_a_draft_takes_no_memory(start, reference) -> None:
    driver = start(draft=str(reference("qwen3").directory), num_drafts=4)
    streams = [Stream(random_tokens(60, seed)) for seed in range(2)]
    driver.step([prefill(stream, 20) for stream in streams])
    driver.draft([7, 8])
    driver.step([decode(streams[0], 3), prefill(streams[1], 5)])
    assert driver._last is not None
    lengths, newest = np.array([2, 0], np.int32), np.full(len(driver._last[1].sampling.want), 5, np.int32)
    newest[[1, 3, 4, 5]] = -1
    batch, request = driver._last[1], DraftRequest(lengths, newest)
    expected = driver.device.draft(batch, request).copy()
    num_maps = library.load().ns_maps()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(50):
        found = driver.device.draft(batch, request)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert library.load().ns_maps() == num_maps
    assert peak < 2048, "small objects, no arrays of numbers"
    np.testing.assert_array_equal(found, expected)  # nothing is kept between calls but what the cache holds
    driver.device.close()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_drafts_do_not_depend_on_threads_and_instructions(
    isa: str, threads: int, start, reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    driver = start(threads=threads, draft=str(reference("qwen3").directory), num_drafts=5)
    found = []
    for _ in range(20):
        streams = [Stream(random_tokens(30, seed)) for seed in range(3)]
        driver.step([prefill(stream, 30, want=Want.NOTHING) for stream in streams])
        found.append(driver.draft([3, 4, 5]))
        driver._free += [block for stream in streams for block in stream.blocks]
    assert all(drafts == found[0] for drafts in found)
    assert found[0] == first_drafts.setdefault("drafts", found[0])
    driver.device.close()


first_drafts: dict[str, list[list[int]]] = {}


BAD_REQUESTS = {
    "more standing than the step had": ([2], [5], "length 2, the shape has room for 1"),
    "a newest token outside the vocabulary": ([1], [160], "token id 160"),
    "a newest token after nothing": ([0], [5], "newest token 5, but no token of the row stands"),
    "a request of another size": ([1, 1, 1], [5], r"draft.lengths is int32 \(3,\)"),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_what_does_not_belong_to_the_step_is_refused(what: str, start, reference) -> None:
    lengths, newest, text = BAD_REQUESTS[what]
    driver, stream = start(draft=str(reference("qwen3").directory), num_drafts=2), Stream(random_tokens(20, 0))
    driver.step([prefill(stream, 6)])
    driver.step([decode(stream)], StepShape(1, 1, 0, LONGEST))
    assert driver._last is not None
    with pytest.raises(DoesNotFit, match=text):
        driver.device.draft(driver._last[1], DraftRequest(np.array(lengths, np.int32), np.array(newest, np.int32)))
    assert driver.draft([4])[0][0] >= 0
    driver.device.close()


def test_the_counter_of_allocations_sees_one() -> None:
    native = library.load()
    before = native.ns_maps()
    memory = library.Memory(native, 1 << 20)
    assert native.ns_maps() == before + 1
    assert memory.size == 1 << 20


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_close_leaves_no_thread_and_may_come_twice(start) -> None:
    before = num_threads()
    driver = start(threads=5)
    assert num_threads() == before + 4
    driver.step([prefill(Stream(random_tokens(5, 0)), 5)])
    driver.device.close()
    assert num_threads() == before
    driver.device.close()
    with pytest.raises(DeviceError, match="load first"):
        driver.device.allocate(4)


def test_threads_are_those_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    monkeypatch.setattr(library, "_cpu_quota", lambda: None)
    assert (library.num_threads(), library.num_threads(8)) == (3, 8)
    monkeypatch.setattr(library, "_cpu_quota", lambda: 1.5)
    assert library.num_threads() == 1


BAD = {
    "a block beyond the cache": (lambda b: b.decode.blocks.fill(10_000), "block 10000"),
    "a negative block": (lambda b: b.decode.blocks.fill(-1), "block -1"),
    "a token beyond the vocabulary": (lambda b: b.decode.tokens.fill(160), "token id 160"),
    "a position beyond the context": (lambda b: b.decode.positions.fill(LONGEST), f"context is {LONGEST}"),
    "a row longer than the shape": (lambda b: b.decode.lengths.fill(2), "length 2"),
    "a prompt beyond the shape": (lambda b: b.prefill.starts.fill(7), "starts at 7"),
    "a target beyond the vocabulary": (lambda b: b.prefill.targets.fill(160), "target id 160"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_batch_is_refused_and_the_next_is_served(what: str, start) -> None:
    driver, stream, prompt = start(), Stream(random_tokens(20, 0)), Stream(random_tokens(20, 1))
    driver.step([prefill(stream, 6)])
    shape = StepShape(1, 1, 8, LONGEST)
    driver.compile(shape)
    rows = [decode(stream), prefill(prompt, 3)]
    for row in rows:
        driver.give_blocks(row.stream, row.stream.computed + row.count)
    spoil, text = BAD[what]
    batch = driver.pack(rows, shape)
    spoil(batch)
    with pytest.raises(DoesNotFit, match=text):
        driver.device.run(batch)
    expected = driver.device.run(driver.pack(rows, shape)).logits.copy()
    assert np.isfinite(expected).all()
    driver.device.close()


def test_arrays_of_another_size_are_refused(start) -> None:
    driver, stream = start(), Stream(random_tokens(20, 0))
    driver.step([prefill(stream, 6)])
    driver.compile(StepShape(3, 1, 0, LONGEST))
    driver.compile(StepShape(2, 1, 0, LONGEST))
    small = driver.pack([decode(stream)], StepShape(2, 1, 0, LONGEST))
    wrong = type(small)(StepShape(3, 1, 0, LONGEST), small.decode, None, small.sampling)
    with pytest.raises(DoesNotFit, match=r"decode.tokens is int32 \(2, 1\)"):
        driver.device.run(wrong)
    driver.device.close()


def test_order_of_calls(start, reference) -> None:
    device = CpuDevice()
    with pytest.raises(DeviceError, match="load first"):
        device.compile(StepShape(1, 1, 0, 8))
    device.load(str(reference("llama").directory), DeviceOptions(2, LONGEST, 8, 2, threads=1))
    with pytest.raises(DeviceError, match="allocate"):
        device.compile(StepShape(1, 1, 0, LONGEST))
    with pytest.raises(DoesNotFit, match="scratch"):
        device.allocate(1)
    device.allocate(20)
    with pytest.raises(DoesNotFit, match="max_model_len"):
        device.compile(StepShape(1, 1, 0, LONGEST + 8))
    device.compile(StepShape(1, 1, 0, LONGEST))
    device.seal()
    with pytest.raises(UncompiledShape):
        device.compile(StepShape(2, 1, 0, LONGEST))
    with pytest.raises(DoesNotFit, match="blocks 0 to 19"):
        device.copy_blocks([(1, 20)])
    device.close()


def test_an_instruction_set_that_is_not_there_is_named(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "avx1024")
    with pytest.raises(DeviceError, match="NEURONSERVE_CPU_ISA='avx1024'"):
        start()


def test_without_a_library_the_device_runs_on_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise library.NativeMissing("no C compiler")

    monkeypatch.setattr("neuronserve.neuron_worker.device.cpu.device.load", missing)
    monkeypatch.setattr(logging.getLogger("neuronserve"), "propagate", True)  # whatever vLLM was asked to do with it
    assert isinstance(create(CAPABILITIES), TorchDevice)
    assert [record.getMessage()[:14] for record in caplog.records] == ["no C compiler."]


def test_a_missing_directory_is_a_load_error(tmp_path: Path) -> None:
    device = CpuDevice()
    with pytest.raises(LoadError):
        device.load(str(tmp_path / "nothing"), DeviceOptions(1, 8, 8, 1, threads=1))
    device.close()
