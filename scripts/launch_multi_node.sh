#!/usr/bin/env bash
# Starts train_multi_gpu.py on this host as one of several. Run the same line on each of them, with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/launch_multi_node.sh [--dry_run] [options of train_multi_gpu.py]
#
#   NNODES          hosts (default 1)
#   NODE_RANK       this host's number, from 0; needed with several hosts
#   MASTER_ADDR     address of host 0 that all of them reach; needed with several hosts
#   MASTER_PORT     a free port on host 0 (default 29500; a single host takes any free one)
#   NPROC_PER_NODE  processes on this host (default: one per GPU, or 1 where there is none)
#   MAX_RESTARTS    how often torchrun starts all processes anew after a failure (default 0)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME
#                   network interface for the traffic between hosts, where the libraries choose the wrong one
#   PYTHON          the interpreter (default: the one in .venv of the repository, or in VENV_DIR, else python3)
#   TRAIN_SCRIPT    the script to start (default: train_multi_gpu.py; scripts/verify_fp8.py checks the hosts)
#
# --dry_run, as the first word, prints the torchrun command instead of running it.

set -euo pipefail

# shellcheck source=scripts/_python.sh
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

dry_run=false
if [[ ${1:-} == --dry_run ]]; then
    dry_run=true
    shift
fi

# Two meanings of WORLD_SIZE and RANK are about (hosts, and processes), so neither is guessed.
if [[ -z ${NNODES:-} ]]; then
    [[ -z ${GPU_NUM:-} ]] || fail "GPU_NUM is set, which this launcher does not read; set NPROC_PER_NODE (processes on this host) and NNODES (hosts)."
    [[ -z ${WORLD_SIZE:-}${RANK:-} ]] || fail "WORLD_SIZE or RANK is set and NNODES is not; set NNODES to the number of hosts and NODE_RANK to this host's number."
fi

num_nodes=${NNODES:-1}
[[ $num_nodes =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be a number of hosts, and is '$num_nodes'."
if ((num_nodes > 1)); then
    [[ ${NODE_RANK:-} =~ ^[0-9]+$ ]] && ((NODE_RANK < num_nodes)) ||
        fail "NODE_RANK is ${NODE_RANK:-not set}; with NNODES=$num_nodes it is this host's number, from 0 to $((num_nodes - 1))."
    [[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR is not set; with NNODES=$num_nodes it is the address of the host with NODE_RANK=0."
fi
node_rank=${NODE_RANK:-0}

train_script=${TRAIN_SCRIPT:-$repository/train_multi_gpu.py}
[[ -f $train_script ]] || fail "TRAIN_SCRIPT $train_script: no such file."

python=$(find_python)

num_processes=${NPROC_PER_NODE:-}
if [[ -z $num_processes ]]; then
    num_processes=$("$python" -c 'import torch; print(torch.cuda.device_count() or 1)' 2>/dev/null) ||
        fail "PYTHON=$python cannot import torch to count the GPUs; set PYTHON to the interpreter that has torch, or NPROC_PER_NODE."
fi

# Under nohup SIGHUP is ignored, but torchrun would end on it.
[[ -z $(trap -p HUP) ]] || export TORCHELASTIC_SIGNALS_TO_HANDLE=${TORCHELASTIC_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}

command=("$python" -m torch.distributed.run "--nnodes=$num_nodes" "--nproc_per_node=$num_processes" "--max_restarts=${MAX_RESTARTS:-0}")
if ((num_nodes == 1)) && [[ -z ${MASTER_PORT:-} ]]; then
    command+=(--standalone)
else
    command+=("--node_rank=$node_rank" "--master_addr=${MASTER_ADDR:-127.0.0.1}" "--master_port=${MASTER_PORT:-29500}")
fi
command+=("$train_script" "$@")

if $dry_run; then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi

# Seconds that torchrun leaves its processes to save after a SIGTERM before it kills them, from torch 2.12 on; before, it is 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
# In place of this shell, so that a signal reaches torchrun, which passes it on.
exec "${command[@]}"
