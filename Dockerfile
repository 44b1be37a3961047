# syntax=docker/dockerfile:1
# The environment to train and test fp8 in: what scripts/quickstart.sh installs for GPUs, on the Ubuntu, Python and CUDA of the GPU tests.
#
#   docker build --build-arg USER_ID="$(id -u)" --build-arg GROUP_ID="$(id -g)" --build-arg LLM_FP8_COMMIT="$(git rev-parse HEAD)" -t llm-fp8:latest .
#   mkdir -p checkpoints
#   docker run -it --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
#     -v "$(pwd)/checkpoints:/workspace/checkpoints" llm-fp8:latest [bash scripts/train_fp8.sh]
#
# docker-compose.yml holds the same settings. Needed: the NVIDIA Container Toolkit and a driver for CUDA 13. Without a command the container
# runs scripts/verify_fp8.py.
#   results              runs/ is /workspace/checkpoints, the mounted folder; files belong to USER_ID and GROUP_ID
#   models, data sets    HF_HOME is /cache/huggingface: -v "$HOME/.cache/huggingface:/cache/huggingface" shares the host's
#   HF_TOKEN and others  docker run -e HF_TOKEN -e WANDB_API_KEY
#   your configs/        -v "$(pwd)/configs:/workspace/configs"
#   a cluster            scripts/slurm_multi_node.sbatch
#
# Run so far, without Docker: the steps below in a bare Debian 12, with torch for CPUs and no Transformer Engine, then trainings as USER_ID;
# quickstart.sh --gpu with CUDA 13.0; the same versions on GPUs. Not run: NVIDIA's image and entry point, a GPU or InfiniBand in a container.

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workspace

# Compilers and Python's headers for Triton and Transformer Engine; the libraries by which NCCL finds InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ibverbs-providers libibverbs1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Whom the process in the container runs as; files that it writes to a mounted folder belong to them.
ARG USER_ID=1000
ARG GROUP_ID=1000
RUN if ! getent group "${GROUP_ID}" > /dev/null; then groupadd --gid "${GROUP_ID}" trainer; fi \
    && if ! getent passwd "${USER_ID}" > /dev/null; then \
        useradd --no-log-init --create-home --uid "${USER_ID}" --gid "${GROUP_ID}" trainer; \
    fi \
    # Everything that a training writes by default goes to runs/, and so to the one folder that is mounted.
    && install --directory --owner="${USER_ID}" --group="${GROUP_ID}" /workspace /workspace/checkpoints /cache/huggingface \
    && ln --symbolic checkpoints /workspace/runs

# What decides about the packages comes first, so that a change of the code does not install them anew.
COPY requirements.txt requirements-gpu.txt requirements-deepspeed.txt ./
COPY scripts/_setup.sh scripts/quickstart.sh scripts/
ENV VENV_DIR=/opt/llm-fp8 \
    PATH=/opt/llm-fp8/bin:${PATH}
RUN PIP_NO_CACHE_DIR=1 bash scripts/quickstart.sh --gpu \
    && pip install --no-cache-dir --requirement requirements-deepspeed.txt

COPY te_llama.py train_fp8.py train_multi_gpu.py ./
COPY configs/ configs/
COPY llm_fp8/ llm_fp8/
COPY scripts/ scripts/
COPY benchmarks/ benchmarks/
COPY examples/ examples/

# There is no git here; runs record the commit from this variable.
ARG LLM_FP8_COMMIT=""
ENV LLM_FP8_COMMIT=${LLM_FP8_COMMIT} \
    HF_HOME=/cache/huggingface

USER ${USER_ID}:${GROUP_ID}
# NVIDIA's entry point stays: it looks at the driver, then runs this.
CMD ["python", "scripts/verify_fp8.py"]
