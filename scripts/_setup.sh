# shellcheck shell=bash
# Makes the virtual environment that the other scripts run in. Sourced by them, not run.
#
#   PYTHON    the interpreter to use (default: the first of python3, python3.13 ... python3.10 that is in range)
#   VENV_DIR  where the environment lies (default: .venv in the repository)
#
# Afterwards the working directory is the repository and $venv_python is the environment's interpreter. What is installed already
# is left alone: a copy of each requirements file beside it tells whether anything changed since. Where there is an NVIDIA GPU, versions
# are those of requirements-gpu.txt.

set -euo pipefail

# An exported CDPATH would send a relative folder elsewhere and print it.
repository=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repository"
venv=${VENV_DIR:-.venv}
venv_python=$venv/bin/python
this_command="$0${*:+ $*}"
te_build_tools=(setuptools==81.0.0 wheel==0.48.0 ninja==1.13.2 pybind11==3.1.0 packaging==26.3)

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Images that bring their own torch hold pip to its version. The environment made here does not see that torch and pins every version itself.
unset PIP_CONSTRAINT

say() { printf '== %s\n' "$*"; }

warn() { printf 'warning: %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Whether the command $1 is a Python that the pinned packages exist for.
python_in_range() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' </dev/null >/dev/null 2>&1
}

# Prints the interpreter to make the environment with.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        python_in_range "$PYTHON" || fail "PYTHON=$PYTHON is not a CPython 3.10 to 3.13; set PYTHON to one."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if python_in_range "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no CPython 3.10 to 3.13 found; install one, or name it: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
    local python
    if [[ -e $venv_python ]]; then
        python_in_range "$venv_python" || fail "$venv is not an environment of a CPython 3.10 to 3.13; delete it and run this again."
        return
    fi
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null </dev/null ||
        fail "$python cannot make virtual environments; on Debian and Ubuntu run: sudo apt-get install python3-venv"
    say "making $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv" || fail "could not make $venv; see the message above."
}

# pip in the environment; quiet unless a person is watching.
pip_install() {
    local quiet=(--quiet)
    if [[ -t 1 ]]; then quiet=(); fi
    "$venv_python" -m pip install "${quiet[@]}" "$@" </dev/null
}

# Whether the requirements file $1, or one of those after it, changed since it was installed here.
changed() { ! cat "$@" | cmp -s - "$venv/installed-$(basename "$1")"; }

remember() { cat "$@" >"$venv/installed-$(basename "$1")"; }

# Installs the requirements file $1 where it changed; $2 says what it is for. The file $3, if there is one, holds pip to its versions.
install_requirements() {
    if ! changed "$1" ${3:+"$3"}; then return; fi
    say "installing $1${3:+ with the versions of $3} ($2)"
    pip_install --upgrade -r "$1" ${3:+-c "$3"} || fail "pip could not install $1; see the message above."
    remember "$1" ${3:+"$3"}
}

has_gpu() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }

# Whether the best GPU here has fp8 tensor cores (compute capability 8.9 or newer).
has_fp8_gpu() {
    local capability
    command -v nvidia-smi >/dev/null || return 1
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -V | tail -n 1) || return 1
    [[ $capability =~ ^[0-9]+\.[0-9]+$ && $(printf '8.9\n%s\n' "$capability" | sort -V | head -n 1) == 8.9 ]]
}

has_transformer_engine() {
    "$venv_python" -c 'import importlib.metadata as m; m.version("transformer-engine-torch")' >/dev/null 2>&1
}

# torch first, which brings the NCCL that Transformer Engine is linked with.
loads_transformer_engine() { "$venv_python" -c 'import torch, transformer_engine.pytorch' </dev/null; }

# Runs the command after $1 (a log file, which gets its output too) and says every minute that it goes on: pip is silent while it compiles.
with_heartbeat() {
    local log=$1 beat status=0 minutes=0
    shift
    while sleep 60 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "still at it after $((++minutes)) min"; done &
    beat=$!
    "$@" 2>&1 | tee "$log" || status=$?
    kill "$beat" 2>/dev/null
    return "$status"
}

# Whether nvcc lies where torch looks for it when it compiles.
has_nvcc() { command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; }

