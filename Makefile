# Every target sets up what it needs; `make` alone lists them.
PYTHON ?= python3
VENV   ?= .venv
# torch's CPU build is enough for everything but `make gpu` and the GPU benchmarks; on a GPU machine use e.g. TORCH=torch
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin

.PHONY: help demo test check format gpu bench bench-e2e test-architectures clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 22

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test,dev]"
	touch $@

demo: $(VENV)/.installed ## quantize the real MiniLM checkpoint, load it with transformers, compare
	$(BIN)/python docs/demo.py demo

test: $(VENV)/.installed ## everything that needs no GPU; kernels run in Triton's interpreter
	$(BIN)/python -m pytest -m "not gpu and not browser"

check: $(VENV)/.installed ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(VENV)/.installed ## the kernel tests compiled, against bitsandbytes CUDA
	$(BIN)/python -m pytest -m gpu

bench: $(VENV)/.installed ## the codec against bitsandbytes: GPU table on a GPU machine, else CPU table
	$(BIN)/python -m benchmarks.codec

bench-e2e: $(VENV)/.installed ## whole commands against transformers + bitsandbytes and a raw byte mover
	$(BIN)/python -m benchmarks.end_to_end

test-architectures: $(VENV)/.installed ## every architecture that transformers can build small
	$(BIN)/python -m pytest -m architectures tests/architectures

clean: ## remove what the targets made
	rm -rf $(VENV) demo build dist *.egg-info
