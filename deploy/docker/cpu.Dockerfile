# syntax=docker/dockerfile:1.9
# vLLM on CPUs with vllm_hisparse and the router:
#   docker build -f deploy/docker/cpu.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=... -t vllm-hisparse:0.1.0-cpu .
FROM python:3.12.12-slim-bookworm AS build
# The PyTorch CPU wheel index, which serves the +cpu build of torch that vLLM pins.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY . .
# Versions are pinned in pyproject.toml. The last three packages are CUDA builds, which break a +cpu torch; text
# models need none of them.
# hadolint ignore=DL3013
RUN pip install ".[cpu,cli,router,ray]" \
    && pip uninstall -y torchvision torchaudio torchcodec

FROM python:3.12.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /cache hisparse
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/cache \
    LD_PRELOAD=libtcmalloc_minimal.so.4 \
    UCX_TLS=tcp,shm,self \
    VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /cache
EXPOSE 8000 5600
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://localhost:' + os.environ.get('PORT', '8000') + '/health', timeout=8)"]
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
