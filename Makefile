# Everything here works on a machine that has Python 3.11, 3.12 or 3.13, make and the package registries.
PYTHONS := 3.11 3.12 3.13
BOOTSTRAP := .cache/bootstrap
UV := $(BOOTSTRAP)/bin/uv
BIN := .venv/bin
ENVIRONMENT := .venv/.ready
NUMBER := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
# The environment keeps its interpreter until PYTHON names another. A found one is started: pyenv's shims may start nothing.
ifndef PYTHON
PYTHON := $(or $(wildcard $(BIN)/python),$(shell for each in python3 $(PYTHONS:%=python%); do \
  echo $(PYTHONS) | grep -qwF "$$($$each $(NUMBER) 2>/dev/null || echo none)" && command -v $$each && break; done))
endif
PYTHON_VERSION := $(if $(PYTHON),$(shell $(PYTHON) $(NUMBER) 2>/dev/null))
LOCKS := locks/$(or $(filter $(PYTHONS),$(PYTHON_VERSION)),$(firstword $(PYTHONS)))
# .pyc files halve the start time of every role; never inherit their prohibition.
unexport PYTHONDONTWRITEBYTECODE
export TURNLOG_FEEDER_DRAWS := $(STEPS)
export TURNLOG_ENGINE_COUNT := $(ENGINES)
ifeq ($(STEPS),)
unexport TURNLOG_FEEDER_DRAWS
endif
ifeq ($(ENGINES),)
unexport TURNLOG_ENGINE_COUNT
endif
ifneq ($(ENGINE),)
export TURNLOG_ENGINE_KIND := $(ENGINE)
endif
VLLM_ENVIRONMENT := .venv-vllm/.ready

# A file is one worker's, so that its servers and fixtures are made once; those that wait for servers come first, and what
# computes fills the gaps that they leave.
comma := ,
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -1)
# Three keep two cores busy, since most of what integration tests do is wait. With four, runs that start at the same moment
# take each other so much time on a slow machine that their servers count as dead.
WORKERS ?= 3
IN_WORKERS := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15

.PHONY: supported of-another-version help demo test test-long test-fresh test-compose test-kube test-secured screenshots templates lint check bench chaos soak learning mutants images sbom schemas docs lock gpu gpu-environment clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(ENVIRONMENT) $(if $(filter vllm,$(ENGINE)),$(VLLM_ENVIRONMENT))  ## the whole loop on this machine (STEPS=5 for the impatient, ENGINES=2, ENGINE=vllm, TRAINER=trl)
	@$(BIN)/turnlog demo $(if $(TRAINER),--trainer examples/$(TRAINER)_trainer.py)

test: $(ENVIRONMENT)  ## every test: units, contracts, real servers, one small closed loop (TESTS=tests/unit, WORKERS=2)
	@$(BIN)/python -m pytest $(if $(TESTS),$(TESTS),$(IN_WORKERS))

test-long: $(ENVIRONMENT)  ## the tests that `make test` leaves out, and all property tests with 1,000 examples (hours)
	@TURNLOG_TEST_EXAMPLES=1000 $(BIN)/python -m pytest -m "long or hypothesis" $(IN_WORKERS)

test-fresh:  ## the same on a bare Debian as a user without a name (root only; needs debootstrap; FRESH_SUITE=trixie: Python 3.13)
	@tests/fresh.sh

test-compose: $(ENVIRONMENT)  ## images and compose on a container engine (docker; as root, docker.io from Debian will do)
	@$(BIN)/python -m pytest -s tests/deploy/test_compose.py

test-kube: $(ENVIRONMENT)  ## the chart on a real control plane and two nodes of this machine (root; Go, docker.io, CNI plugins, ipset)
	@$(BIN)/python -m pytest -s tests/deploy/test_kube.py

