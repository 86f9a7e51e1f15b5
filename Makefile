# make pipeline   everything: environment, data set, training, INT8, simulated latency, gate, report
# make test       the same environment, then the tests
# make ui         MLflow and Prefect in the browser, on loopback

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# dvc.yaml calls plain `python`: the environment's one.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# No library of the stack reports usage anywhere (pipeline/telemetry.py sets the same for python entry points).
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export GX_ANALYTICS_ENABLED := false

.PHONY: pipeline test lint ui lock clean

pipeline: $(VENV)/.installed
	dvc repro
	@python -m pipeline.cli summary

test: $(VENV)/.installed
	python -m pytest

lint: $(VENV)/.installed
	ruff check pipeline flows tests benchmarks
	mypy

ui: $(VENV)/.installed
	python -m flows.ui

# The lock holds every package with its version, so pip has nothing to resolve.
$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3,11) <= sys.version_info < (3,13) else "bevj6 needs Python 3.11 or 3.12, not " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Resolve pyproject.toml in an environment of its own, so that nothing installed by hand gets into the lock.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --upgrade setuptools
	.venv-lock/bin/python -m pip install --quiet -e '.[dev]'
	(echo '# Every package of the environment with its version; `make lock` writes it anew from pyproject.toml.'; \
	 .venv-lock/bin/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+cpu$$//') > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf data/nuscenes data/index data/maps data/maps_vectorized data/dataset.json models build reports
