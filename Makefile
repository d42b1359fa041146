# A fresh machine needs Python, git and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
# pip would compile 19,000 modules, of which most are never imported; Python compiles the rest on import.
PIP := $(BIN)/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long models integrations versions lint check docs bench bench-more clean
.NOTPARALLEL:

help:
	@echo 'make demo        train a ViT on two workers, evaluate it, and verify that one worker does the same'
	@echo 'make test        run all tests except the long ones'
	@echo 'make test-long   run the long tests, which CI leaves out: about ten minutes on two cores'
	@echo 'make models      verify models of transformers, diffusers, PEFT and PyG: about fifteen minutes on two cores'
	@echo 'make integrations  test the Trainers of transformers and Lightning, libraries of data, and programs for Ray, Hydra and submitit: about twelve minutes on two cores'
	@echo 'make versions    run the tests on every Python found, and with the lowest versions of dependencies: about fifteen minutes each on two cores'
	@echo 'make check       check style, types and imports (make lint), links and public names'
	@echo 'make docs        build the documentation site in docs/_build/html'
	@echo 'make bench       benchmark four jobs against seven other implementations: about twenty minutes on two cores'
	@echo 'make bench-more  run the remaining benchmarks (start, recovery, snapshots, scaling): about forty minutes'
	@echo 'make clean       remove .venv and all caches'

demo: .venv/ready-vit
	$(BIN)/python recipes/vit/demo.py

test: .venv/ready-dev
	$(BIN)/pytest --numprocesses 4 --dist worksteal

test-long: .venv/ready-dev
	$(BIN)/pytest --numprocesses 4 --dist worksteal -m long

models: .venv/ready-dev
	@$(PIP) --requirement tests/models/requirements.txt
	$(BIN)/python -m tests.models

integrations: .venv/ready-dev
	@$(PIP) --requirement tests/integrations/requirements.txt
	@$(PIP) --no-deps --requirement tests/integrations/no-deps.txt
	$(BIN)/pytest tests/integrations -m 'long or not long'

versions: .venv/ready-dev
	@$(PIP) 'uv>=0.8'
	$(BIN)/python -m tests.versions

lint: .venv/ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/vulture

check: lint
	$(BIN)/pytest tests/house

docs: .venv/ready-docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html
	@echo 'open docs/_build/html/index.html'

bench: .venv/ready-bench
	$(BIN)/python -m benchmarks.table --picture docs/benchmarks.svg

bench-more: .venv/ready-bench
	for part in floor start recovery surviving checks evaluation growth data snapshots modes record watching shards; do $(BIN)/python -m benchmarks.$$part; done

clean:
	rm -rf .venv build dist docs/_build runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/ready-EXTRA: samestep is installed with that extra of pyproject.toml.
.venv/ready-%: pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo 'installing samestep[$*] into .venv: about a minute'
	@$(PIP) --upgrade pip  # one of 2023 takes twice as long
	@$(PIP) --editable '.[$*]'
	@touch $@
