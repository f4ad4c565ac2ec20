# `make serve` and `make test` work as the first command in a fresh clone. They need python3 (3.11 or later), a C++
# compiler and make, and install everything else into .venv. ARGS takes flags: make serve ARGS="--prefill 2 --port 8080"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH ?= torch==2.13.0
# PyPI's build of torch includes gigabytes of CUDA libraries, so a host without a GPU uses PyTorch's own CPU build if it
# can reach the index.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidia0),,https://download.pytorch.org/whl/cpu)
VENV ?= .venv
PY := $(VENV)/bin/python
# Hides pip's warnings, but not its errors.
PIP := $(PY) -m pip -qq --disable-pip-version-check
ARGS ?=
BUF_PACKAGES := @bufbuild/buf@1.75.0 @bufbuild/protoc-gen-es@2.17.0 @bufbuild/protobuf@2.17.0 typescript@5.9.3
BUF ?= $(VENV)/buf/node_modules/.bin/buf
USERS ?= 32
RUN_TIME ?=

PROTOS := $(wildcard protos/v1/*.proto)
# Quick tests, which run two at a time in any order. Of the others, two files run at a time: the tests of a file share
# the services that they start.
TOGETHER := $(addprefix tests/,block_store common decode_svc deploy engine equality gateway kernels models prefill_svc worker)
NATIVE := $(wildcard setup.py kernels/cpu/* block_store/arena/atomics.c)

.PHONY: help serve test families test-third-party test-nixl wheel check proto bench bench-frontend bench-sharing bench-waste bench-peers bench-preemption bench-recovery bench-hostile paper model-check chaos load test-compose gpu-carry gpu-check gpu-bench install dev clean lint types imports proto-check buf-tools buf-lint proto-released generated fuzz mutants

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

serve: install ## serve a model on this machine (ARGS="MODEL --prefill 2 ...")
	@exec $(PY) -m looseleaf serve $(ARGS)

test: dev ## run the tests that need no container engine (ARGS="tests/gateway -k tenants")
	@$(if $(ARGS),exec $(PY) -m pytest -m "not compose and not families and not third_party and not nixl" $(ARGS))
	status=0
	$(PY) -m pytest -m "not compose and not families and not third_party and not nixl" -n 2 $(TOGETHER) || status=$$?
	$(PY) -m pytest -m "not compose and not families and not third_party and not nixl" -n 2 --dist loadfile $(addprefix --ignore=,$(TOGETHER)) || status=$$?
	exit $$status

families: dev ## run every model family that transformers defines through real services, and compare its rows
	@exec $(PY) -m pytest -m families tests/equality tests/engine

test-third-party: dev ## test third-party clients against a real server; installs them outside the repository, writes docs/clients.md
	@exec nice -n 10 $(PY) -m pytest -m third_party tests/third_party $(ARGS)

test-nixl: dev ## test transfers over NIXL between real processes, over TCP without RDMA; installs NIXL (70 MB) into .venv
	@$(PIP) install --no-deps 'nixl-cu12>=1.5.1,<2'
	exec $(PY) -m pytest -m nixl tests/block_store/test_nixl.py $(ARGS)

wheel: $(VENV)/.created ## build dist/looseleaf-*.whl: kernels for every instruction set, the built-in model
	@rm -rf build/lib.* build/bdist.* dist
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	ls -sh dist

check: dev lint types imports proto-check buf-lint generated ## check style, types, import rules, protos and generated clients

lint: dev
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: dev
	@$(PY) -m mypy

imports: dev
	@$(VENV)/bin/lint-imports

proto: dev ## generate the Python code of the protos
	@$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

proto-check: dev
	@fresh=$$(mktemp -d)
	trap 'rm -rf "$$fresh"' EXIT
	$(PY) -m grpc_tools.protoc -I. --python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh" $(PROTOS)
	for file in "$$fresh"/protos/v1/*; do
		cmp -s "$$file" "protos/v1/$${file##*/}" || { echo "protos/v1/$${file##*/} is stale: run make proto" >&2; exit 1; }
	done
	echo "protos: generated code is fresh"

buf-tools: # buf and the plugins of buf.gen.yaml, from npm; and those of buf.gen.go.yaml, unpacked from Debian's packages
	@if [ ! -x "$(BUF)" ]; then
		if ! command -v npm >/dev/null; then
			echo "!!! buf SKIPPED: there is no npm to install @bufbuild/buf with" >&2
			exit 0
		fi
		mkdir -p "$(VENV)/buf"
		npm install --silent --no-save --prefix "$(VENV)/buf" $(BUF_PACKAGES)
	fi
	if ! command -v protoc-gen-go-grpc >/dev/null && [ ! -d "$(VENV)/buf/go" ] && command -v dpkg-deb >/dev/null; then
		mkdir -p "$(VENV)/buf/go"
		cd "$(VENV)/buf/go"
		apt-get download -qq protoc-gen-go protoc-gen-go-grpc 2>/dev/null || exit 0
		for package in *.deb; do dpkg-deb -x "$$package" .; done
	fi

buf-lint: buf-tools # check style, and compatibility with the release whose protos are in released.binpb
	@[ -x "$(BUF)" ] || exit 0
	"$(BUF)" lint
	"$(BUF)" breaking --against protos/released.binpb
	echo "buf: protos are clean and compatible with protos/released.binpb"

proto-released: buf-tools ## store the protos of a release; later protos must be compatible with them
	@"$(BUF)" build --exclude-source-info -o protos/released.binpb

generated: buf-tools ## generate TypeScript and Go clients from the protos into build/generated, and check them
	@[ -x "$(BUF)" ] || exit 0
	export PATH="$(abspath $(VENV))/buf/node_modules/.bin:$(abspath $(VENV))/buf/go/usr/bin:$$PATH"
	"$(abspath $(BUF))" generate
	ln -sfn "$(abspath $(VENV))/buf/node_modules" build/generated/node_modules
	tsc --noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext build/generated/ts/protos/v1/*.ts
	if command -v protoc-gen-go-grpc >/dev/null; then
		"$(abspath $(BUF))" generate --template buf.gen.go.yaml
		echo "generated clients: build/generated/ts (type-checked), build/generated/go"
	else
		echo "generated clients: build/generated/ts (type-checked); Go SKIPPED: there is no protoc-gen-go-grpc"
	fi

bench: install ## measure kernels, decode steps, start-up, workloads and memory; stored in docs/benchmarks/cpu (ARGS=--quick)
	@exec $(PY) -m bench.served.cpu $(ARGS)

bench-peers: install ## compare with vLLM, llama.cpp, OpenVINO, transformers (PEERS=<their harness> ROOT=<its environments>)
	@test -n "$(PEERS)" -a -n "$(ROOT)" || { echo "PEERS= names the peers' harness, ROOT= what its README sets up" >&2; exit 2; }
	exec $(PY) -m bench.served.peers --peers "$(PEERS)" --root "$(ROOT)" $(ARGS)

bench-sharing: install ## count the blocks that samples and beams share, and compare with the PagedAttention paper
	@exec $(PY) -m bench.served.sharing $(ARGS)

bench-waste: install ## measure unused KV memory under a mixed load
	@exec $(PY) -m bench.served.waste $(ARGS)

bench-frontend: install ## measure the CPU time per streamed token of the gateway and of decode's RPC
	@exec $(PY) -m bench.served.frontend $(ARGS)

bench-preemption: install ## measure the cost of running out of blocks, with swapping and with giving back
	@exec $(PY) -m bench.served.preemption $(ARGS)

bench-recovery: install ## measure the longest gap in streams when the only decode worker is killed, with and without a spare worker
	@exec $(PY) -m bench.served.recovery $(ARGS)

bench-hostile: install ## measure the effect of hostile HTTP bodies on other streams and on the gateway's memory
	@exec $(PY) -m bench.served.hostile $(ARGS)

paper: install ## repeat measurements of the papers, and write docs/paper (ARGS="--only memory")
	@exec $(PY) -m bench.paper $(ARGS)

model-check: dev ## run the model checks of the ledger and of both workers' blocks at full length (`make test` runs short versions)
	@export MODEL_CHECK_EXAMPLES=4000 MODEL_CHECK_STEPS=40 MODEL_CHECK_SHARDS=8 MODEL_CHECK_SCALE=20 MODEL_CHECK_DEPTH=99 MODEL_CHECK_WORLDS=100
	shards="$$($(PY) -m pytest --collect-only -q tests/block_store/test_machine.py tests/equality/test_machine.py -k 'random_operations or no_order' | grep ::)"
	printf '%s\n' "$$shards" 'tests/block_store/test_machine.py -k bug' tests/block_store/test_actors.py \
		tests/block_store/test_small_world.py 'tests/equality/test_machine.py -k phase' |
		xargs -P 2 -I{} sh -c '$(PY) -m pytest --timeout 7200 -q {}'

chaos: dev ## kill and freeze services, stop Redis, and compare all answers (ARGS="--trials 5 --scenario decode-kill")
	@exec $(PY) -m testing.chaos $(or $(ARGS),--scenario all)

fuzz: dev ## send a million invalid inputs to every port (ARGS="--inputs 20000 --seed 2")
	@exec $(PY) -m testing.fuzz $(ARGS)

mutants: dev ## mutation testing: list the small bugs that no test detects (ARGS="--only decode_svc --count 20")
	@exec nice -n 19 $(PY) -m tools.mutants $(ARGS)

load: dev ## run locust against a running server, or start one (USERS=32 RUN_TIME=60s ARGS="--trace FILE --web 8089")
	@exec $(PY) -m loadtest --users $(USERS) $(if $(RUN_TIME),--run-time $(RUN_TIME)) $(ARGS)

test-compose: dev ## start docker-compose.yml and test it (needs a container engine)
	@exec $(PY) -m pytest -m compose tests/compose $(ARGS)

# --- GPU host: run gpu-carry here and the others on the host (they install nothing; see tools/gpu/host.sh) ---

gpu-carry: dev ## download the packages that a GPU host without a network needs into .carry
	@exec $(PY) tools/gpu/carry.py $(ARGS)

gpu-check: ## test every kernel, every provider and token equality on this GPU
	@. tools/gpu/host.sh
	exec python3 tools/gpu/check.py $(ARGS)

gpu-bench: ## measure kernels, decode steps and served runs on this GPU, and transformers for comparison
	@. tools/gpu/host.sh
	exec bash tools/gpu/bench.sh $(ARGS)

clean: ## remove .venv and all build outputs
	@rm -rf $(VENV) build *.egg-info kernels/*.so block_store/arena/*.so

# --- installation: stamp files, so that a warm start does no work and a changed kernel is rebuilt ---

install: # installs packages and, at the same time, compiles the kernels for this CPU, for serving and measuring
	@$(MAKE) --silent --jobs=2 $(VENV)/.installed $(VENV)/.compiled

dev: # installs packages and, at the same time, compiles the kernels for every CPU, for tests and checks
	@$(MAKE) --silent --jobs=2 $(VENV)/.installed $(VENV)/.compiled-all
	$(MAKE) --silent $(VENV)/.developing

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
		echo "Python 3.11 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12" >&2; exit 1; }
	echo "making $(VENV) (only once; the installation takes some minutes) ..."
	$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PIP) install 'setuptools>=77'
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@if ! $(PY) -c 'import torch' 2>/dev/null; then
		index=
		if [ -n "$(TORCH_INDEX)" ] && $(PY) -c "import urllib.request as u; u.urlopen('$(TORCH_INDEX)/torch/', timeout=5)" 2>/dev/null; then
			index="--extra-index-url $(TORCH_INDEX)"
		fi
		echo "installing $(TORCH) $${index:-from the default index} ..."
		$(PIP) install $$index '$(TORCH)'
		$(PY) -c "from importlib.metadata import version; print('torch', version('torch'), end=', ')"
		du -shc $(VENV)/lib/python3*/site-packages/{torch,nvidia*} 2>/dev/null | tail -n 1 | sed -E 's/\s.*/ on disk/' || true
	fi
	echo "installing Looseleaf and its dependencies ..."
	NO_EXTENSIONS=1 $(PIP) install --no-build-isolation -e '.[engine,redis]'
	touch $@

$(VENV)/.compiled: $(VENV)/.created $(NATIVE)
	@echo "compiling the kernels for this CPU (a minute on two cores) ..."
	KERNEL_BUILDS=native $(PY) setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/.compiled-all: $(VENV)/.created $(NATIVE)
	@echo "compiling the kernels for each instruction set (two minutes on two cores) ..."
	$(PY) setup.py --quiet build_ext --inplace
	touch $(VENV)/.compiled $@

$(VENV)/.developing: $(VENV)/.installed
	@echo "installing the packages for tests and checks ..."
	NO_EXTENSIONS=1 $(PIP) install --no-build-isolation -e '.[engine,redis,dev,loadtest]'
	touch $@
