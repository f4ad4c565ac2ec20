# Images of Looseleaf. Targets:
#   gateway      the gateway; no torch
#   block_store  the owner of the arena; no torch
# worker prefill and decode; torch's CPU build if PyTorch's own index can be reached (PyPI's build includes CUDA)
#   worker-gpu   the same for a GPU: both roles in one process, and the C compiler that Triton calls. This is the last
#                stage, because a builder without BuildKit builds every stage above the requested one

FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN PIP_DISABLE_PIP_VERSION_CHECK=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin looseleaf
# Dependencies first: they change less often than the code.
COPY pyproject.toml /tmp/pyproject.toml
RUN python -c "import tomllib; print(*tomllib.load(open('/tmp/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > /tmp/requirements.txt \
    && pip install -r /tmp/requirements.txt
# A volume that is mounted here inherits the owner; compose keeps the deployment's secrets in such a volume.
RUN install -d -o 10001 -g 10001 -m 0700 /run/looseleaf
STOPSIGNAL SIGTERM

FROM base AS worker
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch brings its own libgomp; no other part of a compiler is needed at run time.
RUN index=; \
    if [ -n "$TORCH_INDEX" ] \
       && python -c "import urllib.request as u; u.urlopen('$TORCH_INDEX/torch/', timeout=5)" 2>/dev/null; \
    then index="--extra-index-url $TORCH_INDEX"; fi; \
    pip install $index "$TORCH" && du -sh /opt/venv
COPY --from=build /wheels /wheels
RUN pip install "$(ls /wheels/looseleaf-*.whl)[engine,transformers,gguf,traces]" && pip check
# The default model: a small one with random weights.
RUN python -c "from engine.tiny import make_checkpoint; make_checkpoint('/opt/looseleaf/tiny', 'llama', seed=0)" \
    && chmod -R a+rX /opt/looseleaf
USER 10001:10001
ENV OMP_WAIT_POLICY=PASSIVE
EXPOSE 50052 50053
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s CMD ["looseleaf", "health", "127.0.0.1:50052"]
CMD ["python", "-m", "prefill_svc", "--host", "0.0.0.0", "--port", "50052", "--model", "/opt/looseleaf/tiny"]

FROM base AS gateway
COPY --from=build /wheels /wheels
# For RDMA, build the block store with `--build-arg EXTRAS=certs,traces,nixl`.
ARG EXTRAS=certs,traces
RUN pip install "$(ls /wheels/looseleaf-*.whl)[$EXTRAS]" && pip check
COPY --from=worker /opt/looseleaf/tiny /opt/looseleaf/tiny
USER 10001:10001
EXPOSE 8000 50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s CMD ["looseleaf", "health", "127.0.0.1:50051"]
CMD ["python", "-m", "gateway", "--host", "0.0.0.0", "--model", "/opt/looseleaf/tiny"]

FROM gateway AS block_store
EXPOSE 50054
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s CMD ["looseleaf", "health", "127.0.0.1:50054"]
CMD ["python", "-m", "block_store", "--host", "0.0.0.0", "--port", "50054", "--directory", "/arena"]

FROM worker AS worker-gpu
USER root
# Triton compiles a launcher in C for each kernel, with the Python.h of the base image.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 10001 /var/cache/looseleaf
USER 10001:10001
ENV TRITON_CACHE_DIR=/var/cache/looseleaf/triton CUDA_CACHE_PATH=/var/cache/looseleaf/cuda
CMD ["python", "-m", "looseleaf.both_roles", "--host", "0.0.0.0", "--port", "50052", "--model", "/opt/looseleaf/tiny"]
