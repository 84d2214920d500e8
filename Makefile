# Every target explains itself: `make help`. The README's two commands are `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# uv of the machine, or one of this checkout, which `prerequisites` installs.
UV_FOLDER := $(CURDIR)/.tools/uv
UV ?= uv
# Go of the machine, or one of this checkout, which `prerequisites-cluster` installs if that one is too old.
GO_FOLDER := $(CURDIR)/.tools/go
export PATH := $(GO_FOLDER)/bin:$(PATH):$(UV_FOLDER)/bin
RUN := $(UV) run --frozen
PY := $(RUN) python
# Many tests start processes that import torch. Without compiled modules on disk, each would compile it again.
unexport PYTHONDONTWRITEBYTECODE
# Files of tests side by side, the longest first (tests/support/file_order.py).
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder
# Tests wait more than they compute, so that more processes than cores pay.
FILES_SIDE_BY_SIDE := -n 4 $(SIDE_BY_SIDE)
# One of each kind: the chart, a lost pod, a lost rank, a lost node, the store.
REGISTRY_MODE_TESTS := restricted or notes or deleted_pod or killed_sidecar_rank or killed_node or store_is_down

.PHONY: help
help: ## what each target does
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-22s %s\n", $$1, $$2}'

.PHONY: prerequisites
prerequisites: ## name everything that this machine lacks, and what works without it
	@tools/prerequisites.sh base
	@command -v $(UV) >/dev/null || python3 tools/install_uv.py $(UV_FOLDER)

.PHONY: prerequisites-cluster
prerequisites-cluster:
	@tools/prerequisites.sh cluster
	@python3 tools/install_go.py $(GO_FOLDER)

.PHONY: sync
sync: prerequisites ## create .venv from uv.lock
	@$(UV) sync --frozen --all-packages --quiet

.PHONY: generate
generate: sync ## write crds/, the chart's copy and the reference tables from the code
	$(PY) -m tools.generate

.PHONY: verify
verify: sync ## fail if a generated file differs from what the code says
	$(PY) -m tools.generate --check

.PHONY: format
format: sync ## let ruff format and fix what it can
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

.PHONY: check
check: sync ## ruff, mypy --strict, import contracts, generated files, size of the code (under 2 minutes)
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(PY) -m tools.generate --check
	$(PY) -m tools.code_size --check

.PHONY: test-unit
test-unit: sync ## unit and contract tests, no server, no root
	$(RUN) pytest tests --ignore=tests/e2e --ignore=tests/integration --ignore=tests/charts --ignore=tests/frameworks -q $(FILES_SIDE_BY_SIDE)

FRAMEWORKS := UV_PROJECT_ENVIRONMENT=$(CURDIR)/.venv-frameworks
# mosaicml-streaming has an environment of its own (test-streaming).
FRAMEWORK_TESTS := tests/frameworks --ignore=tests/frameworks/test_streaming.py
# These tests only compute, and each worker imports every framework.
FRAMEWORKS_SIDE_BY_SIDE := -n 2 $(SIDE_BY_SIDE)
.PHONY: test-frameworks
test-frameworks: prerequisites ## the adapters with the real training frameworks, at the versions of tests/frameworks/uv.lock
	$(FRAMEWORKS) $(UV) sync --frozen --project tests/frameworks --quiet
	.venv-frameworks/bin/python -m pytest $(FRAMEWORK_TESTS) -q $(FRAMEWORKS_SIDE_BY_SIDE)

.PHONY: test-frameworks-newest
test-frameworks-newest: prerequisites ## the same tests with the newest released frameworks, in an environment of their own
	mkdir -p .venv-frameworks-newest/project
	cp tests/frameworks/pyproject.toml .venv-frameworks-newest/project/
	UV_PROJECT_ENVIRONMENT=$(CURDIR)/.venv-frameworks-newest/env $(UV) sync --upgrade --project .venv-frameworks-newest/project --quiet
	.venv-frameworks-newest/env/bin/python -m pytest $(FRAMEWORK_TESTS) -q $(FRAMEWORKS_SIDE_BY_SIDE)

PYTHON_OF_MEGATRON ?= 3.12
WITH_SDK := --with-editable ./core --with-editable './trainer_sdk[torch,s3]' --with-editable ./sidecar \
	--with pytest --with pytest-timeout --with hypothesis
.PHONY: test-megatron
test-megatron: prerequisites ## the adapter for Megatron-core with its newest release, which needs Python 3.12
	$(UV) run --no-project --python $(PYTHON_OF_MEGATRON) --with megatron-core $(WITH_SDK) \
		python -m pytest tests/frameworks/test_megatron.py -q

.PHONY: test-streaming
test-streaming: prerequisites ## positions of mosaicml-streaming with its newest release, which needs older libraries than the adapters
	$(UV) run --no-project --python 3.11 --with mosaicml-streaming $(WITH_SDK) \
		python -m pytest tests/frameworks/test_streaming.py -q

