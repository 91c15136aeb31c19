# Not run. For NVIDIA GPUs with a driver for CUDA 13, the CUDA of torch's wheels on PyPI:
#
#     docker build -t rankwise .
#     docker run --gpus all --ipc host -it -v "$PWD/runs:/rankwise/runs" rankwise
#     torchrun --nproc-per-node 8 train_sft.py ...

# devel: vLLM and Triton compile kernels when they start, with nvcc and gcc.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /rankwise
COPY requirements.txt .
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir -r requirements.txt && touch .venv/installed
ENV PATH=/rankwise/.venv/bin:$PATH
COPY . .
CMD ["bash"]
