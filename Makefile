# Needs Python 3.11, make, git and a C compiler. The first target that runs installs everything else into .venv.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= $(CURDIR)/.venv
UV := uv==0.13.8
CYCLONEDX := cyclonedx-bom==7.5.0
# The bits of dvc.lock and of tests/golden.json were made with these. torchvision's wheels are CUDA builds and need the
# CUDA build of the same torch; both run on a CPU.
TORCH := torch==2.11.0 torchvision==0.26.0
# A second environment, of the base package alone, with the newest versions of everything but torch.
CORE_PYTHON ?= python3.13
CORE_VENV ?= $(CURDIR)/.venv-core
CORE_STATE = { $(CORE_PYTHON) --version; cat pyproject.toml; }
CORE_DEV := hypothesis psutil pytest pytest-timeout pytest-xdist
# The golden vectors and the contract run every method and engine; newer Pythons differ in how they fork.
CORE_TESTS := tests/api tests/core tests/data tests/engines/test_forks.py tests/engines/test_workers.py tests/models tests/test_certificate.py tests/test_contract.py tests/test_extras.py tests/test_golden.py tests/test_own_method.py

SILO_VENV ?= $(CURDIR)/.venv-silo

RECIPE ?= fednnnn
SILOS ?= 3
PAPERS := fnr fednnnn ccn fednlr rfedavg
SIZE ?= smoke
TESTS ?= --ignore tests/research

export PATH := $(VENV)/bin:$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true
# Without compiled modules every import of torch or mlflow takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

PAPER_TARGETS := $(addprefix paper-,$(PAPERS))
.NOTPARALLEL:  # one DVC at a time
.PHONY: help papers $(PAPER_TARGETS) table figure claims judge archive repro test test-research test-slow test-core test-silo check format docs ui experiments bench chaos silo clean env bom lock

help:  ## Lists the targets. `.venv/bin/noniid` lists the verbs that they call.
	@awk -F ': .*## |:  ## ' '/^[a-z$$][^=]*:.*  ## / { sub(/^[$$].*/, "paper-<name>", $$1); printf "%-14s %s\n", $$1, $$2 }' Makefile

repro: env  ## Runs the out-of-date stages of the experiment in params.yaml, prints the table and where to look next.
	@python -m fedml_noniid run

check: env  ## Checks format, lint, types and sizes.
	@ruff format --check .
	@ruff check .
	@mypy
	@python -m tools.sizes

# One thread per process: processes with more threads than cores slow each other down.
test: env  ## Runs all tests but the slow ones and those of research, or those of TESTS, with one process per core.
	@OMP_NUM_THREADS=1 pytest -m "not slow" -n auto --dist worksteal $(TESTS)

test-research: env  ## Runs the tests of research but the slow ones.
	@OMP_NUM_THREADS=1 pytest -m "not slow" -n auto --dist worksteal tests/research

test-slow: env  ## Runs the slow tests: processes, whole pipelines, whole walks over recipes, real data.
	@pytest -m slow

# The environment is made anew for another interpreter and for another pyproject.toml.
test-core: env  ## Runs the tests of core, data, models and API in the base package alone, with CORE_PYTHON.
	@$(CORE_STATE) | cmp -s - "$(CORE_VENV)/installed.txt" || { \
	  echo "Setting up $(CORE_VENV)"; \
	  uv venv --quiet --clear --python "$$($(CORE_PYTHON) -c 'import sys; print(sys.executable)')" "$(CORE_VENV)"; \
	  uv pip install --quiet --python "$(CORE_VENV)/bin/python" --editable . $(TORCH) $(CORE_DEV); \
	  $(CORE_STATE) > "$(CORE_VENV)/installed.txt"; \
	}
	@OMP_NUM_THREADS=1 "$(CORE_VENV)/bin/python" -m pytest -m "not slow" -n auto --dist worksteal $(CORE_TESTS)

# The environment of a silo: nothing of the pipeline.
test-silo: env  ## Runs three silos in an environment of [silo] alone, with FedML 0.9.6.
	@uv venv --quiet --clear --python "$(VENV)/bin/python" "$(SILO_VENV)"
	@uv pip install --quiet --python "$(SILO_VENV)/bin/python" --editable '.[silo]' fedml==0.9.6 'click<8.2' $(TORCH)
	@NONIID_SILO_PYTHON="$(SILO_VENV)/bin/python" pytest -m slow tests/deploy/test_light.py

format: env  ## Formats all files, and repairs what ruff can.
	@ruff format .
	@ruff check --fix .

