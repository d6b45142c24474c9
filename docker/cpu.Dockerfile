# syntax=docker/dockerfile:1
# The servers on the embedded cpu device, for a machine without Neuron chips.
#
#     docker build -f docker/cpu.Dockerfile --target tgi -t neuronserve-tgi:cpu .
#
# Targets: tgi (text-generation-launcher), sagemaker (the same on port 8080), vllm (vllm serve).

FROM python:3.11.14-slim-bookworm AS engine
# The distribution's compiler, whatever patch level it has: versions that leave the archive would end every build.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN /src/docker/install_engine.sh /usr/local/bin/python3 /opt/neuronserve

FROM python:3.11.14-slim-bookworm AS base
COPY --from=engine /opt/neuronserve /opt/neuronserve
COPY docker/entrypoint.py docker/healthcheck.py /opt/neuronserve/docker/
COPY docker/optimum-cli /usr/local/bin/optimum-cli
# SageMaker may bind another port than its own through this.
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
RUN useradd --create-home --uid 10001 neuronserve && install -d -o neuronserve -g neuronserve /data /opt/ml/model
WORKDIR /
ENV PATH=/opt/neuronserve/bin:$PATH \
    HF_HOME=/data \
    HUGGINGFACE_HUB_CACHE=/data \
    NEURONSERVE_ARTIFACTS=/data/neuronserve \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    LOG_COLORIZE=0
HEALTHCHECK --interval=30s --timeout=5s --start-period=1h --retries=3 \
  CMD ["/opt/neuronserve/bin/python", "/opt/neuronserve/docker/healthcheck.py"]

FROM base AS vllm
EXPOSE 8000
ENTRYPOINT ["/opt/neuronserve/bin/python", "/opt/neuronserve/docker/entrypoint.py", "vllm"]

FROM base AS sagemaker
EXPOSE 8080
ENTRYPOINT ["/opt/neuronserve/bin/python", "/opt/neuronserve/docker/entrypoint.py", "sagemaker"]

FROM base AS tgi
ENV PORT=80
EXPOSE 80
ENTRYPOINT ["/opt/neuronserve/bin/python", "/opt/neuronserve/docker/entrypoint.py", "tgi"]