BESIDE := deepspeed megatron-core transformers mosaicml-streaming nvidia-resiliency-ext
.PHONY: resolve
resolve: prerequisites ## ask the package index for one environment with the SDK and the frameworks that users combine
	@printf '%s\n' ./core './trainer_sdk[torch,s3]' $(BESIDE) | $(UV) pip compile - --python-version 3.12 --no-header --no-annotate

.PHONY: version
version: sync ## write a new version to every file that names it, and its changes to CHANGELOG.md: VERSION=0.2.0
	$(PY) -m tools.release.version $(VERSION)

.PHONY: fuzz
fuzz: sync ## search for inputs that break a parser, with new seeds, for MINUTES=10
	PYTHONPATH=. $(PY) -m tests.fuzz --minutes $(or $(MINUTES),10)

.PHONY: flakes
flakes: sync ## repeat test files beside busy processes and name the tests that fail: FILES="..." TIMES=10 LOAD=4
	$(PY) -m tools.flakes --times $(or $(TIMES),10) --load $(or $(LOAD),4) $(FILES)

.PHONY: trace
trace: sync ## run a save in a pod, a save in a folder, a start and a recovery; write docs/walks.md: which files run
	$(PY) -m tools.trace

.PHONY: mutants
mutants: sync ## seed mistakes into copies of the code, each of which the tests must find: ONLY=node/ for some of them
	$(PY) -m tools.mutants $(if $(ONLY),--only '$(ONLY)') $(if $(JOBS),--jobs $(JOBS))

.PHONY: tools
tools: prerequisites-cluster sync ## build etcd, kube-apiserver, helm, MinIO... into the test bed's cache
	$(PY) -m testbed tools

.PHONY: test-integration
test-integration: tools ## real MinIO, real API server, real sidecars and trainers as processes
	$(RUN) pytest tests/integration tests/charts -q $(FILES_SIDE_BY_SIDE)

# Tests that `make test-e2e` leaves out: the first line of each target below says why.
APART := not long and not jobset and not trainer
.PHONY: test-e2e
test-e2e: cluster-up ## every failure of the README, bad input, install and upgrade, on the kind cluster
	$(RUN) pytest tests/e2e -m "not alone and $(APART)" -q -n 4 $(SIDE_BY_SIDE) --durations=0
	$(RUN) pytest tests/e2e -m "alone and $(APART)" -q --durations=0

.PHONY: test-long
test-long: cluster-up ## e2e tests that take minutes each and that faster tests cover in parts: before a release, not in CI
	$(RUN) pytest tests/e2e -m long -q --durations=0

.PHONY: e2e-jobset
e2e-jobset: cluster-up ## adopted pods with the real JobSet controller; its first build takes up to 11 minutes
	$(PY) -m testbed jobset
	$(RUN) pytest tests/e2e -m jobset -v --durations=0
	$(PY) -m testbed jobset --remove

.PHONY: e2e-trainer
e2e-trainer: cluster-up ## adopted pods with the real controllers of Kubeflow Trainer and JobSet; their first build takes up to 20 minutes
	$(PY) -m testbed trainer
	$(RUN) pytest tests/e2e -m trainer -v --durations=0
	$(PY) -m testbed trainer --remove

PHASES := python3 tools/phases.py
.PHONY: test
test: prerequisites ## static checks, unit tests, contracts and the frameworks' adapters, with a table of times; no root, no cluster
	@$(PHASES) "make check" "make test-unit" "make test-frameworks"

.PHONY: quick
quick: sync ## static checks, and the tests that the change most probably breaks, in under 3 minutes: BASE=origin/main
	@$(PHASES) "make check" "$(PY) -m tools.quick $(if $(BASE),--base $(BASE))"

.PHONY: cluster-up
cluster-up: prerequisites-cluster sync ## kind cluster with images, MinIO and the test bed's tools
	$(PY) -m testbed up

.PHONY: cluster-down
cluster-down: sync ## delete the cluster, keep the caches
	$(PY) -m testbed down

.PHONY: cluster-status
cluster-status: sync ## what runs, what is cached, where the logs are
	$(PY) -m testbed status

MIRROR := $(PY) -m testbed.mirror
.PHONY: registry-mode
registry-mode: sync prerequisites-cluster ## the test bed with a registry and a Docker engine beside it: up, some e2e, down
	$(MIRROR) up
	$(MIRROR) run $(PY) -m testbed up
	$(MIRROR) run $(RUN) pytest tests/e2e -q --durations=0 -k "$(REGISTRY_MODE_TESTS)"
	$(MIRROR) run $(PY) -m testbed down
	$(MIRROR) run docker version -f 'the engine is left alone: Docker {{.Server.Version}}'
	$(MIRROR) down

.PHONY: images
images: cluster-up ## build the images and load those that changed
	$(PY) -m testbed images
	$(PY) -m testbed load

.PHONY: release-wheels
release-wheels: sync ## the wheels of SDK, core and kubectl plug-in into dist/
	$(PY) -m tools.release wheels

.PHONY: release-chart
release-chart: sync ## the chart into dist/, as a package and as an OCI artefact
	$(PY) -m tools.release chart