test-secured: $(ENVIRONMENT)  ## the whole contract of the log over SASL_SSL and mTLS, each ACL taken away (7 minutes)
	@TURNLOG_TEST_SESSIONS_S=31 $(BIN)/python -m pytest tests/secure tests/integration/test_secured_kafka.py

screenshots: $(ENVIRONMENT)  ## the pictures of docs/dashboard.md, taken by their test (Debian: chromium)
	@TURNLOG_WRITE_SCREENSHOTS=1 $(BIN)/python -m pytest -q tests/unit/consumers/test_dashboard_browser.py -k pictures

templates: $(ENVIRONMENT)  ## rewrite the table of chat templates in docs/harnesses.md, of the packages in locks/templates.txt
	@TURNLOG_WRITE_TEMPLATES=1 $(BIN)/python -m pytest -q -m long tests/integration/test_real_templates.py -k table

lint: $(ENVIRONMENT)  ## format, lint, types, import layers
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports

check: lint  ## make lint, then the unit tests
	@$(BIN)/python -m pytest -q tests/unit

bench: $(ENVIRONMENT)  ## measure the goals (ONLY=G1,T1 for some); one JSON line each on stdout and in docs/results
	@$(BIN)/python benchmarks/run.py --record $(if $(ONLY),--only $(ONLY))

chaos: $(ENVIRONMENT)  ## strike every role and server: kill, hang, zombie (ONLY=loader,broker; KILLS=20)
	@$(BIN)/python benchmarks/chaos/run.py --record $(if $(ONLY),--only $(ONLY)) $(if $(KILLS),--kills $(KILLS))

soak: $(ENVIRONMENT)  ## load that lasts: kills at random, does memory grow? (MINUTES=30, SEED=0; a page in runs/soak-TIME)
	@$(BIN)/python benchmarks/chaos/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

learning: $(ENVIRONMENT)  ## train every recipe with three seeds, and state what they came to (ONLY=calc:sync; SEEDS=1,2; OUT=runs/learning)
	@$(BIN)/python benchmarks/learning.py run $(if $(ONLY),--only $(ONLY)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(OUT),--out $(OUT))
	@$(BIN)/python benchmarks/learning.py page $(if $(OUT),--out $(OUT))

mutants: $(ENVIRONMENT)  ## mutate the fold: does a test notice? (SAMPLE=300, SEED=1; ONLY=core.books,core.fold.*)
	@$(BIN)/python tests/mutants.py $(if $(ONLY),--only '$(ONLY)') $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

IMAGES = processors,sandbox,agents,demo
IMAGE_PYTHON ?= 3.11
images:  ## container images turnlog/NAME (ONLY=processors,sandbox; IMAGE_PYTHON=3.13; CA=FILE of a proxy; trainer and engine take CUDA's wheels)
	@for name in $(subst $(comma), ,$(or $(ONLY),$(IMAGES))); do \
	  DOCKER_BUILDKIT=1 docker build --quiet --target $$name --tag turnlog/$$name:$(VERSION) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
	    --build-arg PYTHON=$(IMAGE_PYTHON) $(if $(CA),--secret id=ca$(comma)src=$(CA)) $(if $(BASE),--build-arg BASE=$(BASE)) \
	    --file infra/deploy/images/Dockerfile . >/dev/null || exit 1; \
	  docker image inspect --format '{{index .RepoTags 0}}  {{.Size}} bytes' turnlog/$$name:$(VERSION); \
	done

SBOM := .cache/sbom
LOCK_OF_agents := base
LOCK_OF_trainer := gpu
LOCK_OF_engine := gpu

sbom: $(UV)  ## the Python packages of each image with their hashes, as CycloneDX in build/sbom (ONLY=processors,sandbox)
	@$(call VENV,$(SBOM))
	@VIRTUAL_ENV=$(SBOM) $(UV) pip sync --quiet --require-hashes $(LOCKS)/sbom.lock
	@mkdir -p build/sbom
	@$(foreach name,$(subst $(comma), ,$(or $(ONLY),$(IMAGES) trainer engine)),$(SBOM)/bin/python -W ignore -m cyclonedx_py requirements \
	  --pyproject pyproject.toml --output-reproducible --no-validate --output-file build/sbom/$(name).cdx.json \
	  locks/$(IMAGE_PYTHON)/$(or $(LOCK_OF_$(name)),$(name)).lock && echo build/sbom/$(name).cdx.json &&) true

