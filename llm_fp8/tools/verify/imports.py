"""Packages are imported, not only listed: most broken installations are found here."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable

from llm_fp8.config.attention_packages import FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLASH_ATTENTION_PACKAGES
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.tools.verify.versions import installed, read_pins

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
OPTIONAL = {
    "deepspeed": "--sharding_mode deepspeed_1 to 3",
    "torchao": "--fp8_backend torchao",
    "wandb": "--use_wandb",
    "flash_attn": "--attn_implementation flash_attention_2",
    "flash_attn.cute": f"--attn_implementation {FLASH_ATTENTION_4}",
}
"""Module -> the option that needs it."""
_FLASH_3, _FLASH_4 = FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_3], FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_4]
_PACKAGES = {"flash_attn": "flash-attn", "flash_attn.cute": _FLASH_4.package}
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
    from llm_fp8.utils.te_import import require_te

    return _what_a_run_says(lambda: require_te("fp8"))


def try_flash_attention_3() -> str | None:
    """As `try_import`, of flash-attn 3's operators as a run loads them: without the package that they lie in."""
    from llm_fp8.kernels.flash_attention import load_operators

    return _what_a_run_says(load_operators)


def _what_a_run_says(load: Callable[[], object]) -> str | None:
    from llm_fp8.utils.errors import UserError

    try:
        load()
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
            problems.warn(f"{sentence} ({OPTIONAL[name]})", f"{sys.executable} -m {_FLASH_4.install}")
        elif name == _FLASH_3.name:
            problems.warn(sentence, f"{sys.executable} -m {_FLASH_3.install}")
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
        third = installed([_FLASH_3.package]).get(_FLASH_3.package)
        if setup.num_gpus and third is not None and third.version == _FLASH_3.version:  # others serve other purposes
            outcomes[_FLASH_3.name] = try_flash_attention_3()
    return judge(outcomes, words.getvalue())
