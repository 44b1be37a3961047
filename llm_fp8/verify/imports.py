"""Packages are imported, not only listed: most broken installations are found here."""

from __future__ import annotations

import importlib
import sys

from llm_fp8.verify.result import Problems, Result
from llm_fp8.verify.setup import Setup

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
_TE = "transformer_engine.pytorch"


def try_import(name: str) -> str | None:
    """The first line of the error of importing a module, None where it loads."""
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a broken package raises is the answer
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def try_transformer_engine() -> str | None:
    """As `try_import`, as a run loads it: with torch's cuDNN."""
    from llm_fp8.errors import UserError
    from llm_fp8.precision import require_te

    try:
        require_te("fp8")
    except UserError as error:
        return str(error)
    return None


def judge(outcomes: dict[str, str | None]) -> Result:
    """Whatever did not load fails."""
    problems = Problems()
    for name, error in outcomes.items():
        if error is None:
            continue
        if name == _TE:
            mend = f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps -r requirements-gpu.txt"
        else:
            mend = f"{sys.executable} -m pip install --force-reinstall -r requirements.txt"
        problems.fail(f"{name} does not load: {error}", mend)
    loaded = [name for name, error in outcomes.items() if error is None]
    return problems.result(f"loaded: {', '.join(loaded)}" if loaded else "", facts=dict(outcomes))


def check(setup: Setup) -> Result:
    """Import everything that a run needs; Transformer Engine where there is a GPU for it."""
    outcomes = {name: try_import(name) for name in REQUIRED}
    if setup.num_gpus:
        outcomes[_TE] = try_transformer_engine()
    return judge(outcomes)
