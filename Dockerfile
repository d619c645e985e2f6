# The images of agentflow:
#
#     docker build .                   the server on CPUs (target cpu)
#     docker build --target cuda .     the server on NVIDIA GPUs
#     docker build --target app .      the example application of examples/app
#
# For a build that can be repeated, pin the base image by its digest:
#     --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:…

ARG PYTHON_IMAGE=python:3.13-slim-bookworm
ARG PIP_VERSION=26.3

# --- What all images start from.
FROM ${PYTHON_IMAGE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH=/opt/agentflow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# --- The dependencies of the server, but for torch, whose build differs. pip checks the hashes of the lock.
FROM base AS dependencies
ARG PIP_VERSION
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/agentflow && pip install "pip==$PIP_VERSION"
COPY pyproject.toml requirements.lock constraints.txt constraints-cpu.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; e = p["optional-dependencies"]; print(*(r for r in p["dependencies"] + e["engine"] + e["server"] + e["api"] + e["vision"] + e["otel"] + e["redis"] if not r.startswith("torch")), sep="\n")' \
      > /tmp/requirements.txt \
 && pip install -c requirements.lock -r /tmp/requirements.txt

# --- The package, and its native kernels for all instruction sets: the engine picks one when it starts.
FROM dependencies AS package
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt setuptools \
 && pip wheel --no-deps --no-build-isolation -w /dist . \
 && pip install --no-deps --no-index /dist/*.whl
WORKDIR /
RUN python -m agentflow.kernels /kernels

# --- torch for CPUs. PyTorch's own index has that build, and uv knows its address; TORCH_INDEX replaces it.
FROM dependencies AS cpu-environment
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=cache,target=/root/.cache/uv \
    if [ -n "$TORCH_INDEX" ]; then \
      pip install -c constraints.txt -c constraints-cpu.txt --extra-index-url "$TORCH_INDEX" "torch==$TORCH_VERSION"; \
    else \
      python3 -m venv /tmp/uv && /tmp/uv/bin/pip install -c constraints.txt uv \
      && /tmp/uv/bin/uv pip install --link-mode copy --python /opt/agentflow --torch-backend cpu \
           -c constraints.txt "torch==$TORCH_VERSION" \
      && rm -rf /tmp/uv; \
    fi
COPY --from=package /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl

# --- torch with CUDA, which brings its libraries along; only the driver comes from the host.
FROM dependencies AS cuda-environment
ARG TORCH_VERSION=2.13.0
RUN --mount=type=cache,target=/root/.cache/pip pip install -c constraints.txt "torch==$TORCH_VERSION"
COPY --from=package /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl

# --- The example application needs neither the engine nor torch.
FROM base AS app-environment
ARG PIP_VERSION
WORKDIR /src
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/agentflow && pip install "pip==$PIP_VERSION"
COPY pyproject.toml requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], "fastapi", "uvicorn", sep="\n")' \
      > /tmp/requirements.txt \
 && pip install -c requirements.lock -r /tmp/requirements.txt
COPY --from=package /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl

# --- What runs: no compiler (but for CUDA), no root, and only the two volumes are written.
FROM base AS runtime
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="agentflow" \
      org.opencontainers.image.description="Programs that call language models many times, and their server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin agentflow \
 && install -d -o agentflow -g agentflow /var/cache/agentflow /recordings
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR /recordings
USER 10001:10001

FROM runtime AS app
COPY --from=app-environment /opt/agentflow /opt/agentflow
COPY examples/app /opt/examples/app
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["uvicorn", "--app-dir", "/opt/examples", "--host", "0.0.0.0", "--port", "8000", "--factory", "app.service:create_app"]

FROM runtime AS server
ENV AGENTFLOW_CACHE=/var/cache/agentflow \
    HF_HOME=/var/cache/agentflow/huggingface \
    AGENTFLOW_COMPILED_KERNELS=/opt/kernels \
    AGENTFLOW_SERVE_HOST=0.0.0.0
COPY --from=package /kernels /opt/kernels
VOLUME ["/var/cache/agentflow", "/recordings"]
EXPOSE 8410
# A start may pull and load a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8410/health/ready', timeout=4)"]
ENTRYPOINT ["agentflow"]
CMD ["serve"]

# Triton compiles its launchers in C when a model is loaded.
FROM server AS cuda
USER 0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/var/cache/agentflow/triton
COPY --from=cuda-environment /opt/agentflow /opt/agentflow

FROM server AS cpu
COPY --from=cpu-environment /opt/agentflow /opt/agentflow
