# A fresh machine needs Python, git and make; everything else goes into VENV.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip would compile 19,000 modules, of which most are never imported; Python compiles the rest on import.
PIP := .ci/with-progress $(VENV) $(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt
# `pip install .` in VENV replaces the editable installation: samestep is then an old copy, and the recipes are gone.
IF_REPLACED := $(if $(wildcard $(VENV)/lib/python*/site-packages/*samestep.pth),,again)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-core test-long test-cuda-build test-gpu models integrations versions lint check docs docs-versions pictures bench bench-more again clean
.NOTPARALLEL:

help:
	@echo 'make demo        train a ViT on two workers, evaluate it, and verify that one worker does the same'
	@echo 'make test        run all tests except the long ones'
	@echo 'make test-core   run the tests of what makes a step and keeps it, for changes there'
	@echo 'make test-long   run the long tests, which CI leaves out: about twenty minutes on two cores'
	@echo 'make test-cuda-build  run the tests of GPUs, on simulated ones, with the default build of PyTorch: 6 GB'
	@echo 'make test-gpu    prove on one NVIDIA GPU that runs have the same bits: about five minutes'
	@echo 'make models      verify models of transformers, diffusers, PEFT and PyG: about fifteen minutes on two cores'
	@echo 'make integrations  test the Trainers of transformers and Lightning, libraries of data, and programs for Ray, Hydra and submitit: about twelve minutes on two cores'
	@echo 'make versions    run the tests on every Python found, and with the lowest versions of dependencies: about fifteen minutes each on two cores'
	@echo 'make check       check style, types and imports (make lint), links and public names'
	@echo 'make docs        build the documentation site in docs/_build/html'
	@echo 'make docs-versions  build the site of each release and of main into docs/_build/versions'
	@echo 'make pictures    train the runs in docs/screenshots and take their pictures: about five minutes on two cores'
	@echo 'make bench       benchmark four jobs against seven other implementations: about twenty minutes on two cores'
	@echo 'make bench-more  run the remaining benchmarks (start, recovery, snapshots, scaling): about forty minutes'
	@echo 'make clean       remove .venv and all caches'

demo: $(VENV)/ready-vit
	$(BIN)/python recipes/vit/demo.py

# A third of the time of the tests is waits for what they start, so two cores serve six processes.
test: $(VENV)/ready-dev
	$(BIN)/pytest --numprocesses 4 --dist worksteal

# The folders of src/samestep that make a step, keep it and watch it, in the order of
# docs/architecture.md.
CORE := tests/cluster tests/record tests/data tests/comm tests/step tests/snapshot tests/plugins tests/guards tests/sharded tests/run $(wildcard tests/test_*.py)
test-core: $(VENV)/ready-dev
	$(BIN)/pytest --numprocesses 4 --dist worksteal $(CORE)

test-long: $(VENV)/ready-dev
	$(BIN)/pytest --numprocesses 4 --dist worksteal --hypothesis-profile long -m 'long or hypothesis'

# The default build on Linux, which constraints of pip and local folders may replace by another one.
test-cuda-build:
	env -u PIP_CONSTRAINT -u PIP_EXTRA_INDEX_URL -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(MAKE) VENV=.venv-cuda-build .venv-cuda-build/ready-dev
	.venv-cuda-build/bin/python -c 'import torch; assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"'
	.venv-cuda-build/bin/pytest --numprocesses 4 --dist worksteal tests/gpu

# Other tests see no GPU.
test-gpu: $(VENV)/ready-dev
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/pytest --numprocesses 3 --dist worksteal -m gpu tests/real_gpu

models: $(VENV)/ready-dev
	@$(PIP) --requirement tests/models/requirements.txt
	$(BIN)/python -m tests.models

integrations: $(VENV)/ready-dev
	@$(PIP) --requirement tests/integrations/requirements.txt
	@$(PIP) --no-deps --requirement tests/integrations/no-deps.txt
	$(BIN)/pytest tests/integrations -m 'long or not long'

versions: $(VENV)/ready-dev
	@$(PIP) 'uv>=0.8'
	$(BIN)/python -m tests.versions

lint: $(VENV)/ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/vulture

check: lint
	$(BIN)/pytest tests/house

docs: $(VENV)/ready-docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html
	@echo 'open docs/_build/html/index.html'

docs-versions: $(VENV)/ready-docs
	$(BIN)/python -m tests.docs.versions docs/_build/versions

pictures: $(VENV)/ready-dev
	$(BIN)/python -m tests.watch.browser.screenshots docs/screenshots

bench: $(VENV)/ready-bench
	$(BIN)/python -m benchmarks.table --picture docs/benchmarks.svg

bench-more: $(VENV)/ready-bench
	for part in floor start recovery surviving checks evaluation growth data snapshots modes record watching shards; do $(BIN)/python -m benchmarks.$$part; done

again:

clean:
	rm -rf $(VENV) .venv-cuda-build build dist docs/_build runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# VENV/ready-EXTRA: samestep is installed with that extra of pyproject.toml.
$(VENV)/ready-%: pyproject.toml constraints.txt $(IF_REPLACED)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'installing samestep[$*] with PyTorch into $(VENV): 2 GB in a minute, or 6 GB in three with CUDA, the default on Linux'
	@$(PIP) --upgrade pip  # one of 2023 takes twice as long
	@$(PIP) --editable '.[$*]'
	@touch $@