# The sentence for what usually goes wrong in the log $1 of an installation of Transformer Engine.
explain_te_failure() {
    local cuda version again="rm $venv/installed-requirements-gpu.txt &&"
    cuda=$("$venv_python" -c 'import torch; print(torch.version.cuda or 13.0)' 2>/dev/null) || cuda=13.0
    version=$(sed -nE 's/.*detected CUDA version \(([0-9.]+)\).*/\1/p' "$1" | head -n 1)
    if [[ -n $version ]]; then
        printf '%s\n' "the CUDA toolkit is $version and torch needs $cuda; run: $again CUDA_HOME=/usr/local/cuda-$cuda $this_command"
    elif grep -qiE '\bKilled\b|out of memory|cannot allocate memory' "$1"; then
        printf '%s\n' "the compiler ran out of memory; compile one file at a time: $again MAX_JOBS=1 $this_command"
    elif ! has_nvcc; then
        printf '%s %s\n' "there is no nvcc, the compiler of the CUDA toolkit; install the toolkit of CUDA $cuda" \
            "(with NVIDIA's apt repository: sudo apt-get install cuda-toolkit-${cuda/./-}), then: $again $this_command"
    else
        printf '%s\n' "correct what the message above names, then run: $again $this_command"
    fi
}

# Transformer Engine. Without it everything but fp8 works, so a failure is a warning; it is not tried again by itself until
# requirements-gpu.txt changes, because each try may compile for minutes. pip keeps the wheel that it built in its cache: the same
# version is not compiled again in another environment.
install_gpu_requirements() {
    local file=requirements-gpu.txt includes log=$venv/transformer-engine.log
    rm -f "$log"
    if ! changed "$file"; then
        has_transformer_engine || warn "Transformer Engine is not installed, so no fp8; try again: rm $venv/installed-$file && $this_command"
        return 0
    fi
    if "$venv_python" -m pip cache list transformer_engine_torch 2>/dev/null </dev/null | grep -q '\.whl'; then
        say "installing $file (Transformer Engine, for fp8; from the wheel that pip built before)"
    else
        say "installing $file (Transformer Engine, for fp8; compiles its PyTorch bindings once, about ten minutes; pip keeps the wheel)"
    fi
    has_nvcc || warn "nvcc is not found; Transformer Engine needs the CUDA toolkit to compile."
    # cuDNN's and NCCL's headers come with torch's own packages, where the compiler does not look by itself.
    includes=$("$venv_python" -c '
import glob, os, sysconfig
print(os.pathsep.join(sorted(glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "include")))))')
    if ! pip_install "${te_build_tools[@]}" ||
        ! CPLUS_INCLUDE_PATH=$includes${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH} \
            with_heartbeat "$log" pip_install --no-build-isolation -r "$file"; then
        warn "Transformer Engine could not be installed, so no fp8 for now (all of pip's words: $log)."
        [[ ! -e $log ]] || warn "$(explain_te_failure "$log")"
    elif ! loads_transformer_engine >"$log" 2>&1; then
        warn "Transformer Engine is installed and does not load ($(tail -n 1 "$log")); a wheel in pip's cache may be of another torch:" \
            "$venv_python -m pip cache remove transformer_engine_torch; $venv_python -m pip uninstall -y transformer_engine_torch;" \
            "rm $venv/installed-$file && $this_command"
    fi
    remember "$file"
}

# For the GPUs of this machine; with --gpu, and in an environment that was made so, for such as have fp8, wherever they are.
setup_environment() {
    local fp8=false pins=""
    make_venv
    if [[ ${1:-} == --gpu || -e $venv/installed-requirements-gpu.txt ]] || has_fp8_gpu; then fp8=true; fi
    if $fp8 || has_gpu; then pins=requirements-gpu.txt; fi
    install_requirements requirements.txt "PyTorch and the Hugging Face libraries, several minutes the first time" $pins
    if [[ -e pyproject.toml && ! -x $venv/bin/llm-fp8 ]]; then  # the command, which runs the files of this folder
        pip_install --no-deps --no-build-isolation --editable . || warn "the command llm-fp8 could not be installed; 'python -m llm_fp8' is the same."
    fi
    if $fp8; then install_gpu_requirements; fi
}
