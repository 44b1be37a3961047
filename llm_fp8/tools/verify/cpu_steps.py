"""Without a GPU: the embedded model trains a few steps on the CPU in bf16, with the loss that random weights must
have.
"""

from __future__ import annotations

import math

from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup

MAX_DIFFERENCE = 0.1
"""Random weights of standard deviation 0.02 say nothing, so the loss is that of a uniform guess, nearly."""


def judge(losses: list[float], gradient_norm: float, vocab_size: int) -> Result:
    """Losses in nats per token, the norm of the gradient after them."""
    problems, expected = Problems(), math.log(vocab_size)
    mend = "python -m pip install --force-reinstall -r requirements.txt"
    if not all(math.isfinite(loss) and abs(loss / expected - 1) < MAX_DIFFERENCE for loss in losses):
        problems.fail(f"losses {losses}, and random weights over {vocab_size} tokens should give {expected:.2f}", mend)
    if not (math.isfinite(gradient_norm) and gradient_norm > 0):
        problems.fail(f"the gradient's norm is {gradient_norm}", mend)
    facts = {"losses": losses, "gradient_norm": gradient_norm, "expected_loss": expected}
    return problems.result(f"{len(losses)} steps of the embedded model in bf16, loss {losses[-1]:.2f}", facts=facts)


def check(setup: Setup) -> Result:
    """The run's own code, as in the check on a GPU."""
    from llm_fp8.data.embedded import MODEL_DIR
    from llm_fp8.tools.verify.setup import model_config
    from llm_fp8.tools.verify.steps import BASELINE, precision_of, take_steps

    evidence, gradient = take_steps(MODEL_DIR, precision_of(BASELINE), use_te=False, batch_size=1)
    return judge(evidence.losses, float(gradient.norm()), model_config(str(MODEL_DIR)).vocab_size)
