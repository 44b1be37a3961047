# syntax=docker/dockerfile:1
# The environment to train and test fp8 in, on NVIDIA's PyTorch image, whose torch and Transformer Engine stay as they are.
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
#
# This image has not been built or run: no Docker daemon was at hand. hadolint passes, and tests/scripts/test_containers.py holds the files
# against the repository. The image's own Transformer Engine is used, which may differ from the measured 2.20.2; the verifier says so.

FROM nvcr.io/nvidia/pytorch:26.07-py3

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workspace

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

# What decides about the packages comes first, so that a change of the code does not install them anew. The image holds pip to the versions of
# all its packages, and the requirements pin others of some; what must not change is written down, kept, and looked at afterwards.
COPY requirements.txt requirements-gpu.txt requirements-deepspeed.txt ./
COPY llm_fp8/__init__.py llm_fp8/
COPY llm_fp8/utils/__init__.py llm_fp8/utils/errors.py llm_fp8/utils/packages.py llm_fp8/utils/ranks.py llm_fp8/utils/
COPY llm_fp8/config/shipped/requirements.txt llm_fp8/config/shipped/requirements-gpu.txt llm_fp8/config/shipped/requirements-deepspeed.txt llm_fp8/config/shipped/
COPY llm_fp8/tools/__init__.py llm_fp8/tools/
COPY llm_fp8/tools/verify/__init__.py llm_fp8/tools/verify/result.py llm_fp8/tools/verify/versions.py llm_fp8/tools/verify/
COPY scripts/container_requirements.py scripts/
RUN python scripts/container_requirements.py write /opt/llm-fp8 \
    && PIP_CONSTRAINT="" PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir \
        --constraint /opt/llm-fp8/constraints.txt --requirement /opt/llm-fp8/requirements.txt \
    && python scripts/container_requirements.py check /opt/llm-fp8
ENV PIP_CONSTRAINT=/opt/llm-fp8/constraints.txt

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
