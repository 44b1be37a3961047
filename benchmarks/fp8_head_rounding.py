"""What --fp8_lm_head rounds, emulated on a CPU: the gradients of one batch by format, and trainings of the embedded
model.

    python benchmarks/fp8_head_rounding.py     (CPU, some ten minutes; writes benchmarks/results/fp8_head_rounding.json)

Gradients: an output head of Llama 3's vocabulary over random hidden states. Logits are normal with a standard deviation
that is given, and labels are drawn from their softmax, so that the head is calibrated and its gradient is noise, as it
nearly is late in training. Each way to compute is held against fp64 on the same bf16 operands:

    error         Frobenius norm of the difference over that of the exact gradient
    slope - 1     projection of the result on the exact gradient, less one: what is not noise
    flushed       share of the entries of the softmax's gradient in bf16 that are not zero and become it
    lost mass     share of the probability that these hold

Training: from random weights, in bf16 with fp32 masters, the head's products in bf16, its gradients in emulated fp8, or
all of them so. The evaluation is exact in all. Two seeds show what noise is.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from llm_fp8.config.parser import parse_config
from llm_fp8.kernels import fp8_lm_head as fp8_head
from llm_fp8.kernels import softmax
from llm_fp8.kernels.fp8_lm_head import E4M3, E5M2, Fp8Head
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.precision.context import Precision
from llm_fp8.train.run import run_training
from llm_fp8.utils.errors import OneSentenceParser
from llm_fp8.utils.json_files import read_metrics, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

RESULT = REPOSITORY / "benchmarks" / "results" / "fp8_head_rounding.json"
VOCABULARY, WIDTH, TOKENS = 128_256, 64, 256
SPREADS = (2.0, 4.0, 6.0)
"""Standard deviations of the logits, from an undecided model to a decided one."""
NUM_STEPS = 120
SEEDS = (1, 2)
MODES = ("none", "gradients", "all")


def excess_slope(got: Tensor, want: Tensor) -> float:
    """<got, want> / <want, want> - 1 in fp64."""
    return float((got.double() * want).sum() / (want * want).sum()) - 1


def batch(
    spread: float, tokens: int = TOKENS, vocabulary: int = VOCABULARY, width: int = WIDTH, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`hidden [tokens, width]` and `weight [vocabulary, width]` in bf16, whose logits have this standard deviation,
    and labels drawn from them.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    weight = (torch.randn(vocabulary, width, generator=generator) * spread / width**0.5).bfloat16()
    probabilities = torch.softmax(hidden.float() @ weight.float().t(), dim=-1)
    return hidden, weight, torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def gradients_by_format(spread: float) -> dict[str, Any]:
    """The entry of one spread."""
    hidden, weight, labels = batch(spread)
    exact = torch.softmax(hidden.double() @ weight.double().t(), dim=-1)
    mean_loss = float(-exact.gather(-1, labels[:, None]).log().mean())
    exact[torch.arange(len(labels)), labels] -= 1
    exact /= len(labels)
    want = {"hidden": exact @ weight.double(), "weight": exact.t() @ hidden.double()}
    logits = hidden @ weight.t()
    bound = torch.tensor(1 / len(labels))
    _, statistics = softmax.torch_losses(logits, labels)
    softmax.torch_to_gradient_(logits, statistics, labels, bound)
    largest = logits.abs().amax()
    found: dict[str, Any] = {
        "logits_std": spread,
        "mean_loss": mean_loss,
        "largest_over_bound": float(largest / bound),
        "ways": {},
    }
    wide = {"hidden": logits @ weight, "weight": logits.t() @ hidden}
    found["ways"]["bf16"] = {name: compared(wide[name], want[name]) for name in want}
    casts = fp8_head.cast_to_fp8(hidden), fp8_head.cast_to_fp8(weight)
    for name, fp8_format, scale in (
        ("e5m2, bound", E5M2, bound),
        ("e5m2, own maximum", E5M2, largest),
        ("e4m3, bound", E4M3, bound),
    ):
        grad = fp8_head.cast_to_fp8(logits, fp8_format, amax=scale)
        flushed = (grad.values.float() == 0) & (logits != 0)
        got = {
            "hidden": fp8_head.multiply(casts[1], grad, "NN", torch.bfloat16),
            "weight": fp8_head.multiply(casts[0], grad, "NT", torch.bfloat16),
        }
        found["ways"][name] = {
            **{side: compared(got[side], want[side]) for side in want},
            "flushed": float(flushed.sum() / (logits != 0).sum()),
            "lost_mass": float((logits.abs() * flushed).sum() / bound / len(labels)),
        }
    return found


def compared(got: Tensor, want: Tensor) -> dict[str, float]:
    """Error and slope of a gradient; `want` is fp64."""
    return {"error": relative_difference(got, want), "slope_minus_1": excess_slope(got, want)}


@contextlib.contextmanager
def emulated_head(mode: str) -> Iterator[None]:
    """Training in this process has the head of --fp8_lm_head, which on a CPU no run can ask for."""
    attach = Precision.attach

    def attach_with_head(self: Precision, model: Any, layers: Any) -> None:
        attach(self, model, layers)
        if mode != "none":
            self.fp8_head = Fp8Head(model.get_output_embeddings(), mode)  # type: ignore[arg-type]

    Precision.attach = attach_with_head  # type: ignore[method-assign]
    try:
        yield
    finally:
        Precision.attach = attach  # type: ignore[method-assign]


def train(mode: str, seed: int, folder: Path) -> dict[str, Any]:
    """The losses of a training of the embedded model with two micro-batches a step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with emulated_head(mode):
        run_training(
            parse_config(
                [
                    "--mixed_precision=bf16",
                    "--max_seq_length=128",
                    "--batch_size=8",
                    "--gradient_accumulation_steps=2",
                    f"--max_steps={NUM_STEPS}",
                    f"--seed={seed}",
                    "--num_warmup_steps=10",
                    "--eval_batches=16",
                    "--no_export",
                    f"--output_dir={folder}",
                ]
            )
        )
    records = read_metrics(folder / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record]
    return {"losses": losses, "eval_loss": evaluated[-1]}


def main() -> None:
    """Measure both and write the result."""
    OneSentenceParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()  # --help must not measure anew
    by_format = [gradients_by_format(spread) for spread in SPREADS]
    with tempfile.TemporaryDirectory() as scratch:
        trained = {
            str(seed): {mode: train(mode, seed, Path(scratch) / f"{mode}-{seed}") for mode in MODES} for seed in SEEDS
        }
    record = {
        "provenance": collect_provenance(sys.argv),
        "shape": {"vocabulary": VOCABULARY, "width": WIDTH, "tokens": TOKENS},
        "gradients": by_format,
        "training": {"num_steps": NUM_STEPS, "by_seed": trained},
    }
    write_json_atomic(RESULT, record)
    for entry in by_format:
        print(f"logits' deviation {entry['logits_std']}, loss {entry['mean_loss']:.2f}")
        for name, way in entry["ways"].items():
            told = ", ".join(
                f"{side} {way[side]['error']:.2%} ({way[side]['slope_minus_1']:+.2%})" for side in ("hidden", "weight")
            )
            print(
                f"  {name:20} {told}"
                + (f", flushed {way['flushed']:.1%}, mass {way['lost_mass']:.3%}" if "flushed" in way else "")
            )
    for seed, runs in trained.items():
        print(
            f"seed {seed}: "
            + ", ".join(f"{mode} {run['losses'][-1]:.4f} (eval {run['eval_loss']:.4f})" for mode, run in runs.items())
        )


if __name__ == "__main__":
    main()
