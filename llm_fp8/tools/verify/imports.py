"""Packages are imported, not only listed: most broken installations are found here."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.tools.verify.versions import installed, read_pins
from llm_fp8.utils.packages import FLASH_ATTENTION_4

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
OPTIONAL = {
    "deepspeed": "--sharding_mode deepspeed_1 to 3",
    "torchao": "--fp8_backend torchao",
    "wandb": "--use_wandb",
    "flash_attn": "--attn_implementation flash_attention_2",
    "flash_attn.cute": "--attn_implementation flash_attention_4",
}
"""Module -> the option that needs it."""
_PACKAGES = {"flash_attn": "flash-attn", "flash_attn.cute": FLASH_ATTENTION_4.name}
"""Module -> its package, where the names differ. flash-attn 4 has a folder flash_attn too, so that import alone does
not tell of flash-attn 2.
"""
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
    from llm_fp8.utils.errors import UserError
    from llm_fp8.utils.te_import import require_te

    try:
        require_te("fp8")
    except UserError as error:
        return str(error)
    return None


def judge(outcomes: dict[str, str | None], said: str = "") -> Result:
    """What a run needs and does not load fails; what only some options need is a warning. `said`: what they printed
    meanwhile.
    """
    problems = Problems()
    for name, error in outcomes.items():
        if error is None:
            continue
        sentence = f"{name} does not load: {error}"
        pip = f"{sys.executable} -m pip"
        if name == "flash_attn":
            problems.warn(
                f"{sentence} ({OPTIONAL[name]})",
                f"{pip} uninstall -y flash-attn   # or install it again for this torch",
            )
        elif name == "flash_attn.cute":
            problems.warn(f"{sentence} ({OPTIONAL[name]})", f"{sys.executable} -m {FLASH_ATTENTION_4.install}")
        elif name in OPTIONAL:
            problems.warn(f"{sentence} ({OPTIONAL[name]})", reinstall(name))
        elif name == _TE:
            problems.fail(
                sentence, f"{pip} install --no-build-isolation --force-reinstall --no-deps -r requirements-gpu.txt"
            )
        else:
            problems.fail(sentence, f"{pip} install --force-reinstall -r requirements.txt")
    loaded = [name for name, error in outcomes.items() if error is None]
    facts = {"outcomes": dict(outcomes), "said": said}
    return problems.result(f"loaded: {', '.join(loaded)}" if loaded else "", facts=facts)


def reinstall(name: str) -> str:
    """The command that installs a package as a requirements file pins it, whether it is missing or broken; its
    dependencies stay as they are.
    """
    pinned = next(
        (f"{pin.requirement.name}{pin.requirement.specifier}" for pin in read_pins() if pin.name == name), name
    )
    return f"{sys.executable} -m pip install --force-reinstall --no-deps '{pinned}'"


def check(setup: Setup) -> Result:
    """Import everything that a run needs, and what options need where it is installed; Transformer Engine where
    there is a GPU for it.
    """
    words = io.StringIO()
    with (
        contextlib.redirect_stdout(words),
        contextlib.redirect_stderr(words),
    ):  # they greet, and miss what is not asked of them
        outcomes = {name: try_import(name) for name in REQUIRED}
        if setup.num_gpus:
            outcomes[_TE] = try_transformer_engine()
        there = installed(_PACKAGES.get(name, name) for name in OPTIONAL)
        outcomes |= {name: try_import(name) for name in OPTIONAL if _PACKAGES.get(name, name) in there}
    return judge(outcomes, words.getvalue())
