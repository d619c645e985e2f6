# The project's commands. They need Python 3.11 to 3.13, pip, make and a network; the rest they fetch
# into .venv, once.
#
#   make demo    run examples/essay_judge.py on the default model
#   make examples       run every example on the default model (ARGS="--url ws://…": on a server)
#   make test    run the tests, in two processes (ARGS="-k radix" passes options to pytest)
#   make test-full      run all tests, also those that are slow and broad, and the adapters', and check their types
#   make fuzz    hold the HTTP APIs against their OpenAPI document: 5,000 random requests and more; then send
#                100,000 fuzzed frames to the websocket (FUZZ_FRAMES=n: as many; FUZZ_SEED=x: other ones)
#   make soak    good and bad clients on a real server, 10 minutes; fails where something leaks
#                (ARGS="--minutes 3 --out DIR"; needs the default model)
#   make test-adapters  the tests of adapters/, each in an environment of its own (ADAPTERS=dspy-agentflow: of one)
#   make langchain-agentflow, make dspy-agentflow  an adapter's environment, and its example on the default model
#   make gpu-check      the model on this machine's GPU, against its CPU and against what the GPU can do; without a
#                GPU it says so. Runs on .venv where there is one, or on PYTHON as it is (WHEELS=DIR: installs those
#                for it, in a folder of its own)
#   make lint    ruff, mypy and the directions of import
#   make docs    build the documentation into build/site (strictly: a broken link fails)
#   make clean   remove what building and testing left behind; `make distclean` removes .venv too
#
# Variables, given as `make NAME=value demo`:
#
#   PYTHON       the interpreter that .venv is made of (python3)
#   TORCH        the torch to install (torch==2.13.0); one that is in .venv already and fits is kept
#   TORCH_INDEX  the address of one more package index to look for torch in, such as PyTorch's own for
#                the CPU or for a version of CUDA; its install page names them
#   JOBS         processes that run the tests (2; 0: this one)
#   WHEELS       a folder of wheels that `make gpu-check` installs for its run
#   CUDA         1 allows a CUDA build of torch where no NVIDIA GPU is found; 0 forbids it where one is

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
CUDA        ?=
ARGS        ?=
JOBS        ?= 2
FUZZ_FRAMES ?= 100000
FUZZ_SEED   ?= 1

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input install -c constraints.txt
MODEL := smollm2-135m

# In the order of README.
EXAMPLES := few_shot self_consistency tree_of_thought skeleton_of_thought essay_judge react \
            generative_agents chat long_document extraction retrieval

# Distributions of their own, under adapters/.
ADAPTERS := langchain-agentflow dspy-agentflow
EXAMPLE_OF_langchain-agentflow := langchain_agent
EXAMPLE_OF_dspy-agentflow := dspy_rag

.PHONY: demo examples test test-full gpu-check test-adapters lint-adapters $(ADAPTERS) fuzz soak lint docs clean distclean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python examples/essay_judge.py

examples: $(VENV)/.installed
	@$(BIN)/agentflow pull $(MODEL)
	@for name in $(EXAMPLES); do \
	  printf '\n=== examples/%s.py\n\n' $$name; \
	  $(BIN)/python examples/$$name.py $(ARGS) || { echo "make: examples/$$name.py failed"; exit 1; }; \
	done

# What is marked as slow and broad is left out.
MARKS := -m 'not full'

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(MARKS) $(ARGS)

test-full: MARKS :=
test-full: export HYPOTHESIS_PROFILE := full
test-full: test test-adapters lint-adapters

test-adapters: $(VENV)/.installed $(ADAPTERS:%=adapters/%/.venv/.installed)
	@$(BIN)/agentflow pull $(MODEL)
	@for name in $(ADAPTERS); do \
	  printf '\n=== adapters/%s\n\n' $$name; \
	  (cd adapters/$$name && .venv/bin/python -m pytest $(MARKS) $(ARGS)) || exit 1; \
	done

lint-adapters: $(VENV)/.installed-dev $(ADAPTERS:%=adapters/%/.venv/.installed)
	@for name in $(ADAPTERS); do \
	  (cd adapters/$$name && MYPYPATH=../.. ../../$(BIN)/mypy --python-executable .venv/bin/python) || exit 1; \
	done

$(ADAPTERS): %: adapters/%/.venv/.installed
	@$(BIN)/agentflow pull $(MODEL)
	@adapters/$*/.venv/bin/python examples/$(EXAMPLE_OF_$*).py $(ARGS)

# The engine's packages are those of $(VENV), after the environment's own: torch is large.
adapters/%/.venv/.installed: adapters/%/pyproject.toml pyproject.toml | $(VENV)/.installed
	@rm -rf adapters/$*/.venv
	@$(PYTHON) -m venv adapters/$*/.venv
	@adapters/$*/.venv/bin/python -m pip --disable-pip-version-check --no-input install -q -e . -e 'adapters/$*[test]'
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(adapters/$*/.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth"
	@touch $@

fuzz: $(VENV)/.installed-dev
	@PYTHONPATH=.:tests $(BIN)/python -m support.server.openapi_fuzz $(ARGS)
	@FUZZ_FRAMES=$(FUZZ_FRAMES) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest tests/server/websocket/test_ws_fuzz.py -k asyncio

soak: $(VENV)/.installed-dev
	@$(BIN)/agentflow pull $(MODEL)
	@$(BIN)/python -m benchmarks soak $(ARGS)

# On a bare machine, where nothing can be fetched: what PYTHON has, and the wheels of WHEELS. A PYTHON that is
# named is taken even where there is .venv.
gpu-check: PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu-check:
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	if [ -n "$(WHEELS)" ]; then \
	  $(PYTHON) -m pip install -q --no-index --no-deps --no-compile --target "$$site" $(WHEELS)/*.whl || exit 1; \
	fi && PYTHONPATH="$$site:.$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m benchmarks.step.gpu_check $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_directions.py

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-docs
	@$(BIN)/python -m mkdocs build --strict $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) adapters/*/.venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: this needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	  echo "      Name another interpreter, as in: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test ! -e $(VENV) || { echo "make: $(VENV) is no virtual environment: remove it first"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: '$(PYTHON) -m venv' failed; what it needs is named above"; exit 1; }

# torch comes first and alone: which build of it is right depends on the machine. The default index has
# CUDA builds for Linux, several GB with what they need; constraints-cpu.txt refuses those, before any
# of it is downloaded, unless there is a GPU to use them.
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

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[engine,server,dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[engine,server,docs]'
	@touch $@
