# shellcheck shell=bash
# What the scripts that start a training share. Sourced by them, not run.
#
#   PYTHON    the interpreter (default: the one in .venv of the repository, or in VENV_DIR, else python3)
#
# Afterwards $repository is the repository's folder.

set -euo pipefail

# An exported CDPATH would send a relative folder elsewhere and print it.
repository=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Prints the interpreter, which has torch.
find_python() {
    local venv=${VENV_DIR:-$repository/.venv} python=python3
    if [[ -n ${PYTHON:-} ]]; then
        python=$PYTHON
    elif [[ -x $venv/bin/python ]]; then
        python=$venv/bin/python
    fi
    command -v "$python" >/dev/null || fail "PYTHON=$python: no such program; set PYTHON to the interpreter that has torch."
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' >/dev/null 2>&1 ||
        fail "$python has no torch; run scripts/quickstart.sh, which makes .venv, or set PYTHON to the interpreter that has torch."
    printf '%s\n' "$python"
}
