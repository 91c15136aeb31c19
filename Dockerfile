# For NVIDIA GPUs with a driver for CUDA 13, the CUDA of torch's wheels on PyPI:
#
#     docker build -t rankwise .
#     docker run --gpus all --ipc host -it -v "$PWD/runs:/rankwise/runs" rankwise
#     torchrun --nproc-per-node 8 train_sft.py ...
#
# For a machine without GPUs, on another base, by the same steps:
#
#     docker build -t rankwise-cpu --build-arg BASE=debian:bookworm --build-arg REQUIREMENTS=requirements-cpu.txt .
#
# podman takes the same commands. docs/clusters.md says which of them have been run.

# devel: vLLM and Triton compile kernels when they start, with nvcc and gcc.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Not root. Whatever a run writes to a mounted folder needs that folder to be writable for this user.
RUN useradd --create-home rankwise && install --directory --owner rankwise /rankwise
USER rankwise
WORKDIR /rankwise

# Only what the installation reads, so that a change of the code does not repeat it.
ARG REQUIREMENTS=requirements.txt
COPY --chown=rankwise Makefile config.py requirements*.txt ./
COPY --chown=rankwise configs configs
RUN make .venv REQUIREMENTS=${REQUIREMENTS}
ENV PATH=/rankwise/.venv/bin:$PATH
COPY --chown=rankwise . .
CMD ["bash"]
