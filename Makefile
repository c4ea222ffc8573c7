# One command for each thing; `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
ALIVE := $(PYTHON) .ci/alive 15
LAYERS := dshistory capture catalog native
SCRIPTS := examples benchmarks tests
NATIVE_SOURCES := $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name '*.h' 2>/dev/null)
BUILD_INPUTS := pyproject.toml CMakeLists.txt native/CMakeLists.txt constraints.txt $(NATIVE_SOURCES)

# DeepSpeed compiles its extensions on first use. In the cache of the whole account, environments would rebuild each
# other's, and a build that was killed leaves a lock there for which everybody waits; here `setup` removes it.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# Each stamp is written last, so a step that failed half-way is done again from its start.
$(VENV)/.made: .ci/system-packages
	@.ci/system-packages $(PYTHON)
	@$(ALIVE) 'making $(VENV)' $(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch goes first and pinned: nothing that is installed later can pull another build of it.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	@$(ALIVE) 'installing torch, the largest of all' $(PIP) install -c constraints.txt torch
	@touch $@

# The build tools live in the environment, so that a rebuild is incremental and needs no network.
$(VENV)/.tools: $(VENV)/.torch
	@$(ALIVE) 'installing the build tools' $(PIP) install -c constraints.txt setuptools wheel scikit-build-core nanobind ninja
	@touch $@

# An editable install keeps a list of the modules there are: when one is added, moved or removed, the list is made anew.
.PHONY: FORCE
$(VENV)/.modules: FORCE | $(VENV)/.tools
	@find $(LAYERS) -name '*.py' | sort > $@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(VENV)/.installed: $(VENV)/.tools $(VENV)/.modules $(BUILD_INPUTS)
	@$(ALIVE) 'building DSHistory and installing what it uses' $(PIP) install -c constraints.txt --no-build-isolation -e '.[deepspeed,notebook,dev]'
	@touch $@

$(VENV)/.browser: pyproject.toml constraints.txt | $(VENV)/.installed
	@$(ALIVE) 'installing what the test in a browser uses' $(PIP) install -c constraints.txt --no-build-isolation -e '.[browser]'
	@touch $@

.PHONY: setup
setup: $(VENV)/.installed  ## make .venv, install everything, build the extension
	@pkg-config --exists liburing libxxhash libzstd || .ci/system-packages $(PYTHON)
	@mkdir -p $(TORCH_EXTENSIONS_DIR) && find $(TORCH_EXTENSIONS_DIR) -name lock -delete
	@echo 'DSHistory is set up in $(VENV)'

.PHONY: demo
demo: setup  ## train a small GPT with its history captured, then look at that history
	$(BIN)/python examples/demo.py

.PHONY: notebooks
notebooks: setup  ## train the small models that the other notebooks look at, and run these
	$(BIN)/python examples/notebooks.py

# A file's tests stay in one process, for they share what is dear to make: ranks, histories, a kernel.
.PHONY: test
test: setup  ## run every test but long ones and those in a browser, and a sample of the exhaustive ones
	$(BIN)/python -m pytest -q -rs -n logical --maxprocesses 4 --dist loadfile -m 'not exhaustive and not long'

# What one runs while working. Left out are process groups, kernels, compilers, whole trainings and other slow tests.
.PHONY: test-fast
test-fast: setup  ## run the tests that take no time (under 3 minutes on 2 cores)
	$(BIN)/python -m pytest -q -rs -n logical --maxprocesses 4 --dist loadfile -m 'not slow and not exhaustive and not long' \
	  --ignore tests/multi_rank --ignore tests/end_to_end --ignore tests/gpu

# Chromium is a system package of 300 MB that nothing else needs, so these tests stay out of `test`.
.PHONY: test-browser
test-browser: setup $(VENV)/.browser  ## run the notebook and the explorer in a real JupyterLab and a headless Chromium
	@.ci/system-packages $(PYTHON) browser
	$(BIN)/python -m pytest -q -rs --tb=short tests/browser

.PHONY: test-benchmarks
test-benchmarks: setup  ## run every benchmark at a tiny size
	$(BIN)/python -m pytest -q -rs tests/end_to_end/test_benchmarks.py

# Each adds a variant to what `make test` has tried, and takes long: engines, kills, replays, sanitizers, compilers.
.PHONY: test-long
test-long: setup  ## run the tests that `make test` leaves out because they take long
	$(BIN)/python -m pytest -q -rs -n logical --maxprocesses 4 --dist loadfile -m long

.PHONY: test-install
test-install: setup  ## do what a stranger does: install the wheel, run the README, the notebooks and a short demo
	$(BIN)/python -m pytest -q -rs -n logical --maxprocesses 2 --dist loadfile \
	  tests/project/test_packaging.py tests/project/test_readme.py tests/end_to_end/test_demo.py tests/end_to_end/test_notebooks.py

# Each proof prints what it has tried and what it found, and takes minutes. `make test` runs a sample of each.
PROOFS := prove-crashes prove-kills prove-bytes prove-faults prove-retention fuzz test-sanitize soak

.PHONY: prove
prove: setup  ## all proofs in turn, each into build/prove, and then a summary (some hours on 2 cores)
	@mkdir -p build/prove
	@failed=; for proof in $(PROOFS); do \
	  echo "$$proof: see build/prove/$$proof.txt"; \
	  $(MAKE) --no-print-directory $$proof > build/prove/$$proof.txt 2>&1 || failed="$$failed $$proof"; \
	done; \
	for proof in $(PROOFS); do echo "== $$proof"; tail -n 12 build/prove/$$proof.txt; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi; echo 'all proofs hold'

# A program finds what is in its own room, and what several rooms use.
PROOF := PYTHONPATH=tests/proofs:tests/support OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/proofs

.PHONY: prove-crashes
prove-crashes: setup  ## open every state of three trainings that a power cut may leave
	$(PROOF)/crashes/prove_crashes.py

.PHONY: prove-kills
prove-kills: setup  ## kill two ranks before each of their file system calls, and at random times
	$(PROOF)/kills/prove_kills.py

.PHONY: prove-bytes
prove-bytes: setup  ## flip every byte of a small history, and random bytes of a larger one
	$(PROOF)/bytes/prove_bytes.py

.PHONY: prove-retention
prove-retention: setup  ## ten thousand random lives of a history, with removals and compactions cut off anywhere
	$(PROOF)/retention/prove_retention.py

.PHONY: fuzz
fuzz: setup  ## a million hostile inputs for every reader of a history
	$(PROOF)/fuzz/fuzz.py

.PHONY: test-sanitize
test-sanitize: setup  ## build the native code with sanitizers, and run its tests in C++ and in Python
	PATH="$(abspath $(BIN)):$$PATH" $(PROOF)/sanitize/sanitize.py

.PHONY: prove-faults
prove-faults: setup  ## fail every call of a captured training once, with every error
	@mkdir -p build
	EXHAUSTIVE=1 $(BIN)/python -m pytest -q -n logical --figures build/faults.json tests/proofs/faults/test_every_call_fails.py
	@cat build/faults.json

.PHONY: soak
soak: setup  ## train, read and verify at once for ten minutes (SOAK_S=600), and kill at random
	@mkdir -p build
	SOAK_S=$${SOAK_S:-600} $(BIN)/python -m pytest -q -n 0 --figures build/soak.json tests/proofs/soak/test_soak.py
	@cat build/soak.json

.PHONY: lint
lint: setup  ## ruff, mypy, the extension's stub, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy --strict $(LAYERS)
	$(BIN)/python -m pytest -q tests/native/test_stub.py
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)