docs: env  ## Builds the documentation into site/; a broken link is an error.
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict

ui: env  ## Serves MLflow's pages and prints the link to a prepared comparison.
	@python -m fedml_noniid ui

experiments: env  ## Shows DVC's experiments: what changed, and the accuracy of the best recipe.
	@dvc exp show --only-changed --drop '.*json:|Created|Executor|(data|plan)/|fedml_noniid|pipelines|plugins|partitions|runs|evaluation'

# PFL=/path/python, FLOWER=, FEDLAB= and BLAZEFL= name interpreters that have these simulators. Short: BENCH="--quick --only mlp".
bench: env  ## Compares our engines with a bare PyTorch loop and other simulators; writes docs/results/bench.*.
	@python -m benchmarks bench $(BENCH)

chaos: env  ## Kills processes of 70 cross-silo runs; compares weights, audit logs, ledgers; writes docs/results/chaos.*.
	@python -m benchmarks chaos --write

papers: env  ## Makes all tables and figures of the five papers, one paper at a time, at SIZE (smoke, small, paper).
	@$(MAKE) --no-print-directory --keep-going $(PAPER_TARGETS)

$(PAPER_TARGETS): paper-%: env  ## Makes those of one paper, at SIZE. research/ is a DVC project of its own.
	@cd research && dvc repro paper@$*-$(SIZE)

table figure: env  ## Makes one table or figure, ID, at SIZE, with the studies that it needs.
	@python -m research papers build "$(ID)" --size $(SIZE)

claims: env  ## Tests the papers' claims at SIZE (smoke, small): held, not held or undecided.
	@python -m research claims --size $(SIZE)

# Pictures are left out: their bytes depend on fonts.
judge: env  ## Judges the claims from the committed numbers and compares the page with the committed one, to the byte.
	@python -m research claims --size small --no-run
	@for file in research/built/claims/small/claims*; do \
	  [[ $$file = *.png ]] || cmp "$$file" "docs/results/$${file##*/}"; \
	done
	@echo "The page and its tables are the committed ones."

archive:  ## Packs the last commit into dist/, for a repository with DOIs. `make judge` runs in it too.
	@mkdir -p dist
	@name="fedml-noniid-$$(git rev-parse --short=12 HEAD)"; \
	  git archive --format=tar.gz --prefix="$$name/" --output="dist/$$name.tar.gz" HEAD; \
	  echo "dist/$$name.tar.gz"

silo: env  ## Runs RECIPE with FedML cross-silo: a server and SILOS silos as processes on this machine.
	@python -m fedml_noniid deploy loopback --recipe "$(RECIPE)" --silos $(SILOS)

clean:  ## Removes the pipeline's outputs and DVC's copies of them. MLflow's runs, raw data and the environment stay.
	@rm -rf plan partitions runs evaluation report deploy/{result.json,stage,loopback} .chaos .items .resume .dvc/cache .dvc/tmp
	@rm -rf research/.dvc/cache research/.dvc/tmp research/dvc.lock research/built
	@rm -rf data/*.safetensors data/papers

# The copy of the lock is written last, so an interrupted installation starts again.
env:  ## Makes the environment in .venv, if it is not that of requirements.lock.
	@cmp -s requirements.lock "$(VENV)/installed.lock" || { \
	  echo "Setting up $(VENV): some minutes and 6 GB"; \
	  $(PYTHON) -m venv "$(VENV)"; \
	  python -m pip install --quiet --disable-pip-version-check "$(UV)"; \
	  uv pip install --quiet --python "$(VENV)/bin/python" -r requirements.lock; \
	  uv pip install --quiet --python "$(VENV)/bin/python" --no-deps --no-build-isolation -e .; \
	  cp requirements.lock "$(VENV)/installed.lock"; \
	}

bom: env  ## Writes bom.cdx.json: a bill of materials in CycloneDX's form, from requirements.lock.
	@PYTHONWARNINGS=ignore uv tool run --quiet --from "$(CYCLONEDX)" cyclonedx-py requirements requirements.lock \
	  --pyproject pyproject.toml --output-reproducible --output-file bom.cdx.json

lock: env  ## Resolves all extras of pyproject.toml again and writes requirements.lock.
	@uv pip compile --quiet --no-annotate --no-header --python-version 3.11 --upgrade --all-extras \
	  --constraint <(printf '%s\n' $(TORCH)) pyproject.toml -o requirements.lock
	@sed -i '1i # Made by `make lock` from pyproject.toml. Every package, direct or not, at the version that was tested.' requirements.lock
