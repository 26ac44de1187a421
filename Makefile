# Targets for users and maintainers of the tour. `make` prints them.
#
# PYTHON chooses the interpreter that .venv is made with, for instance
# `make test PYTHON=python3.12`.
PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13
RUNS ?= 3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MYPY := --check-untyped-defs --ignore-missing-imports --follow-imports=skip \
  --no-error-summary --disable-error-code name-defined \
  --disable-error-code var-annotated --disable-error-code method-assign
UV := $(shell command -v uv 2>/dev/null)

# A .venv of another Python is neither used nor replaced without being told.
version = $(shell $(1) -c 'import sys; print(*sys.version_info[:2], sep=".")')
ifneq ($(filter command environment,$(origin PYTHON)),)
ifneq ($(wildcard $(STAMP)),)
ifneq ($(MAKECMDGOALS),clean)
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
$(error .venv has Python $(call version,$(BIN)/python): `make clean` first)
endif
endif
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help tour test quick bench soak lint smoke matrix notebook lock clean

help:  ## Print the targets.
	@sed -n 's/^\([a-z]*\):.*##/\1:/p' $(MAKEFILE_LIST) | \
	  awk -F': *' '{ printf "make %-8s %s\n", $$1, $$2 }'

tour: $(STAMP)  ## Run the tour.
	@$(BIN)/python kauldron_tour.py

test: $(STAMP)  ## Run the tests.
	@$(BIN)/python -m pytest -n auto --dist loadfile tests

quick: $(STAMP)  ## Run each section and the checks of style and README, once.
	@$(BIN)/python -m pytest -m "not slow" \
	  tests/test_sections.py tests/test_style.py tests/test_readme.py

bench: $(STAMP)  ## Measure what the tour takes, in all and part by part.
	@$(BIN)/python tests/bench.py --runs $(RUNS)

soak: $(STAMP)  ## Kill twenty trainings and see each of them resume.
	@SOAK_KILLS=20 $(BIN)/python -m pytest tests/test_crash.py -k killed -s

lint: $(STAMP)  ## Check style, types of the plumbing, and spelling.
	@$(BIN)/ruff check .
	@$(BIN)/codespell kauldron_tour.py README.md Makefile tests
	@mkdir -p .mypy_cache
	@sed -e '/^# %% 1\. /,/^# %% Part II:/d' \
	  -e '/^# %% The task of/,/^# %% The report/d' \
	  kauldron_tour.py >.mypy_cache/plumbing.py
	@$(BIN)/mypy $(MYPY) .mypy_cache/plumbing.py tests/smoke.py

smoke: $(STAMP)  ## Say what CANDIDATE='jax==...' breaks or changes.
	@$(BIN)/python tests/smoke.py $(CANDIDATE)

matrix:  ## Run the tour in a new environment on each Python of PYTHONS.
	@sh tests/matrix.sh $(PYTHONS)

notebook: $(STAMP)  ## Make kauldron_tour.ipynb, with its outputs.
	@$(BIN)/jupytext --quiet --to ipynb kauldron_tour.py
	@$(BIN)/jupyter-execute --inplace kauldron_tour.ipynb

lock:  ## Compile requirements.txt again (needs uv).
	@command -v uv >/dev/null || { echo "make: lock needs uv." >&2; exit 2; }
	uv pip compile --quiet --universal --upgrade --generate-hashes \
	  --custom-compile-command "make lock" --output-file requirements.txt \
	  kauldron_tour.py tests/requirements.in

clean:  ## Remove what make and the tests have made.
	rm -rf $(VENV) .smoke .pytest_cache .ruff_cache .mypy_cache \
	  kauldron_tour.ipynb __pycache__ tests/__pycache__

# Installs only when requirements.txt is newer than the last installation.
$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  2>/dev/null || \
	  { echo "make: $(PYTHON) is not Python 3.11, 3.12 or 3.13:" \
	    "choose another with PYTHON=." >&2; exit 2; }
ifdef UV
	uv venv --quiet --allow-existing \
	  --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
	VIRTUAL_ENV=$(VENV) uv pip install --compile-bytecode -r requirements.txt
else
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make: $(PYTHON) lacks the venv module: install it" \
	    "(python3-venv on Debian) or uv." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
endif
	@touch $@
