#!/usr/bin/env bash
# Every check of this project that needs no GPU: lint, format, types, the order of imports, tests. Makes .venv first.
#
#   scripts/test.sh [--quick] [options of pytest]
#
# --quick leaves out the tests marked `slow`, which take more than about a second, start processes or train.
# All checks run, also after one failed; the exit code says whether all passed. pytest has three workers for two cores:
# much of what tests do is wait. mypy runs beside it, since an empty cache costs it half a minute; its words come last.

# shellcheck source=scripts/_setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

# Bytecode is kept, whatever an image says: otherwise every worker rewrites the assertions of all tests anew.
unset PYTHONDONTWRITEBYTECODE

tests="not gpu and not multi_gpu"
if [[ ${1:-} == --quick ]]; then
    tests+=" and not slow"
    shift
fi

setup_environment
install_requirements requirements-dev.txt "linter, type checker and test runner"

# transformers 4, by which tests read exports; elsewhere than the environment, which has transformers 5.
export LLM_FP8_OLDER_TRANSFORMERS=${LLM_FP8_OLDER_TRANSFORMERS:-$HOME/.cache/llm-fp8/transformers-4.57.6}
if [[ ! -d $LLM_FP8_OLDER_TRANSFORMERS ]]; then
    say "installing transformers 4.57.6 into $LLM_FP8_OLDER_TRANSFORMERS"
    pip_install --no-deps --target "$LLM_FP8_OLDER_TRANSFORMERS" transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2 || {
        rm -rf "$LLM_FP8_OLDER_TRANSFORMERS"
        warn "transformers 4.57.6 could not be installed; the test that reads exports by it is skipped."
    }
fi

# Tests write thousands of files and programs: into memory where there are 4 GiB for them beside 8 for the tests.
scratch=
if (($(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1 || echo 0) > 4194304)) &&
    (($(awk '/^MemAvailable/ { print $2 }' /proc/meminfo) > 12582912)) &&
    ! grep -q '^[^ ]* /dev/shm .*noexec' /proc/mounts; then
    scratch=$(mktemp -d /dev/shm/llm-fp8.XXXXXX)
    chmod 755 "$scratch" # a test becomes somebody else
    export TMPDIR=$scratch
fi

failed=()
check() { # NAME ARGUMENTS... of python
    say "$1"
    "$venv_python" "${@:2}" || failed+=("$1")
}

check "ruff check ." -m ruff check .
check "ruff format --check ." -m ruff format --check .
check "lint-imports" -c "from importlinter.cli import lint_imports_command as lint; lint()"
# A docstring begins with its subject or its verb.
begins='^ *r?"""(Of|That of|Those|What|Which|Where|As|The same|Whether)\b'
say "first words of docstrings"
if grep -rnE --include='*.py' "$begins" llm_fp8 te_llama.py train_*.py; then
    failed+=("first words of docstrings")
fi
types=$(mktemp)
"$venv_python" -m mypy llm_fp8 >"$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$types"; ((${#failed[@]} > 0)) || rm -rf "$scratch"' EXIT
check "pytest -m '$tests' $*" -m pytest -m "$tests" -n 3 --dist worksteal "$@"
say "mypy llm_fp8"
wait "$mypy" || failed+=("mypy llm_fp8")
cat "$types"

if ((${#failed[@]} > 0)); then
    say "failed:"
    printf '   %s\n' "${failed[@]}"
    exit 1
fi
say "all checks passed"
