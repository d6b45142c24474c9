"""What every model class of the library shares: building, compiling, saving, and one call for prompts and decoding."""

import hashlib
import json
import os
from types import SimpleNamespace

import torch

from . import bucket, chip
from .config import NeuronConfig
from .constants import GQA, KV_SHARD_PAD, LAYOUT_BSH

CHECKPOINTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
AMPS = ("f32", "f16", "bf16")
TOPOLOGIES = (1, 2, 4, 8, 12, 16, 24)
NO_NEFF = "Could not find a matching NEFF for your HLO in this directory."


class NeuronModelBase:
    serves_continuously = True
    speculates = False

    def __init__(
        self,
        config,
        *,
        n_positions=2048,
        batch_size=1,
        amp="f32",
        tp_degree=2,
        context_length_estimate=None,
        context_unroll=None,
        unroll=None,
        neuron_config=None,
        **kwargs,
    ):
        self.config = config
        self.neuron_config = neuron_config or NeuronConfig()
        assert amp in AMPS, f"amp={amp} is not one of {AMPS}"
        self.amp, self.tp_degree = amp, tp_degree
        self.unroll = unroll or config.num_hidden_layers
        if config.num_hidden_layers % self.unroll:
            raise ValueError(f"unroll={self.unroll} does not divide num_layers={config.num_hidden_layers}")
        self.token_buckets = bucket.token_sizes(self._positions(n_positions))
        self.context_buckets = bucket.context_sizes(context_length_estimate, self.token_buckets)
        self.batch_sizes = bucket.batch_sizes(batch_size)
        # What the library calls it; the fused decoder looks here.
        self.decoder_lm_head = SimpleNamespace(tp_degree=tp_degree, n_positions_list=self.token_buckets)
        if self.speculates:
            self.decoder_lm_head_for_speculation = {}
        self._check_sequence_parallel_norm()
        self._mark_configuration()
        self.chip = None
        self._compiled_artifacts_directory = None
        self._neffs = None

    def _positions(self, n_positions):
        if not self.neuron_config.shard_over_sequence:
            return n_positions
        if isinstance(n_positions, list):
            return [*sorted(n_positions)[:-1], max(n_positions) + KV_SHARD_PAD]
        return n_positions + KV_SHARD_PAD

    def _check_sequence_parallel_norm(self):
        config = self.neuron_config
        for size in self.context_buckets if config.sequence_parallel_norm else ():
            if size > config.sequence_parallel_norm_threshold and size % self.tp_degree:
                raise ValueError(f"the bucket size ({size}) is not divisible by the degree ({self.tp_degree})")

    def _mark_configuration(self):
        """The configuration is the caller's object, and it is written to."""
        config, kv_heads = self.neuron_config, self.config.num_key_value_heads
        if kv_heads == self.config.num_attention_heads:
            config.shard_over_sequence = False
        elif config.group_query_attention in (None, GQA.SHARD_OVER_HEADS):
            even = kv_heads % self.tp_degree == 0
            config.group_query_attention = GQA.SHARD_OVER_HEADS if even else GQA.REPLICATED_HEADS
        config.n_head_padded = -(-self.config.num_attention_heads // self.tp_degree) * self.tp_degree
        config.kv_replication = max(1, self.tp_degree // kv_heads)
        if config.on_device_generation:
            config.on_device_generation.vocab_size = self.config.vocab_size

    # -- from a checkpoint

    @classmethod
    def from_pretrained(cls, pretrained_model_path, *model_args, **kwargs):
        _check_arguments(**kwargs)
        model = cls(_read_config(pretrained_model_path), *model_args, **kwargs)
        if not any(os.path.exists(os.path.join(pretrained_model_path, name)) for name in CHECKPOINTS):
            raise FileNotFoundError(f"Can not find model.safetensors or pytorch_model.bin in {pretrained_model_path}")
        return model

    # -- to the chip

    def to_neuron(self):
        chip.calls.append((self, "to_neuron"))
        self._check_cores()
        if self._compiled_artifacts_directory is not None:
            self._load_neffs(self._compiled_artifacts_directory)
            self._spoil_generation_config()
        else:
            self._compile()
        self.chip = chip.Chip(self, self.batch_sizes[-1], self.token_buckets[-1], self.config.vocab_size)
        self.chip.tables = self._first_tables

    def cpu_compile(self):
        chip.calls.append((self, "cpu_compile"))
        self._compile()

    def _compile(self):
        self._neffs = dict.fromkeys(self._neff_names(), b"neff")
        self._spoil_generation_config()

    def _spoil_generation_config(self):
        """Graph nodes take the place of the numbers, in the very object the caller gave."""
        generation = self.neuron_config.on_device_generation
        self._first_tables = {}
        if generation is None:
            return
        self._check_generation(generation)
        if generation.dynamic:
            for name in chip.PARAMETERS:
                value = torch.tensor(getattr(generation, name))
                self._first_tables[name] = value.tolist()
                setattr(generation, name, object())

    def _check_cores(self):
        if self.tp_degree not in TOPOLOGIES and self.tp_degree % 32:
            raise RuntimeError(
                "Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a multiple of 32"
            )

    def _check_generation(self, new):
        compiled, batch = self.neuron_config.on_device_generation, self.batch_sizes[0]
        if compiled:
            assert new.per_batch_line == compiled.per_batch_line, "Invalid new generation config: per_batch_line"
        assert new.global_top_k is None or new.dynamic, "global_top_k is only supported with dynamic"
        values = {name: getattr(new, name) for name in chip.PARAMETERS}
        if not new.per_batch_line:
            lists = [name for name, value in values.items() if isinstance(value, list)]
            assert not lists, "Sampling parameters cannot be of type list when per_batch_line = False"
            return
        for name, value in values.items():
            if not isinstance(value, list):
                setattr(new, name, [value] * batch)  # in place, in the caller's object
        lengths = {name: len(getattr(new, name)) for name in chip.PARAMETERS}
        assert set(lengths.values()) == {batch}, f"sampling parameters must be of size batch_size {batch}: {lengths}"

    def update_generation_config(self, generation_config):
        chip.calls.append((self, "update_generation_config"))
        self._check_generation(generation_config)
        compiled = self.neuron_config.on_device_generation
        if compiled is None or not compiled.dynamic:
            raise RuntimeError("parallel_write: the tables do not exist")
        for name in chip.PARAMETERS:
            self.chip.tables[name] = torch.tensor(getattr(generation_config, name)).tolist()

    def is_compiled(self):
        return self._neffs is not None

    def reset(self):
        chip.calls.append((self, "reset"))
        self.chip.clear()

    # -- compiled graphs on disk

    def save(self, directory, sharded_weights=False):
        chip.calls.append((self, "save"))
        if os.path.isfile(directory):
            raise FileExistsError(f"Artifacts should be saved to a directory. Found existing file: {directory}")
        os.makedirs(directory, exist_ok=True)
        assert self._neffs is not None, "cannot save a model which has not been successfully compiled"
        for name, content in self._neffs.items():
            with open(os.path.join(directory, name), "wb") as file:
                file.write(content)
        if sharded_weights:
            assert self.neuron_config.on_device_embedding, "on_device_embedding must be True to save sharded weights"
            raise NotImplementedError("the fake has no weights to save")

    def load(self, directory):
        chip.calls.append((self, "load"))
        self._compiled_artifacts_directory = directory

    def _load_neffs(self, directory):
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"Did not find directory: {directory}.")
        self._neffs = {}
        for name in self._neff_names():
            try:
                with open(os.path.join(directory, name), "rb") as file:
                    self._neffs[name] = file.read()
            except FileNotFoundError:
                raise FileNotFoundError(NO_NEFF) from None

    def _neff_names(self):
        """One file per graph, named by what is computed: neither the compiler nor its flags are part of the name."""
        graphs = [("prefill", size, 1) for size in self.context_buckets]
        graphs += [("decode", size, batch) for size in self.token_buckets for batch in self.batch_sizes]
        graphs += [("verify", *key) for key in getattr(self, "decoder_lm_head_for_speculation", {})]
        generation = self.neuron_config.on_device_generation
        sampling = None if generation is None else [generation.do_sample, generation.dynamic, generation.global_top_k]
        settings = self.neuron_config.to_json() | {"on_device_generation": sampling}
        numbers = {name: value for name, value in vars(self.config).items() if isinstance(value, (int, float))}
        model = [type(self).__name__, numbers, self.amp, self.tp_degree, self.token_buckets[-1]]
        common = [model, settings]
        names = (hashlib.sha256(json.dumps([graph, common]).encode()).hexdigest()[:20] for graph in graphs)
        return [f"{name}.neff" for name in names]

    # -- speculation

    def enable_speculative_decoder(self, speculation_length, batch_sizes=None, token_tree=None):
        if token_tree is not None:
            raise NotImplementedError("the fake has no trees")
        lengths = [speculation_length] if isinstance(speculation_length, int) else speculation_length
        batches = [batch_sizes] if isinstance(batch_sizes, int) else batch_sizes or self.batch_sizes
        for length in lengths:
            for batch in batches:
                self.decoder_lm_head_for_speculation[length, batch] = object()

    # -- one call

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, input_ids, cache_ids=None, start_ids=None):
        return self._forward(input_ids, cache_ids, start_ids)

    def _forward(self, input_ids, cache_ids, start_ids, prev_hidden=None):
        batching = self.neuron_config.continuous_batching
        if not batching:
            raise NotImplementedError("the fake plays continuous batching only")
        if self.neuron_config.bsh_cache_layout:
            raise NotImplementedError("the fake plays the SBH cache only")
        if not self.serves_continuously:
            raise AssertionError(f"{type(self)} doesn't support dynamic batching.")
        num_rows, width = input_ids.shape
        if start_ids is None:  # taken for a static batch, which starts at the first slot
            start_ids = torch.zeros(num_rows, dtype=torch.int32)
        is_eagle = self.neuron_config.is_eagle_draft or self.neuron_config.is_eagle_target
        if (width > 1 or is_eagle) and cache_ids.flatten()[0].item() == 0:
            return self._prefill(input_ids, cache_ids, start_ids, prev_hidden)
        if width > 1:
            return self._verify(input_ids, cache_ids)
        return self._decode(input_ids, cache_ids, start_ids)

    def _verify(self, input_ids, cache_ids):
        batches = [batch for _, batch in self.decoder_lm_head_for_speculation]
        num_rows = len(input_ids)
        assert num_rows in batches, f"invalid batch size for speculative forward ({num_rows} not in {batches})"
        raise NotImplementedError("the fake does not verify drafts of the host")

    def _prefill(self, input_ids, cache_ids, start_ids, prev_hidden):
        num_rows, width = input_ids.shape
        size = bucket.find(self.context_buckets, width)
        assert num_rows == cache_ids.shape[0], f"invalid n_active_seqs ({num_rows} vs {cache_ids.shape[0]})"
        assert width <= size, f"invalid input prompt length ({width} <= {size})"
        last = cache_ids.max(dim=1).values
        ends = []
        for row in range(num_rows):
            slot = start_ids[row : row + 1]
            if slot.shape != (1,):
                raise AssertionError(f"3th input shape mismatch. Expected {torch.Size([1])}, but got {slot.shape}")
            tokens = torch.zeros(size, dtype=torch.int64)
            tokens[:width] = input_ids[row]
            self._embed(tokens)
            with self.chip.launch("prefill", size, [int(slot)]):
                ends.append(self._prefill_row(int(slot), tokens.tolist(), int(last[row]) + 1))
        tokens_or_logits = self._results([digests[-1] for digests in ends], start_ids.flatten().tolist())
        if width == 1:  # an EAGLE model's prompt, but its rows are picked by slot as if it were a decode
            tokens_or_logits = tokens_or_logits[start_ids.to(torch.long)]
        if self.neuron_config.is_eagle_target:
            return tokens_or_logits, self._hidden(ends, size)
        return tokens_or_logits

    def _prefill_row(self, slot, tokens, length):
        # All of the bucket's positions are written, and nothing in front of them is read.
        digests = self.chip.write_tokens(slot, 0, tokens[:length])
        shared = len(tokens) // self._cores_per_line * self._cores_per_line
        self.chip.write_garbage(slot, min(length, shared), len(tokens))
        return digests

    @property
    def _cores_per_line(self):
        """That take turns with the positions of a sequence: position 0 is the first one's, 1 the next one's."""
        return self.neuron_config.kv_replication if self.neuron_config.shard_over_sequence else 1

    def _write_turns_of_others(self, slot, position, size):
        """A core whose turn it is not writes all the same, to the last place that its graph knows."""
        cores = self._cores_per_line
        last = (size // cores - 1) * cores
        for core in range(cores):
            if position % cores != core:
                self.chip.write_garbage(slot, last + core, last + core + 1)

    def _decode(self, input_ids, cache_ids, start_ids):
        """Every slot takes part: those not given, with token 0 at position 0."""
        num_slots = self.neuron_config.continuous_batching.batch_size_for_shared_caches
        index = start_ids.flatten().unsqueeze(-1).to(torch.int64)
        tokens = torch.zeros(num_slots, 1, dtype=input_ids.dtype).scatter_(0, index, input_ids)
        positions = torch.zeros(num_slots, 1, dtype=input_ids.dtype).scatter_(0, index, cache_ids)
        furthest = positions.max().item()
        size = next(size for size in self.token_buckets if size >= furthest + 1)
        self._embed(tokens)
        with self.chip.launch("decode", size, index.flatten().tolist()):
            places = zip(tokens.flatten().tolist(), positions.flatten().tolist(), strict=True)
            digests = []
            for slot, (token, position) in enumerate(places):
                digests += self.chip.write_tokens(slot, position, [token])
                self._write_turns_of_others(slot, position, size)
        results = self._results(digests, range(num_slots))[index.flatten()]
        if self.neuron_config.is_eagle_target:
            return results, self._hidden([[digest] for digest in digests], 1)
        return results

    def _embed(self, tokens):
        """Looked up on the host, unless the table is on the chip too."""
        if (
            not self.neuron_config.on_device_embedding
            and not 0 <= tokens.min() <= tokens.max() < self.config.vocab_size
        ):
            raise IndexError("index out of range in self")

    def _results(self, digests, slots):
        generation = self.neuron_config.on_device_generation
        if generation is None:
            logits = torch.stack([torch.from_numpy(self.chip.logits(digest)) for digest in digests])
            return logits.to(getattr(torch, self.neuron_config.cast_logits_dtype))
        tokens = [[self.chip.draw(digest, slot, generation)] for digest, slot in zip(digests, slots, strict=True)]
        return torch.tensor(tokens, dtype=torch.int32)

    def _hidden(self, digests_of_rows, width):
        """[rows, width, hidden]: what the model knows at each position, in pieces that a float holds exactly."""
        hidden = torch.zeros(len(digests_of_rows), width, max(4, self.config.hidden_size))
        for row, digests in enumerate(digests_of_rows):
            for position, digest in enumerate(digests):
                hidden[row, position, :4] = pieces(digest)
        return hidden


def pieces(digest):
    return torch.tensor([float(digest >> shift & 0xFFFF) for shift in (0, 16, 32, 48)])


def joined(hidden):
    """The digest that `pieces` took apart."""
    return sum(int(piece) << shift for piece, shift in zip(hidden[:4].tolist(), (0, 16, 32, 48), strict=True))


def _check_arguments(**kwargs):
    estimate, n_positions = kwargs.get("context_length_estimate"), kwargs.get("n_positions", 2048)
    longest = max(estimate) if isinstance(estimate, list) and estimate else estimate
    positions = max(n_positions) if isinstance(n_positions, list) else n_positions
    if isinstance(longest, int) and isinstance(positions, int):
        assert positions >= longest, (
            f"Max context_length_estimate {longest} cannot be more than max n_positions {positions}."
        )
    config = kwargs.get("neuron_config")
    bsh = config is not None and config.cache_layout == LAYOUT_BSH
    if config is None or not config.continuous_batching:
        assert not bsh, "BSH cache layout can only be configured with continuous batching."
        return
    batching, batch = config.continuous_batching, kwargs.get("batch_size")
    shared = batching.batch_size_for_shared_caches
    assert shared == batch, f"invalid batch_size_for_shared_caches ({shared}), {batch} is expected"
    if bsh and not batching.optimized_paged_attention:
        single = [isinstance(value, list) and len(value) == 1 for value in (n_positions, estimate)]
        assert all(single), "BSH cache layout does not support multi-bucketing"


def _read_config(directory):
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            values = json.load(file)
    except FileNotFoundError:
        raise OSError(f"{directory} does not appear to have a file named config.json") from None
    heads = values["num_attention_heads"]
    return SimpleNamespace(**{"num_key_value_heads": heads, "rope_theta": 10000.0, **values})
