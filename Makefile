PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .oldest/.installed
DRIVER := .venv/.browser
# The lowest supported transformers, beside the newest that the environment holds.
OLDEST_TRANSFORMERS := 5.10.1

.PHONY: setup demo test test-slow test-oldest test-browser check notebooks pictures docs bench gpu lint

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@echo "installing into .venv: some minutes, most of them torch"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[plots,media,parquet,dev]'
	touch $@

$(OLDEST): $(INSTALLED)
	rm -rf .oldest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target .oldest transformers==$(OLDEST_TRANSFORMERS)
	touch $@

demo: setup
	$(BIN)/lens-gemma4 demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two files of tests at a time, one thread each: fixtures of a file are made once, and no two tests of it meet.
WORKERS := -n 2 --dist loadfile

test: lint
	$(BIN)/python -m pytest $(WORKERS)
	$(MAKE) test-oldest

test-oldest: $(OLDEST)
	PYTHONPATH=.oldest $(BIN)/python -m pytest $(WORKERS) tests/test_parity.py tests/test_media_parity.py tests/test_check.py tests/test_config.py

test-slow: $(OLDEST)
	$(BIN)/python -m pytest $(WORKERS) -m slow
	PYTHONPATH=.oldest $(BIN)/python -m pytest $(WORKERS) -m slow tests/test_parity.py tests/test_media_parity.py

# The report's page in a Chromium that is there (BROWSER=/path/to/one; by default Debian's).
test-browser: $(DRIVER)
	$(BIN)/python -m pytest -m browser -s tests/browser

$(DRIVER): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[browser]'
	touch $@

check: setup
	$(BIN)/lens-gemma4 check tiny

notebooks: setup
	$(BIN)/python notebooks/execute.py notebooks/*.ipynb

# Every kind of figure over a picture, as pages and, by a Chromium or Chrome, as PNG files to look at.
pictures: setup
	$(BIN)/python notebooks/pictures.py -o pictures

# What pages print and what is made from something else, as it is today; then the site with the API reference, docs/_build/index.html.
docs: setup
	$(BIN)/python docs/generated.py
	$(BIN)/python docs/snippets.py
	$(BIN)/python docs/build_api.py

# Peers live in environments of their own; benchmarks/sweep.py says how they are made.
PEERS = $(if $(TL_PYTHON),--tl-python $(TL_PYTHON)) $(if $(NNSIGHT_PYTHON),--nnsight-python $(NNSIGHT_PYTHON))

bench: setup
	$(BIN)/python benchmarks/loading.py -o benchmarks/results/loading.txt
	$(BIN)/python benchmarks/forward.py $(PEERS) -o benchmarks/results/forward.txt
	$(BIN)/python benchmarks/decode.py $(PEERS) -o benchmarks/results/decode.txt
	$(BIN)/python benchmarks/lens.py $(if $(NNTERP_PYTHON),--nnterp-python $(NNTERP_PYTHON)) -o benchmarks/results/lens.txt
	$(BIN)/python benchmarks/sweep.py $(PEERS) --tokens 32 -o benchmarks/results/sweep.txt
	$(BIN)/python benchmarks/long.py -o benchmarks/results/long.txt
	$(BIN)/python benchmarks/sweep.py $(PEERS) --tokens 128 512 --rounds 1 --sample 16 --grow -o benchmarks/results/sweep_long.txt

# A machine with a card often has its own python with torch and no network: without a .venv that one is used.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu:
	$(GPU_PYTHON) -m pytest --noconftest -m gpu -W default tests/gpu
	$(GPU_PYTHON) benchmarks/gpu.py
