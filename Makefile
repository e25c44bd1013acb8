# Two commands: `make run` (the sweep) and `make test`. Both make .venv first if it is missing or out of date.
PYTHON ?= python3
# The index that holds PyTorch's CPU build, if pip should look there (spares the CUDA download on a laptop).
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup run test figures artifact image campaign bundle lab lint clean

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

# The paper's figures from recorded results; ARGS takes options such as "--only fig09 --out pictures".
figures: setup
	$(BIN)/python -m sarathi_lab figures $(ARGS)

# All that the claims need (ARTIFACT.md), with verdicts and a page in outputs/artifact; ARGS takes options such as "--only fig08".
artifact: setup
	$(BIN)/python -m sarathi_lab artifact $(ARGS)

# A container that runs `make artifact`, of PyTorch's CPU build; TORCH_INDEX names another, such as that of a CUDA version.
image:
	docker build --tag sarathi-lab $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) .

# Everything at once on a GPU, as a sweep: ARGS takes settings such as "task=peaks,kernels" (only these parts) or
# "resume=true" (what is left of the last one). `make campaign --dry-run` tries it on a CPU: make leaves that option in
# MAKEFLAGS as an n, and runs lines with a + all the same.
DRY = $(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS))))
CAMPAIGN = $(if $(DRY),CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS=1) $(CAMPAIGN_PYTHON) -m sarathi_lab run experiment=campaign$(if $(DRY),_dry)
# CAMPAIGN_PYTHON=python3 takes an environment that has all it needs already, where nothing can be installed.
CAMPAIGN_PYTHON ?= $(BIN)/python
campaign: $(if $(filter $(BIN)/python,$(CAMPAIGN_PYTHON)),setup)
	+@command -v $(CAMPAIGN_PYTHON) >/dev/null || { echo "error: $(CAMPAIGN_PYTHON) is missing; run make setup first" >&2; exit 2; }
	+@PYTHONPATH=$(CURDIR):$(CURDIR)/kernels:$$PYTHONPATH $(CAMPAIGN) $(ARGS)

# The campaign as one file, for a GPU machine without internet: ARGS="--python PYTHON --capability 90", of that machine's
# Python, torch and Triton.
bundle: setup
	$(BIN)/python -m sarathi_lab bundle $(ARGS)

lab: setup
	$(BIN)/python -m jupyter lab notebooks

lint: setup
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy

clean:
	rm -rf $(VENV) build *.egg-info
