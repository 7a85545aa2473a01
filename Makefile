# The commands of this tree. Each makes what it needs: a fresh clone wants only Python 3.11, pip, make and a compiler.
#   make demo      write a small checkpoint in the Hugging Face format, if there is none, and generate from it
#   make test      the test suite          make test-slow  the slow tests
#   make lint      ruff and mypy           make figures    the benchmark figures and the README's table
#   make docs      the documentation, in build/site; every warning fails
#   make wheel     build the wheel and the source distribution into dist, after tests of them in empty environments
#   make test-gpu  the tests of kernels, on a Hopper GPU; make sanitize-gpu: compute-sanitizer over every operation
#   make gpu-objects  compile ahead, without a GPU, what those two run

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# The newest that the tests were run with. Installed by itself and first: on a machine with a CPU build of it, pip takes
# that one, while a plain "torch" pulled in by another package would bring gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
# Blackwell's kernels, that the tests compile; without their own needs, CUDA's libraries among them.
BLACKWELL ?= 'tokenspeed-mla>=2.0,<3' 'flashinfer-python>=0.7.2,<0.7.3' 'nvidia-cudnn-frontend==1.32.0'
# The documentation's builder; ruff breaks the lines of long signatures.
DOCS ?= 'zensical>=0.0.73,<0.2' 'mkdocstrings-python>=2.0,<3' 'ruff>=0.6'
CHECKPOINT ?= demo-checkpoint
PROMPTS ?= $(CHECKPOINT)/prompts.txt
# Two workers: the suite is sized for a machine of two cores. Each has a run of files, so that a file's fixtures and
# compiled programs serve all of its tests.
PYTEST_ARGS ?= -n 2 --dist worksteal -q
# cuda12 for drivers older than 580.
CUDA ?= cuda13
# Several workers share a GPU: most of a test's time is the host's.
GPU_ARGS ?= -n 8 --dist worksteal -q
# The compiled kernels of the tests on a GPU. A copy of the folder serves other machines.
GPU_OBJECTS ?= build/gpu-objects
SANITIZERS ?= memcheck racecheck

BIN := $(VENV)/bin
SRC := hatch_build.py tsmla_jax kernels bridge tests examples benchmarks docs

.PHONY: help demo test test-slow gpu-objects test-gpu sanitize-gpu lint format figures docs wheel clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no python3.11 on the PATH: name one with make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, {sys.executable} is {v[0]}.{v[1]}")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Two layers in one environment, so that the demo does not wait for torch and the DSL. Each is made again when
# pyproject.toml changes.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo 'installing jax, flax and this project into $(VENV)'
	$(BIN)/python -m pip install --quiet --editable '.[flax,hf]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.demo
	@echo 'installing torch, the CuTe DSL and the tools into $(VENV): some minutes, once'
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(BLACKWELL)
	@touch $@

$(VENV)/.gpu: pyproject.toml $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --editable '.[$(CUDA)]'
	@touch $@

# The site's builder and what reads docstrings; neither imports the packages.
$(VENV)/.docs: Makefile | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(DOCS)
	@touch $@

$(CHECKPOINT)/config.json: | $(VENV)/.demo
	$(BIN)/python examples/make_checkpoint.py $(CHECKPOINT)

demo: $(VENV)/.demo $(CHECKPOINT)/config.json
	$(BIN)/tsmla generate --checkpoint $(CHECKPOINT) --prompt-file $(PROMPTS) --max-new-tokens 32

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.dev $(VENV)/.docs
	$(BIN)/python -m pytest -q -m slow

gpu-objects test-gpu sanitize-gpu: export TSMLA_CACHE_DIR := $(abspath $(GPU_OBJECTS))
gpu-objects: $(VENV)/.dev
	$(BIN)/tsmla compile --list tests/gpu/objects.jsonl

# Several processes share the GPU's memory. What the folder holds in the end is what the next gpu-objects compiles.
test-gpu: $(VENV)/.gpu
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest $(GPU_ARGS) -m gpu
	$(BIN)/tsmla cache list --json >tests/gpu/objects.jsonl

# One after the other: several sanitizers on one GPU do not end.
sanitize-gpu: $(VENV)/.gpu
	for tool in $(SANITIZERS); do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m tests.gpu.small_grid || exit 1; \
	done

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SRC)
	$(BIN)/mypy

figures: $(VENV)/.dev
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m examples.whole_models.figures

docs: $(VENV)/.docs
	$(BIN)/python docs/build.py

# The tests read what is there to be uploaded. What doesn't pass them is taken away.
wheel: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	TSMLA_DIST=$(abspath dist) $(BIN)/python -m pytest -q -m "slow or not slow" tests/test_packaging.py || { rm -rf dist; exit 1; }

clean:
	rm -rf $(VENV) $(CHECKPOINT) build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