.PHONY: bench
bench: setup  ## measure against the other ways to save, into benchmarks/results
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[bench]'
	$(BIN)/python -m benchmarks

# Orbax brings JAX and wants other versions than the project, so it has an environment of its own; git sees none of it.
ORBAX := .venv-orbax
.PHONY: bench-orbax
bench-orbax:  ## also measure Orbax from now on (its own environment, 700 MB)
	$(PYTHON) -m venv --clear $(ORBAX)
	@echo '*' > $(ORBAX)/.gitignore
	$(ORBAX)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt orbax-checkpoint jax

# ZipNN asks for libraries that the project has already, and for nothing else: a folder is enough.
ZIPNN := .zipnn
.PHONY: bench-zipnn
bench-zipnn: setup  ## also measure ZipNN from now on (a folder of its own, 1 MB)
	$(PIP) install --no-deps --upgrade --target $(ZIPNN) zipnn==0.5.4
	@echo '*' > $(ZIPNN)/.gitignore

.PHONY: coverage-table
coverage-table: setup  ## write docs/coverage.md from the tests
	$(BIN)/python tests/project/coverage_table.py

.PHONY: guarantees
guarantees: setup  ## run the tests that guard the promises, and write docs/guarantees.md with their figures
	@mkdir -p build
	$(BIN)/python -m pytest -q -rs -n logical --maxprocesses 4 --dist loadfile -m guards --figures build/figures.json
	$(BIN)/python tests/project/guarantees.py build/figures.json

.PHONY: rooms
rooms: setup  ## write the tree of rooms in CONTRIBUTING.md from the code
	PYTHONPATH=tests/support $(BIN)/python tests/project/architecture.py

.PHONY: picture
picture: test-browser  ## make the README's pictures anew, of the executed notebooks and of the explorer under test
	$(BIN)/python examples/picture.py demo-output/quickstart.ipynb docs/images/quickstart.png 1220
	$(BIN)/python examples/picture.py demo-output/loss_jumped.ipynb docs/images/loss_jumped.png 590
	cp build/browser/explorer.png docs/images/explorer.png

.PHONY: clean
clean:  ## remove everything that is built or written by these commands
	rm -rf $(VENV) $(ORBAX) $(ZIPNN) build dist demo-output benchmarks/scratch
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
