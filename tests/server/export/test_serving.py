"""An export under real vLLM: no parameters, the same tokens; contradictions and damage refused at the start."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.config import NeuronConfig
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import local_directory
from neuronserve.server import cli

from .conftest import Export

PROMPTS = [[1, 5, 9], [7, 7, 7, 7, 7, 7], list(range(3, 40))]


def serve(model: str, **asked: Any) -> tuple[NeuronConfig, list[list[int]]]:
    """(what was served, greedy tokens)."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **asked)
    try:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
        return NeuronConfig.of(llm.llm_engine.vllm_config), tokens
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@pytest.mark.parametrize(("flags", "options"), [((), {}), (("--quant", "s8"), {"quantization": "int8"})])
def test_served_with_no_parameters_it_gives_the_checkpoints_tokens(
    exported: Export, checkpoint: str, flags: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "moved"
    shutil.copytree(exported(*flags), out)
    (out / "model.safetensors").unlink()  # so that it cannot be what is loaded
    config, tokens = serve(str(out))

    assert (config.max_num_seqs, config.max_model_len, config.tensor_parallel_size) == (4, 64, 2)
    assert (config.dtype, config.quantization) == ("float32", options.get("quantization"))
    _, reference = serve(checkpoint, max_num_seqs=4, max_model_len=64, additional_config={"neuronserve": options})
    assert tokens == reference


def test_a_contradiction_is_refused_at_the_start(exported: Export) -> None:
    with pytest.raises(ConfigError, match=r"--max-num-seqs 8: the export in .* was made for 4 sequences at a time"):
        serve(str(exported()), max_num_seqs=8)


def test_quantization_that_contradicts_is_refused(exported: Export) -> None:
    with pytest.raises(ConfigError, match=r"asks for int8 quantization, and the export in .* was made with none"):
        serve(str(exported()), additional_config={"neuronserve": {"quantization": "int8"}})
    with pytest.raises(ConfigError, match=r"asks for no quantization, and the export in .* was made with int8"):
        serve(str(exported("--quant", "s8")), additional_config={"neuronserve": {"quantization": "none"}})


def test_a_damaged_file_is_refused_at_the_start(exported: Export, tmp_path: Path) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(exported(), out)
    path = out / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        serve(str(out))


def test_a_hub_id_whose_snapshot_is_an_export_needs_no_parameters(
    exported: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder, revision = tmp_path / "models--me--it", "0123" * 10
    shutil.copytree(exported("--quant", "s8"), folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)

    assert cli.main(["plan", "me/it", "--download-dir", str(tmp_path)]) == 0

    printed = capsys.readouterr().out
    assert "4 sequences of up to 64 tokens" in printed
    assert "batch 4, sequence length 64, 2 cores, fp32, int8" in printed
    assert local_directory("me/it", None, str(tmp_path)) == str(folder / "snapshots" / revision)