schemas: $(ENVIRONMENT)  ## rewrite schemas/avro from the event dataclasses
	@$(BIN)/python -m turnlog.schemas.avsc

docs: $(ENVIRONMENT)  ## rewrite the generated pages
	@$(BIN)/python docs/tools/catalogue_page.py > docs/events.md
	@$(BIN)/python docs/tools/settings_page.py > docs/settings.md
	@$(BIN)/python docs/tools/metrics_page.py > docs/metrics.md
	@$(BIN)/python docs/tools/fields_page.py > docs/fields.md
	@$(BIN)/python docs/tools/index_page.py > docs/index-schema.md
	@$(BIN)/python -m docs.tools.models_table
	@$(BIN)/python -m turnlog.asyncapi_page > docs/asyncapi.yaml
	@$(BIN)/python benchmarks/table.py --write
	@$(BIN)/python docs/tools/grafana.py infra/deploy/monitoring/dashboards
	@$(BIN)/python docs/tools/settings_page.py infra/deploy/helm/turnlog

supported:
	@test -n "$(filter $(PYTHONS),$(PYTHON_VERSION))" || { echo "turnlog needs one of Python $(PYTHONS), and PYTHON is" \
	  "'$(PYTHON)' $(PYTHON_VERSION): install one, or set PYTHON=/path/to/python3.13"; exit 2; }

$(UV): locks/uv.txt | supported
	@$(PYTHON) -m venv $(BOOTSTRAP)
	@$(BOOTSTRAP)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r locks/uv.txt
	@touch $(UV)

# A new environment where there is none of that version.
VENV = test "$$($(1)/bin/python $(NUMBER) 2>/dev/null)" = $(PYTHON_VERSION) || $(UV) venv --quiet --clear --python $(PYTHON) $(1)

ifneq ($(shell cat $(ENVIRONMENT) 2>/dev/null),$(PYTHON_VERSION))
$(ENVIRONMENT): of-another-version
of-another-version: ;
endif
$(ENVIRONMENT): $(UV) $(LOCKS)/all.lock pyproject.toml | supported
	@echo "environment: installing $$(grep -c == $(LOCKS)/all.lock) pinned packages into .venv (7.4 GB, a minute or two)" >&2
	@$(call VENV,.venv)
	@VIRTUAL_ENV=.venv $(UV) pip sync --quiet --require-hashes --compile-bytecode $(LOCKS)/all.lock
	@VIRTUAL_ENV=.venv $(UV) pip install --quiet --no-deps --no-build-isolation --editable .
	@echo $(PYTHON_VERSION) >$(ENVIRONMENT)

# For tests and demos of vLLM on a CPU; turnlog is there for its plugin alone, without its dependencies.
$(VLLM_ENVIRONMENT): $(UV) $(LOCKS)/vllm.lock | supported
	@echo "environment: installing $$(grep -c == $(LOCKS)/vllm.lock) pinned packages into .venv-vllm (6 GB, a minute or two)" >&2
	@$(call VENV,.venv-vllm)
	@VIRTUAL_ENV=.venv-vllm $(UV) pip sync --quiet --require-hashes --compile-bytecode $(LOCKS)/vllm.lock
	@VIRTUAL_ENV=.venv-vllm $(UV) pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(VLLM_ENVIRONMENT)

