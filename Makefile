# The two commands of the README: `make learn` sets up and trains, `make test` sets up and tests. Both use one virtual environment.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
SIDE_BY_SIDE = --numprocesses 2 --dist loadfile --no-loadscope-reorder

unexport RLFLOW_SKIP_ENGINES # no engine is left out unseen

.PHONY: learn test quick long slice test-newest lint setup base-model

learn: $(VENV)/ready
	$(BIN)/rlflow run algorithms/ppo.py

test: $(VENV)/ready-to-test
	$(BIN)/python -m pytest --tier test $(SIDE_BY_SIDE)

quick: $(VENV)/ready-to-test
	$(BIN)/python -m pytest --tier quick $(SIDE_BY_SIDE)

long: $(VENV)/ready-to-test
	$(BIN)/python -m pytest --tier long $(SIDE_BY_SIDE)

# A part of the long tier, as SLICE=K/N names it: `make slice SLICE=0/4`.
slice: $(VENV)/ready-to-test
	$(BIN)/python -m pytest --tier long --slice $(SLICE) $(SIDE_BY_SIDE)

# With the newest releases, beyond the bounds in pyproject.toml, in an environment of its own. vLLM is left out.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python tests/newest.py
	.venv-newest/bin/python tests/cluster/submit/install.py
	RLFLOW_SKIP_ENGINES=1 .venv-newest/bin/python -m pytest --tier test $(SIDE_BY_SIDE)

lint: $(VENV)/ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

setup: $(VENV)/ready-to-test

# The packaged model, made again from nothing: about four minutes of one core on two cores.
base-model: $(VENV)/ready
	$(BIN)/python -m rlflow.benchmarks.arithmetic rlflow/data/tasks

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[tasks]'
	touch $@

$(VENV)/ready-to-test: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --editable '.[tasks,dev]'
	$(BIN)/python -m rlflow.backends.vllm.install
	$(BIN)/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	$(BIN)/python tests/cluster/submit/install.py
	touch $@
