# Targets for users and maintainers of the tour. `make` prints them.
#
# PYTHON chooses the interpreter that .venv is made with, for instance
# `make test PYTHON=python3.12`.
PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13
RUNS ?= 3
PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Rules of ty that are defeated by Kauldron's configs, which pose as what they
# record, by shapes as annotations, and by modules that are imported later.
MAGIC := import-not-found incompatible-method-override invalid-argument-type \
  invalid-assignment invalid-type-form missing-attribute \
  missing-union-attribute no-matching-overload not-subscriptable \
  possibly-missing-submodule redundant-condition unresolved-reference \
  unsupported-operator
UV := $(shell command -v uv 2>/dev/null)

# What redirects an installation, or makes .venv another Python, is not for it.
unexport PYTHONHOME VIRTUAL_ENV CONDA_PREFIX UV_PYTHON UV_SYSTEM_PYTHON \
  UV_WORKING_DIR UV_PROJECT PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PYTHON \
  PIP_DRY_RUN
# What XLA has compiled is kept, and so is what the caller has chosen.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/$(VENV)/compiled

# A .venv of another Python is neither used nor replaced without being told.
version = $(shell $(1) -c 'import sys; print(*sys.version_info[:2], sep=".")')
ifneq ($(filter command environment,$(origin PYTHON)),)
ifneq ($(wildcard $(STAMP)),)
ifneq ($(MAKECMDGOALS),clean)
WANTED := $(call version,$(PYTHON))
ifeq ($(WANTED),)
$(error $(PYTHON) does not run)
endif
ifneq ($(WANTED),$(call version,$(BIN)/python))
$(error .venv has Python $(call version,$(BIN)/python): `make clean` first)
endif
endif
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help tour test quick bench soak proofs hosts lint smoke matrix \
  notebook lock clean

help:  ## Print the targets.
	@sed -n 's/^\([a-z]*\):.*##/\1:/p' $(MAKEFILE_LIST) | \
	  awk -F': *' '{ printf "make %-8s %s\n", $$1, $$2 }'

tour: $(STAMP)  ## Run the tour.
	@$(BIN)/python kauldron_tour.py

test: $(STAMP)  ## Run the tests.
	@$(BIN)/python -m pytest -n auto --dist worksteal tests

quick: $(STAMP)  ## Run each section, and the checks of text and README, once.
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" \
	  tests/test_sections.py tests/test_readme.py

bench: $(STAMP)  ## Measure what the tour takes, in all and part by part.
	@$(BIN)/python tests/bench.py --runs $(RUNS)

soak: $(STAMP)  ## Kill twenty trainings and see each of them resume.
	@SOAK_KILLS=20 $(BIN)/python -m pytest tests/test_crash.py -k killed -s

proofs: $(STAMP)  ## Say which checks of the tour no fault needs.
	@$(BIN)/python tests/proofs.py

hosts: $(STAMP)  ## Train in PROCESSES=2 processes, kill one, resume.
	@JAX_NUM_CPU_DEVICES=$(PROCESSES) $(BIN)/python -m pytest -v -s \
	  tests/test_processes.py

lint: $(STAMP)  ## Check style, types and spelling.
	@$(BIN)/ruff check .
	@$(BIN)/codespell --ignore-words-list modul,notin kauldron_tour.py README.md Makefile tests
	@$(BIN)/ty check --quiet --python $(VENV) --output-format concise \
	  $(addprefix --ignore ,$(MAGIC)) kauldron_tour.py tests/smoke.py

# The candidate reaches smoke.py as it was typed: `>`, `<`, quotes and `$` mean
# nothing to make or to the shell.
override CANDIDATE := $(value CANDIDATE)
export CANDIDATE

smoke: $(STAMP)  ## Say what CANDIDATE='jax==...' breaks or changes, and why.
	@$(BIN)/python -I tests/smoke.py

matrix:  ## Run the tour in a new environment on each Python of PYTHONS.
	@sh tests/matrix.sh $(PYTHONS)

notebook: $(STAMP)  ## Make kauldron_tour.ipynb, with its outputs.
	@$(BIN)/python tests/notebook.py

lock:  ## Compile requirements.txt again (needs uv).
	@command -v uv >/dev/null || { echo "make: lock needs uv." >&2; exit 2; }
	uv pip compile --quiet --universal --upgrade --generate-hashes \
	  --custom-compile-command "make lock" --output-file requirements.txt \
	  kauldron_tour.py tests/requirements.in

clean:  ## Remove what make and the tests have made.
	rm -rf $(VENV) .smoke .pytest_cache .ruff_cache \
	  kauldron_tour.ipynb __pycache__ tests/__pycache__

# Installs only when requirements.txt is newer than the last installation that
# could be used afterwards. What PYTHON says if it does not run is shown.
$(STAMP): requirements.txt
	@said=$$($(PYTHON) -c '' 2>&1) || { echo "make: $(PYTHON) cannot be" \
	  "run:" $$said >&2; exit 2; }
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or \
	  sys.exit("make: $(PYTHON) is Python %d.%d, not 3.11, 3.12 or 3.13: " \
	  "choose another with PYTHON=." % sys.version_info[:2])' || exit 2
ifdef UV
	uv venv --quiet --allow-existing \
	  --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
	uv pip install --python $(BIN)/python --compile-bytecode \
	  -r requirements.txt
else
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) lacks the venv module: install it" \
	    "(python3-venv on Debian) or uv." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
endif
	@$(BIN)/python -I -c 'import kauldron' || \
	  { echo "make: the packages are not in $(VENV):" \
	    "is there a setting that leads them elsewhere?" >&2; exit 2; }
	@touch $@