# From the source tree, by .venv-gpu if it is there, else by any python3 with torch and what the trainer imports.
gpu:  ## check and measure the trainer on this machine's GPU, in 10 minutes at most (GPU_MINUTES=5)
	@PYTHONPATH=src:$$PYTHONPATH $(firstword $(wildcard .venv-gpu/bin/python) python3) -m pytest -c /dev/null --rootdir tests/gpu --confcutdir tests/gpu -o markers=proves -p no:cacheprovider -rs -s tests/gpu

gpu-environment: $(UV)  ## an environment for a machine with an NVIDIA GPU, in .venv-gpu (docs/first-gpu.md)
	@$(call VENV,.venv-gpu)
	@VIRTUAL_ENV=.venv-gpu $(UV) pip sync --quiet --require-hashes --compile-bytecode $(LOCKS)/gpu-node.lock
	@VIRTUAL_ENV=.venv-gpu $(UV) pip install --quiet --no-deps --no-build-isolation --editable .

# One resolution of everything for each Python; the others are constrained by it. Those of later Pythons keep the pins of
# the first as far as they can. Only uv reads the dependency metadata of pyproject.toml (SGLang's CUDA-only kernels stand
# behind an extra there), and only from the repository root.
RESOLVE = $(UV) pip compile --quiet --generate-hashes --no-emit-index-url --no-header \
  --python-version $* --python-platform x86_64-manylinux_2_34
COMPILE = $(RESOLVE) pyproject.toml
FOLLOW = -c locks/$*/all.lock
lock: $(PYTHONS:%=lock-%)  ## resolve all locks again
$(filter-out lock-$(firstword $(PYTHONS)),$(PYTHONS:%=lock-%)): lock-$(firstword $(PYTHONS))
lock-%: $(UV)
	@mkdir -p locks/$*
	@test $* = $(firstword $(PYTHONS)) || cp locks/$(firstword $(PYTHONS))/*.lock locks/$*
	@$(COMPILE) --extra dev -o locks/$*/all.lock
	@$(COMPILE) $(FOLLOW) -o locks/$*/base.lock
	@$(COMPILE) $(FOLLOW) --extra views -o locks/$*/processors.lock
	@$(COMPILE) $(FOLLOW) --extra sandbox -o locks/$*/sandbox.lock
	@$(COMPILE) $(FOLLOW) --extra demo -o locks/$*/demo.lock
	@$(COMPILE) --extra gpu-node -o locks/$*/gpu-node.lock
	@$(COMPILE) -c locks/$*/gpu-node.lock --extra gpu -o locks/$*/gpu.lock
	@sed -E '/^openai==/,/[^\\]$$/d' locks/$*/all.lock >.cache/without-openai  # SGLang's pin, older than what frameworks want
	@$(COMPILE) -c .cache/without-openai --group frameworks -o locks/$*/frameworks.lock
	@sed -E '/^(packaging|transformers|virtualenv)==/,/[^\\]$$/d' locks/$*/all.lock >.cache/before-verl  # newer than what verl takes
	@$(COMPILE) -c .cache/before-verl --group trainers -o locks/$*/trainers.lock
	@grep -E '^(torch|torchvision|triton|nvidia-[a-z0-9-]*|cuda-[a-z-]*)==' locks/$*/all.lock | sed 's/ .*//' >.cache/same-torch  # on the disk once
	@$(RESOLVE) -c .cache/same-torch --group vllm -o locks/$*/vllm.lock
	@$(RESOLVE) -c .cache/same-torch --group tinker -o locks/$*/tinker.lock
	@$(RESOLVE) $(FOLLOW) --group sbom -o locks/$*/sbom.lock
	@echo 'verifiers[ta]==0.4.0' | $(RESOLVE) - -o locks/$*/verifiers.lock  # of tests: users bring their own
	@echo 'verifiers==0.3.1' | $(RESOLVE) - -o locks/$*/verifiers-classic.lock
	@echo 'mcp==2.3.0' | $(RESOLVE) - -o locks/$*/mcp.lock

clean:  ## remove the environment and caches, keep runs
	@rm -rf .venv .cache build dist *.egg-info src/*.egg-info
