# syntax=docker/dockerfile:1
# The servers on Inferentia2 and Trainium: the Neuron SDK's own image drives the chip with its Python and torch, the
# engine has an interpreter beside it. Without a chip these images exit with the reason; they never serve on the CPU.
#
#     docker build -f docker/neuron.Dockerfile --target tgi -t neuronx-tgi .
#
# Targets: tgi (text-generation-launcher), sagemaker (the same on port 8080), vllm (vllm serve).

# SDK 2.25: the last with transformers-neuronx (torch 2.7, Python 3.10).
ARG SDK_IMAGE=public.ecr.aws/neuron/pytorch-inference-neuronx:2.7.0-neuronx-py310-sdk2.25.0-ubuntu22.04

# hadolint ignore=DL3006
FROM ${SDK_IMAGE} AS interpreter
# vLLM needs a newer Python than the SDK. From conda, so that it stands on its own libraries.
RUN conda create --yes --prefix /opt/python --override-channels --channel conda-forge python=3.11.14 \
 && conda clean --yes --all

FROM interpreter AS engine
COPY . /src
# The SDK's libraries are not the engine's.
RUN env -u LD_LIBRARY_PATH /src/docker/install_engine.sh /opt/python/bin/python3 /opt/neuronserve

FROM interpreter AS base
# Where the SDK's image keeps its interpreter and libraries.
ARG NEURON_PYTHON=/opt/conda/bin/python
ARG NEURON_LIBRARY_PATH=/opt/aws/neuron/lib:/opt/conda/lib
COPY --from=engine /opt/neuronserve /opt/neuronserve
COPY docker/entrypoint.py docker/healthcheck.py docker/device-python /opt/neuronserve/docker/
COPY docker/optimum-cli /usr/local/bin/optimum-cli
# SageMaker may bind another port than its own through this.
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
RUN useradd --create-home --uid 10001 neuronserve && install -d -o neuronserve -g neuronserve /data /opt/ml/model
WORKDIR /
ENV PATH=/opt/neuronserve/bin:/opt/aws/neuron/bin:$PATH \
    LD_LIBRARY_PATH= \
    NEURON_PYTHON=$NEURON_PYTHON \
    NEURON_LIBRARY_PATH=$NEURON_LIBRARY_PATH \
    NEURONSERVE_DEVICE_PYTHON=/opt/neuronserve/docker/device-python \
    NEURONSERVE_REQUIRE_CHIP=1 \
    HF_HOME=/data \
    HUGGINGFACE_HUB_CACHE=/data \
    NEURONSERVE_ARTIFACTS=/data/neuronserve \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    LOG_COLORIZE=0
# The SDK image's own command would become arguments of the server.
CMD []
HEALTHCHECK --interval=30s --timeout=5s --start-period=2h --retries=3 \
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
