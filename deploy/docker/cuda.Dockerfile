# syntax=docker/dockerfile:1.9
# vLLM on NVIDIA GPUs with vllm_hisparse, its kernels and the router:
#   docker build -f deploy/docker/cuda.Dockerfile -t vllm-hisparse:0.1.0 .
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
# A release of vLLM that pyproject.toml allows.
ARG VLLM_VERSION=0.33.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY . .
# Other versions are pinned in pyproject.toml.
# hadolint ignore=DL3013
RUN pip install ".[cuda,cli,router,ray]" "vllm==${VLLM_VERSION}"

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
# vLLM compiles kernels at its first start: Triton wants a C compiler, DeepGEMM wants nvcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        cuda-cudart-dev-13-0 cuda-nvcc-13-0 g++ libibverbs1 libnuma1 librdmacm1 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /cache hisparse
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/cache \
    VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /cache
EXPOSE 8000 5600
HEALTHCHECK --interval=15s --timeout=10s --start-period=60m --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://localhost:' + os.environ.get('PORT', '8000') + '/health', timeout=8)"]
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
