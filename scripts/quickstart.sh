#!/usr/bin/env bash
# From a fresh clone to a trained model: installs PyTorch and the other packages into .venv, then fine-tunes the small model in this
# repository for 250 steps on the arithmetic problems in this repository, in fp8 on a GPU that has it, else in bf16 or fp32, or on the CPU.
# The first time, installing takes several minutes. Training takes one to six minutes on a CPU. No hub account is needed.
#
#   scripts/quickstart.sh [options of train_fp8.py]
#   scripts/quickstart.sh --gpu      only installs, and what GPUs need also where there is none: on a cluster's login node, in an image
#   scripts/quickstart.sh --help     prints this and installs nothing
#
#   PYTHON    the interpreter to make the environment with (default: python3, if it is 3.10 to 3.13)
#   VENV_DIR  where the environment lies (default: .venv)
#
# Each run starts afresh in runs/quickstart. 'python train_fp8.py --help' then explains the options.

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi

# shellcheck source=scripts/_setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
if [[ ${1:-} == --gpu ]]; then
    setup_environment --gpu
    loads_transformer_engine || fail "Transformer Engine does not load in $venv; see the message above."
    say "$venv is ready for GPUs"
    exit
fi
setup_environment

output_dir=runs/quickstart
options=()
if has_fp8_gpu && has_transformer_engine; then
    options=(--use_te --mixed_precision fp8)
fi

say "training in $output_dir"
rm -rf "$output_dir"
"$venv_python" train_fp8.py \
    --max_steps 250 --learning_rate 3e-3 --packing --max_seq_length 256 --batch_size 8 --log_every 25 \
    --output_dir "$output_dir" "${options[@]}" "$@"

cat <<END

Next, a model of your choice on a dataset of your choice:
   cd $(printf %q "$repository") && source $(printf %q "$venv/bin/activate")
   python train_fp8.py --model_name Qwen/Qwen2.5-1.5B --dataset_name nvidia/OpenMathInstruct-2 --max_steps 200 --output_dir runs/first
   python train_fp8.py --help
END