.PHONY: release-plugin
release-plugin: sync ## the kubectl plug-in for each platform and krew's manifest into dist/
	$(PY) -m tools.release plugin

.PHONY: release-images
release-images: cluster-up ## the images into dist/ as OCI layouts, each with its bill of materials
	$(PY) -m testbed images
	$(PY) -m tools.release images

.PHONY: release
release: cluster-up ## all parts of a release of this commit into dist/, with their digests in SHA256SUMS
	$(PY) -m testbed images
	$(PY) -m tools.release

.PHONY: demo
demo: sync ## train on this machine, lose a pod, a rank, a node and every copy; compare bit by bit
	@$(PY) -m demo local

.PHONY: demo-kind
demo-kind: cluster-up ## the same story on the kind cluster
	@$(PY) -m demo cluster

.PHONY: bench-recovery
REPEATS ?= 20
bench-recovery: cluster-up ## recoveries B1-B4, B6, B7 on the kind cluster, REPEATS=20 each, into benchmarks/results/recovery.{json,md,png}
	$(PY) -m testbed jobset
	$(PY) -m benchmarks.recovery --repeats $(REPEATS) $(BENCH); code=$$?; $(PY) -m testbed jobset --remove; exit $$code

.PHONY: soak
SEED ?= 1
soak: cluster-up ## trainings under random faults on the kind cluster, the operator killed every 30 s: MINUTES=30 SEED=1
	$(PY) -m benchmarks.soak --minutes $(or $(MINUTES),30) --seed $(SEED)

.PHONY: bench-peers
bench-peers: prerequisites ## the environment of what Holdfast is measured against, from its own lock
	$(UV) sync --frozen --project benchmarks/peers
	PYTHONPATH=. benchmarks/peers/.venv/bin/python -m benchmarks.peers.compile || echo "DeepSpeed's writer does not compile here: the results will say so"

.PHONY: bench
bench: sync bench-peers ## the data path against this machine's limits and its peers into benchmarks/results/datapath.{json,md,png}
	$(PY) -m benchmarks.datapath $(BENCH)

.PHONY: bench-quick
bench-quick: sync ## ours and torch DCP only: A1, A2, A3, A8 and a verdict for each, under 3 minutes
	$(PY) -m benchmarks.datapath --quick $(BENCH)

.PHONY: test-gpu
test-gpu: sync ## staging, and a killed training of each adapter, on a real GPU; fails where there is none
	$(PY) -m benchmarks.gpu --look
	$(RUN) pytest tests --ignore=tests/frameworks -m gpu -v
	$(FRAMEWORKS) $(UV) sync --frozen --project tests/frameworks --quiet
	.venv-frameworks/bin/python -m pytest $(FRAMEWORK_TESTS) -m gpu -v

.PHONY: bench-gpu
bench-gpu: sync ## what a save costs a training on a GPU, beside torch DCP, into benchmarks/results/gpu.json
	$(PY) -m benchmarks.gpu

.PHONY: bench-ranks
bench-ranks: sync ## a real coordinator with played members, 64 to 4096 workers, into benchmarks/results/ranks.{json,md,png}
	$(PY) -m benchmarks.ranks $(BENCH)

.PHONY: bench-scale
bench-scale: tools ## one operator with 1,000 jobs of 10 workers on a real API server, into benchmarks/results/scale.{json,md,png}
	$(PY) -m benchmarks.scale $(BENCH)

.PHONY: bench-interval
bench-interval: sync ## goodput of automatic and fixed intervals, replayed in virtual time, into benchmarks/results/interval.json
	$(PY) -m benchmarks.interval

.PHONY: bench-drill
bench-drill: sync ## a drill of a stored checkpoint against plain downloads, into benchmarks/results/drill.json
	$(PY) -m benchmarks.drill

.PHONY: bench-merge
bench-merge: sync ## a merge of ten checkpoints against reading them, into benchmarks/results/merge.json
	$(PY) -m benchmarks.merge $(BENCH)

.PHONY: bench-stores
bench-stores: tools ## obstore beside our own S3 client on one MinIO, in turns, into benchmarks/results/stores.json
	$(PY) -m benchmarks.stores $(BENCH)

.PHONY: bench-objects
bench-objects: tools ## plan of the retention and memory of the operator for 10,000 Checkpoints of one job, into benchmarks/results/objects.json
	$(PY) -m benchmarks.objects

.PHONY: bench-listing
bench-listing: tools ## listings of 10,000 checkpoints in a folder and in a bucket, into benchmarks/results/listing.json
	$(PY) -m benchmarks.listing

.PHONY: bench-integrations
bench-integrations: prerequisites ## kills, identical bits and blocked time of each adapter into benchmarks/results/integrations.{json,md}
	$(FRAMEWORKS) $(UV) sync --frozen --project tests/frameworks --quiet
	.venv-frameworks/bin/python -m benchmarks.integrations $(BENCH)

.PHONY: clean
clean: ## remove build outputs of this checkout (the test bed's cache stays)
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
