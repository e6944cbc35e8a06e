# Each target installs what it needs. `make` without a target lists them.
PYTHON ?= python3
VENV   ?= .venv
# torch's CPU build is enough, except for `make gpu` and the GPU benchmarks: there use TORCH=torch
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin

.PHONY: help test test-quick test-all test-experts test-others test-floors check format gpu docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test,dev]"
	touch $@

# two processes: each test of a file runs in the same one, and tests of time and memory in one alone
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

test: $(VENV)/.installed ## run the tests that need no GPU, in Triton's interpreter (10 minutes)
	$(PYTEST) -m "not gpu and not browser and not architectures and not slow"

test-quick: $(VENV)/.installed ## run every command once and check the rooms (under a minute)
	$(BIN)/python -m pytest tests/test_quick.py tests/test_layering.py

SCENARIOS := quantize dequantize overwrite stream pipeline parts streamed-parts push calibrated experts gguf integers
# points of each scenario at which a run is killed: all of them, 160 to 700
KILLS := 1000000

test-all: $(VENV)/.installed ## run what `test` runs and what takes long: full grids, fuzzing, every kill
	$(PYTEST) -m "not gpu and not browser and not architectures"
	PYTHONPATH=tests/helpers $(BIN)/python tests/helpers/fuzz.py $(FUZZ)
	for scenario in $(SCENARIOS); do echo $$scenario $(KILLS); echo $$scenario 60 signals; done | \
	  PYTHONPATH=tests/helpers xargs -P $$(nproc) -I{} sh -c 'set -- {}; scenario=$$1; shift; folder=$$(mktemp -d); \
	  $(BIN)/python tests/helpers/interruptions.py $$scenario $$folder $$@ > $$folder/points && \
	  ! grep -vF "\"status\": 0, \"differing\": [], \"looks finished and is not\": false" $$folder/points && \
	  echo "{}: $$(wc -l < $$folder/points) points" && rm -r $$folder'

# Other releases and other projects, each in an environment of its own: transformers 4 and 5 cannot be installed side by
# side, and llama.cpp's converter is in the source distribution of its Python package, which is not built here.
EXPERTS := transformers-5.8.1 transformers-5.17.0 transformers-5.24.0

$(VENV)/transformers-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "$(TORCH)" transformers==$(if $(filter 4,$*),4.57.6,$*) accelerate bitsandbytes==0.50.2 peft==0.21.2 pytest
	$(@D)/bin/pip install --quiet --editable .
	touch $@

test-experts: $(EXPERTS:%=$(VENV)/%/.installed) ## test packed experts in three releases of transformers 5 (5 minutes)
	for release in $(EXPERTS); do \
	  $(VENV)/$$release/bin/python -m pytest tests/inference/test_moe_*.py || exit 1; done

$(VENV)/.others: $(VENV)/.installed
	$(BIN)/pip install --quiet diffusers trl gguf sentencepiece sentence-transformers --editable ".[ray]"
	$(BIN)/pip download --quiet --no-deps --no-binary :all: --dest $(VENV) llama-cpp-python==0.3.36
	mkdir -p $(VENV)/llama.cpp
	tar xzf $(VENV)/llama_cpp_python-0.3.36.tar.gz -C $(VENV)/llama.cpp --strip-components 3 --wildcards \
	  '*/llama.cpp/convert_hf_to_gguf.py' '*/llama.cpp/conversion' '*/llama.cpp/gguf-py'
	touch $@

test-others: $(VENV)/.others $(VENV)/transformers-4/.installed test-experts ## test with other projects: llama.cpp, diffusers, TRL, Ray, releases of transformers (1 hour)
	$(BIN)/python -m pytest tests/architectures --transformers-4 $(VENV)/transformers-4/bin/python
	LLAMA_CPP=$(VENV)/llama.cpp $(BIN)/python -m pytest -m "not gpu" tests/diffusers tests/sources tests/test_docs.py \
	  tests/commands/test_ray.py tests/inference/test_moe_trl.py

# the oldest releases that pyproject.toml allows, and the tests that need neither transformers nor bitsandbytes
FLOORS := torch==2.9.1 huggingface_hub==0.34.0 click==8.1.0 tqdm==4.66.0 numpy==1.26.0 pyyaml==6.0 safetensors==0.5.0
CORE   := cli making inspect quantize source plan writer workspace header layout selection codebook reference ops hub stream push

# FLOOR_TORCH=installed takes the torch of the other tests, since torch takes minutes to install
$(VENV)/floors/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/floors
	$(VENV)/floors/bin/pip install --quiet $(if $(filter installed,$(FLOOR_TORCH)),$(filter-out torch==%,$(FLOORS)),$(FLOORS)) pytest hypothesis
	$(VENV)/floors/bin/pip install --quiet --no-deps --editable .
	ls -d $(abspath $(VENV))/lib/python*/site-packages > $$(ls -d $(VENV)/floors/lib/python*/site-packages)/behind.pth
	touch $@

test-floors: $(VENV)/floors/.installed ## run the core of the tests with the oldest releases that are allowed
	$(VENV)/floors/bin/python -m pytest -m "not gpu and not oracle and not slow" $(foreach name,$(CORE),$(wildcard tests/*/test_$(name).py))

check: $(VENV)/.installed ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# what takes longest begins first; all processes share compiled kernels; what fails beside others may have lacked
# memory, and runs once more, alone
GPU := KERNEL_CACHE=$$(mktemp -d) OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -q -rfEs \
  -m "(gpu or device) and not browser and not architectures" \
  -o faulthandler_timeout=180 -o faulthandler_exit_on_timeout=true
LONGEST := $(addprefix tests/,inference/test_linear_compiled_gpu.py inference/test_experts_gpu.py \
  inference/test_moe_sharding.py run/test_bare_cuda.py sources/test_lora.py commands/test_spread.py)
WORKERS := 15

gpu: $(VENV)/.installed ## test compiled kernels and commands against bitsandbytes CUDA, on an NVIDIA GPU (6 minutes)
	$(GPU) -n $(WORKERS) --dist load --maxschedchunk 1 $(LONGEST) tests || $(GPU) -n 1 --last-failed --lfnf=none tests

docs: $(VENV)/.installed ## generate docs/options.md
	$(BIN)/python docs/generate.py

clean: ## remove everything that the targets made
	rm -rf $(VENV) build dist *.egg-info
