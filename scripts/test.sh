#!/usr/bin/env bash
# Every check of this project that needs no GPU: lint, format, types, tests. Makes .venv first.
#
#   scripts/test.sh [options of pytest]
#
# All checks run, also after one failed; the exit code says whether all passed.

# shellcheck source=scripts/_setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
setup_environment
install_requirements requirements-dev.txt "linter, type checker and test runner"

failed=()
check() {
    say "$*"
    "$venv_python" -m "$@" || failed+=("$*")
}

check ruff check .
check ruff format --check .
check mypy llm_fp8
check pytest -m "not gpu and not multi_gpu" -n 2 "$@"

if ((${#failed[@]} > 0)); then
    say "failed:"
    printf '   %s\n' "${failed[@]}"
    exit 1
fi
say "all checks passed"
