"""vLLM's worker: brings a device up, sizes its cache, and hands each step to the runner.

Start-up, in vLLM's order: init_device, load_model, get_kv_cache_spec, determine_available_memory,
initialize_from_config, compile_or_warm_up_model. After that only `execute_model` and `sample_tokens`.
One worker drives the whole device, however many cores it has.

Knows vLLM's worker interface and `NeuronConfig`. Knows no text and no HTTP.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from neuronserve.bucketing.pack import StepPacker
from neuronserve.neuron_worker.config import NeuronConfig
from neuronserve.neuron_worker.device.base import Device, DeviceOptions, ModelFacts
from neuronserve.neuron_worker.device.errors import DeviceLost
from neuronserve.neuron_worker.device.remote import RemoteDevice
from neuronserve.neuron_worker.drafter import Drafter
from neuronserve.neuron_worker.drawing import Draws
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.idle_watch import IdleWatch
from neuronserve.neuron_worker.kept_graphs import KeptGraphs, kept_graphs
from neuronserve.neuron_worker.look_ahead import LookAhead
from neuronserve.neuron_worker.memory import cache_bytes, chip_bytes, slots_bytes
from neuronserve.neuron_worker.model_files import local_directory
from neuronserve.neuron_worker.pace import Pace
from neuronserve.neuron_worker.revival import Revival
from neuronserve.neuron_worker.runner import Runner
from neuronserve.neuron_worker.sampling import Decider, HostSampler
from neuronserve.neuron_worker.state import RequestState
from neuronserve.neuron_worker.warmup import warm_up
from neuronserve.speculative.proposer import make_proposer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = logging.getLogger(__name__)


class NeuronWorker(WorkerBase):
    runner: Runner
    graphs: KeptGraphs | None = None

    def init_device(self) -> None:
        self.device = torch.device("cpu")  # where vLLM's own tensors live; the model's never meet torch here
        # The cores are the device's: torch's threads would spin beside its own. A device made of torch asks for more.
        torch.set_num_threads(1)
        self.config = NeuronConfig.of(self.vllm_config)
        self.num_blocks = 0

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.backend, self.facts = self._load()
        logger.info("%s on %s: %s", self.facts.architecture, self.config.backend, _summary(self.facts))
        for note in self.facts.notes:
            logger.info("%s", note)

    def _load(self) -> tuple[Device, ModelFacts]:
        model = self.model_config
        directory = local_directory(model.model, model.revision, self.load_config.download_dir)
        if self.graphs is None:
            source = {"revision": model.revision, "download_dir": self.load_config.download_dir}
            self.graphs = kept_graphs(self.config, model.model, directory, os.environ, **source)
        options = self._device_options(self.graphs)
        device = self.config.create_device()
        try:
            return device, device.load(directory, options, self._draft_directory())
        except BaseException:
            device.close()
            self.graphs.discard()
            raise

    def _draft_directory(self) -> str | None:
        asked = self.config.speculation
        if asked is None or asked.model is None:
            return None
        return local_directory(asked.model, asked.revision, self.load_config.download_dir)

    def _device_options(self, graphs: KeptGraphs) -> DeviceOptions:
        most = self.model_config.max_logprobs
        return replace(
            self.config.device_options(),
            max_prompt_logprobs=self.config.vocab_size if most < 0 else most,
            artifacts=graphs.open(),
            compiler_cache=graphs.compiler_cache,
        )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One layer that stands for all: vLLM counts blocks, the device knows what is in them."""
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=-(-self.facts.bytes_per_kv_token // 2),  # keys, and as much again for values
            dtype=torch.uint8,
        )
        return {"all_layers": spec}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        block_bytes = self.cache_config.block_size * self.facts.bytes_per_kv_token
        if self.backend.capabilities.kv_layout == "slots":
            return slots_bytes(
                block_bytes=block_bytes,
                max_num_seqs=self.scheduler_config.max_num_seqs,
                given=self.cache_config.kv_cache_memory_bytes,
            )
        size: Callable[..., int] = cache_bytes
        if self.backend.capabilities.on_chip:
            size = partial(chip_bytes, weight_bytes=self.facts.weight_bytes, cores=self.config.tensor_parallel_size)
        return size(
            block_bytes=block_bytes,
            block_size=self.cache_config.block_size,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_model_len=self.model_config.max_model_len,
            given=self.cache_config.kv_cache_memory_bytes,
            utilization=self.cache_config.gpu_memory_utilization,
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.num_blocks = kv_cache_config.num_blocks
        self.backend.allocate(self.num_blocks)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.runner = self._make_runner()
        self.runner.host_sampler.warm_up()
        seconds = self._warm_up(self.backend)
        counters = self.runner.counters
        counters.warmup_seconds, counters.num_shapes = seconds, len(self.config.plan.shapes)
        self.idle_watch = IdleWatch(self._look, _end_engine)
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def _warm_up(self, device: Device) -> float:
        logger.info("preparing %d shapes", len(self.config.plan.shapes))
        seconds = warm_up(device, self.config.plan.shapes, logger.info)
        if self.graphs is not None:
            self.graphs.close()
        logger.info("all shapes are ready, %.1f s", seconds)
        return seconds

    def _make_runner(self) -> Runner:
        plan, vocab_size = self.config.plan, self.facts.vocab_size
        packer = StepPacker(plan.block_size, plan.prompts_per_call)
        for shape in plan.shapes:
            packer.prepare(shape)
        draws = Draws(self.model_config.seed)
        host_sampler = HostSampler(self.vllm_config, vocab_size, draws)
        if host_sampler.has_custom_processors and self.config.samples_by_its_own_rule:
            raise ConfigError(
                "logits processors of your own need logits on the host, but sampling is compiled into the "
                f"{self.config.backend} device; take them out, or serve with --neuronserve.sampling host and no draft"
            )
        always_host = self.config.sampling == "host" or host_sampler.has_custom_processors
        state = RequestState(
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_model_len=self.model_config.max_model_len,
            block_size=self.cache_config.block_size,
            vocab_size=vocab_size,
            decide=Decider(self.backend.capabilities, vocab_size, always_host=always_host),
            draw=draws,
            num_ahead=self._num_ahead,
            is_fused=self.config.is_fused,
        )
        drafter = self._make_drafter(state, host_sampler)
        return Runner(
            device=self.backend,
            plan=plan,
            packer=packer,
            state=state,
            host_sampler=host_sampler,
            revival=Revival(self._restart, self.config.device_restarts),
            complain=logger.error,
            drafter=drafter,
            look_ahead=LookAhead(packer, drafter) if drafter is not None and self._num_ahead else None,
        )

    @property
    def _num_ahead(self) -> int:
        """Tokens of a draft that runs between two steps."""
        return 0 if self.config.is_fused else self.config.num_drafts

    def _make_drafter(self, state: RequestState, host_sampler: HostSampler) -> Drafter | None:
        asked = self.config.speculation
        if asked is None:
            return None
        if self.config.is_fused:
            return Drafter(make_proposer(asked, is_fused=True), asked.num_tokens, state)
        if host_sampler.has_custom_processors:
            logger.warning("nothing is drafted: logits processors of your own see every token sampled plainly")
            return None
        pace = Pace(self.config.plan.decode_rows_of) if asked.is_adaptive else None
        return Drafter(make_proposer(asked), asked.num_tokens, state, asked.max_length, pace)

    def _restart(self) -> Device:
        """A device in the place of one that was lost, its cache empty."""
        started = time.perf_counter()
        self.backend.close()
        self.backend, self.facts = self._load()
        self.backend.allocate(self.num_blocks)
        self._warm_up(self.backend)
        self.runner.counters.device_restarts += 1
        logger.info("the device was restarted in %.1f s", time.perf_counter() - started)
        return self.backend

    def _look(self) -> None:
        """A device in another process may end while nobody uses it."""
        if not isinstance(self.backend, RemoteDevice) or not self.runner.is_idle:
            return
        try:
            self.backend.check()
        except DeviceLost as lost:
            logger.error("the idle device was lost: %s", lost)
            self.runner.revive(str(lost))

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        with self.idle_watch.step():
            return self.runner.execute(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        with self.idle_watch.step():
            return self.runner.sample(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runner.take_drafts()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def neuronserve_metrics(self) -> dict[str, Any]:
        """For `collective_rpc`, at scrape time."""
        return {**self.runner.counters.snapshot(), "padding": self.runner.padding.snapshot()}

    def shutdown(self) -> None:
        if hasattr(self, "idle_watch") and not self.idle_watch.stop():
            return  # it is restarting the device, whose process ends with this one
        if hasattr(self, "backend"):
            self.backend.close()


def _end_engine() -> None:
    """The engine waits for requests and would notice nothing. In its own process only: a script goes on, and its next
    request ends in the error."""
    if multiprocessing.parent_process() is not None:
        os._exit(1)


def _summary(facts: ModelFacts) -> str:
    return (
        f"{facts.num_layers} layers, vocabulary {facts.vocab_size}, {facts.weight_bytes / 2**20:.0f} MiB of weights, "
        f"{facts.bytes_per_kv_token} bytes of cache per token, computed in {facts.compute_dtype}"
    )
