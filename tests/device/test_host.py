"""The device's process from within: what it adds to what the client says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from neuronserve.neuron_worker.device import arithmetic
from neuronserve.neuron_worker.device.base import DeviceOptions, ModelFacts
from neuronserve.neuron_worker.device.host import Host
from neuronserve.neuron_worker.device.wire import type_to_json

OPTIONS = DeviceOptions(max_num_seqs=4, max_model_len=64, block_size=8, prompts_per_call=4)


def test_a_backend_is_told_that_its_caller_is_another_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 103}))
    told: list[DeviceOptions] = []

    class Noted(arithmetic.ArithmeticDevice):
        def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
            told.append(options)
            return super().load(model_dir, options, draft_dir)

    host = Host(None, None, None)  # type: ignore[arg-type]
    host._device = Noted(arithmetic.CAPABILITIES)
    host._load({"model_dir": str(tmp_path), "options": type_to_json(OPTIONS), "draft_dir": None})
    assert told == [replace(OPTIONS, across_processes=True)]
