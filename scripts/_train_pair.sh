# shellcheck shell=bash
# Trainings that come as a pair, in bf16 and in fp8. Sourced by the scripts of the pairs, not run.
#
# What a pair trains stands in one file, configs/PAIR.yaml, so that its two scripts can differ in nothing but the precision and the
# output folder. Options after them win over the file.

# shellcheck source=scripts/_python.sh
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

# pair_options PRECISION PAIR NAME: sets `options` to what the training script is given; NAME is that of the output folder under runs/.
pair_options() {
    options=(--config "$repository/configs/$2.yaml" --mixed_precision "$1" --output_dir "$repository/runs/$3")
}

# train_on_one_gpu PRECISION PAIR NAME [options of train_fp8.py]: in place of this shell.
train_on_one_gpu() {
    local python options
    python=$(find_python)
    pair_options "$@"
    exec "$python" "$repository/train_fp8.py" "${options[@]}" "${@:4}"
}

# train_on_all_gpus PRECISION PAIR NAME [options of train_multi_gpu.py]: in place of this shell, one process per GPU. The mode is named,
# because the one that is chosen by memory (auto) might not be the same in both precisions: ddp, for the pair's model fits on each
# GPU, and weights that are not split need no gathering. --dry_run as the first option prints the command.
train_on_all_gpus() {
    local options launcher=("$repository/scripts/launch_multi_node.sh")
    pair_options "$@"
    if [[ ${4:-} == --dry_run ]]; then
        launcher+=(--dry_run)
        set -- "${@:1:3}" "${@:5}"
    fi
    exec bash "${launcher[@]}" "${options[@]}" --sharding_mode ddp "${@:4}"
}
