"""A real training step of a small Hugging Face decoder in bf16 and, converted by torchao and compiled as in a run, in
each of torchao's recipes.

Without a GPU the products are emulated: that shows what rounding does to the loss and the gradient, and nothing of
kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm_fp8.tools.verify import steps
from llm_fp8.tools.verify.recipes import torchao_lack
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup

TIMEOUT_S = 300.0
"""torch.compile compiles the decoder layer for each recipe."""


def judge_emulated(found: dict[str, steps.Evidence]) -> Result:
    """Steps on a CPU, bf16 among them: losses and gradients as on a GPU, no kernels."""
    problems = Problems()
    for name, evidence in found.items():
        steps.judge_numbers(name, evidence, found[steps.BASELINE], problems)
    facts = {"precisions": {name: dict(vars(evidence)) for name, evidence in found.items()}, "emulated": True}
    agree = f"{', '.join(found)}: losses agree; emulated on the CPU, so nothing is said of fp8 kernels"
    return problems.result("" if problems.failures else agree, facts=facts)


def take_emulated(recipes: Iterable[str]) -> dict[str, steps.Evidence]:
    """bf16 and each recipe on the CPU, of the embedded model."""
    from torch.nn.functional import cosine_similarity

    from llm_fp8.data.embedded import MODEL_DIR

    found: dict[str, steps.Evidence] = {}
    found[steps.BASELINE], reference = steps.take_steps(
        MODEL_DIR, steps.precision_of(steps.BASELINE), use_te=False, batch_size=1
    )
    for name in recipes:
        found[name], gradient = steps.take_steps(MODEL_DIR, steps.precision_of(name), use_te=False, batch_size=1)
        found[name].cosine = float(cosine_similarity(gradient, reference, dim=0))
    return found


def check(setup: Setup) -> Result:
    """bf16 and every recipe of torchao. What these lack is a warning: an option needs it, and not every run."""
    lack = torchao_lack(setup.device)
    if lack is not None:
        if setup.num_gpus:
            setup.probes[steps.TORCHAO.check].kill()
        return Result("warning", lack.reason, mends=(lack.mend,), facts={"precisions": {}})
    if not setup.num_gpus:
        return judge_emulated(take_emulated(steps.TORCHAO.fp8_products))
    return steps.judge_probe(*setup.probes[steps.TORCHAO.check].wait(TIMEOUT_S), steps.TORCHAO)
