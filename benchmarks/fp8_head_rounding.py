"""What --fp8_lm_head rounds, emulated on a CPU: the gradients of one batch by format, and trainings of the embedded
model; or loss and gradients of a pretrained model by the scales of the cast.

    python benchmarks/fp8_head_rounding.py     (CPU, some ten minutes; writes benchmarks/results/fp8_head_rounding.json)
    python benchmarks/fp8_head_rounding.py --model FOLDER --text FILE      (the pretrained model; fp8_head_scales.json)

Gradients: an output head of Llama 3's vocabulary over random hidden states. Logits are normal with a standard deviation
that is given, and labels are drawn from their softmax, so that the head is calibrated and its gradient is noise, as it
nearly is late in training. Each way to compute is held against fp64 on the same bf16 operands:

    error         Frobenius norm of the difference over that of the exact gradient
    slope - 1     projection of the result on the exact gradient, less one: what is not noise
    flushed       share of the entries of the softmax's gradient in bf16 that are not zero and become it
    lost mass     share of the probability that these hold

Training: from random weights, in bf16 with fp32 masters, the head's products in bf16, its gradients in emulated fp8, or
all of them so. The evaluation is exact in all. Two seeds show what noise is.

Pretrained model: its hidden states of the supervised tokens of held-out rows, the split of benchmarks/pretrained.py.
Loss: the difference from the bf16 head's, the mean over rows of a row's mean, with a paired 95% interval. Gradients: as
above, from bf16 logits (`gradients`) and from those in fp8 (`all`), of one batch. An operand has one scale, one for
each row of what its GEMM contracts, or one for each 128 values of it (the weight: 128x128), as DeepSeek and Transformer
Engine's block scaling. What the rounding of one weight does to the loss depends on where its values lie between those
of E4M3, so the loss is measured with the weight's scales at 8 positions within a factor of two: as they are, and less.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.pretrained import held_out_batches
from llm_fp8.config.parser import parse_config
from llm_fp8.kernels import fp8_lm_head as fp8_head
from llm_fp8.kernels import softmax
from llm_fp8.kernels.fp8_lm_head import E4M3, E5M2, EmulatedOperand, Fp8Head
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.precision.context import Precision
from llm_fp8.tools.compare.statistics import t_interval
from llm_fp8.train.run import run_training
from llm_fp8.utils.errors import OneSentenceParser, run_script
from llm_fp8.utils.json_files import read_metrics, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

RESULT = REPOSITORY / "benchmarks" / "results" / "fp8_head_rounding.json"
VOCABULARY, WIDTH, TOKENS = 128_256, 64, 256
SPREADS = (2.0, 4.0, 6.0)
"""Standard deviations of the logits, from an undecided model to a decided one."""
NUM_STEPS = 120
SEEDS = (1, 2)
MODES = ("none", "gradients", "all")
SCALES_RESULT = RESULT.with_name("fp8_head_scales.json")
SCALES = ("tensor", "row", "block")
BLOCK = 128
SHIFTS = tuple(step / 8 for step in range(8))
"""Of the weight's scales, in powers of two."""
NUM_ROWS, BATCH_TOKENS = 80, 2048
"""Of the pretrained model: held-out rows, and the tokens of a GEMM."""


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
    want, mean_loss = exact_gradients(hidden, weight, labels)
    logits = hidden @ weight.t()
    bound = to_gradient_(logits, labels)
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


def exact_gradients(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], float]:
    """The gradients of the mean loss in fp64, and that loss."""
    exact = torch.softmax(hidden.double() @ weight.double().t(), dim=-1)
    mean_loss = float(-exact.gather(-1, labels[:, None]).log().mean())
    exact[torch.arange(len(labels)), labels] -= 1
    exact /= len(labels)
    return {"hidden": exact @ weight.double(), "weight": exact.t() @ hidden.double()}, mean_loss


def to_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite `logits` with the mean loss's gradient; returns the bound of its entries."""
    bound = torch.tensor(1 / len(labels))
    softmax.torch_to_gradient_(logits, softmax.torch_losses(logits, labels)[1], labels, bound)
    return bound


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


def cast_by_scales(
    tensor: Tensor,
    scales: str,
    contracted: int,
    fp8_format: torch.dtype = E4M3,
    *,
    square: bool = False,
    bound: Tensor | None = None,
    shift: float = 0.0,
) -> EmulatedOperand:
    """`tensor [n, m]` in fp8 by its own maxima for a GEMM that contracts dimension `contracted`; `scales` is one of
    `SCALES`. `square` blocks are 128x128. A `bound` replaces the whole tensor's maximum. `shift` lowers the scales.
    """
    if scales == "tensor":
        return fp8_head.emulated_cast(tensor, fp8_format, (tensor.abs().amax() if bound is None else bound) * 2**shift)
    shape = (1, tensor.shape[contracted]) if scales == "row" else (BLOCK if square else 1, BLOCK)
    amax = block_amax(tensor, *(shape if contracted == 1 else reversed(shape))).float() * 2**shift
    limit = torch.finfo(fp8_format).max
    scale = torch.where(amax == 0, 1.0, limit / amax)
    return EmulatedOperand((tensor.float() * scale).clamp(-limit, limit).to(fp8_format), 1 / scale)


def block_amax(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Each entry's block's largest magnitude; the last blocks may be cut off."""
    n, m = tensor.shape
    padded = F.pad(tensor.abs(), (0, -m % columns, 0, -n % rows))
    amax = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    return amax.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :m]


def logits_by_scales(hidden: Tensor, weight: Tensor, scales: str, shift: float = 0.0) -> Tensor:
    """bf16 logits of E4M3 operands; of bf16's for "bf16"."""
    if scales == "bf16":
        return hidden @ weight.t()
    operands = cast_by_scales(weight, scales, 1, square=True, shift=shift), cast_by_scales(hidden, scales, 1)
    return fp8_head.multiply(*operands, "TN", torch.bfloat16)


def loss_by_scales(hidden: Tensor, weight: Tensor, labels: Tensor, lengths: list[int]) -> dict[str, Any]:
    """The bf16 head's loss of rows of so many tokens, and what each way to scale adds: the mean over `SHIFTS` with its
    interval over rows, and the mean over rows with each.
    """

    def means(scales: str, shift: float = 0.0) -> Tensor:
        batches = zip(hidden.split(BATCH_TOKENS), labels.split(BATCH_TOKENS), strict=True)
        losses = [
            softmax.torch_losses(logits_by_scales(rows, weight, scales, shift), wanted)[0] for rows, wanted in batches
        ]
        return torch.stack([row.double().mean() for row in torch.cat(losses).split(lengths)])

    bf16 = means("bf16")
    added = {}
    for scales in SCALES:
        by_shift = torch.stack([means(scales, shift) - bf16 for shift in SHIFTS])
        interval = asdict(t_interval(by_shift.mean(dim=0).tolist()))
        added[scales] = {**interval, "by_shift": by_shift.mean(dim=1).tolist()}
    return {"bf16": float(bf16.mean()), "added": added}


def gradients_by_scales(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Any]:
    """The entry of one batch: mode, scales and the format of the logits' gradient -> errors of both gradients."""
    want, mean_loss = exact_gradients(hidden, weight, labels)
    ways: dict[str, Any] = {}
    for scales in ("bf16", *SCALES):
        for mode in MODES[1:] if scales != "bf16" else MODES[:1]:
            grad = logits_by_scales(hidden, weight, scales if mode == "all" else "bf16")
            bound = to_gradient_(grad, labels)
            if scales == "bf16":
                got = {"hidden": grad @ weight, "weight": grad.t() @ hidden}
                ways["bf16"] = {side: compared(got[side], want[side]) for side in want}
                continue
            operands = {
                "hidden": cast_by_scales(weight, scales, 0, square=True), "weight": cast_by_scales(hidden, scales, 0)
            }  # fmt: skip
            for fp8_format, name in ((E5M2, "e5m2"), (E4M3, "e4m3")):
                way = ways[f"{mode}, {scales}, {name}"] = {}
                for side, layout, contracted in (("hidden", "NN", 1), ("weight", "NT", 0)):
                    cast = cast_by_scales(grad, scales, contracted, fp8_format, bound=bound)
                    product = fp8_head.multiply(operands[side], cast, layout, torch.bfloat16)  # type: ignore[arg-type]
                    flushed = (cast.values.float() == 0) & (grad != 0)
                    way[side] = {
                        **compared(product, want[side]),
                        "flushed": float(flushed.sum() / (grad != 0).sum()),
                        "zero_rows": float((product == 0).all(dim=1).double().mean()),
                    }
    return {"mean_loss": mean_loss, "ways": ways}


@torch.no_grad()
def pretrained_head(settings: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """A model's hidden states at the supervised tokens of held-out rows, its head's weight, the labels and each row's
    number of these tokens.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16).eval()
    hidden: list[Tensor] = []
    labels: list[Tensor] = []
    with tempfile.TemporaryDirectory() as scratch:
        batches = held_out_batches(argparse.Namespace(**vars(settings), data_cache_dir=scratch))
    for ids, wanted in (row for one in batches for row in zip(one.input_ids, one.labels, strict=True)):
        supervised = (wanted != softmax.IGNORE_INDEX).nonzero()[:, 0]
        if len(labels) < NUM_ROWS and len(supervised):  # no padding: attention is causal
            states = model.base_model(ids[None, : supervised[-1] + 1]).last_hidden_state[0]
            hidden.append(states[supervised])
            labels.append(wanted[supervised])
    weight = model.get_output_embeddings().weight.detach()
    return torch.cat(hidden), weight, torch.cat(labels), [len(row) for row in labels]


def measure_pretrained(settings: argparse.Namespace) -> None:
    """Measure a pretrained model's head and write the result."""
    hidden, weight, labels, lengths = pretrained_head(settings)
    loss = loss_by_scales(hidden, weight, labels, lengths)
    entry = gradients_by_scales(hidden[:BATCH_TOKENS], weight, labels[:BATCH_TOKENS])
    record = {
        "provenance": collect_provenance(sys.argv),
        "shape": {"vocabulary": len(weight), "width": weight.shape[1], "rows": len(lengths), "tokens": len(labels)},
        "loss": loss,
        "gradients": entry,
    }
    write_json_atomic(SCALES_RESULT, record)
    print(f"bf16's loss {loss['bf16']:.4f}")
    for scales, found in loss["added"].items():
        by_shift = " ".join(f"{value:+.4f}" for value in found["by_shift"])
        print(f"  {scales:8} {found['value']:+.4f} ({found['low']:+.4f} to {found['high']:+.4f}); by shift {by_shift}")
    for name, way in entry["ways"].items():
        print(f"  {name:23} " + ", ".join(f"{side} {describe(way[side])}" for side in way))


def describe(found: dict[str, float]) -> str:
    """Error and slope of a gradient, and what its cast lost."""
    lost = f", flushed {found['flushed']:.1%}, zero rows {found['zero_rows']:.1%}" if "flushed" in found else ""
    return f"{found['error']:.2%} ({found['slope_minus_1']:+.2%}{lost})"


def main() -> int:
    """Measure and write the result."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])  # --help must not measure anew
    parser.add_argument("--model", type=Path, help="folder with pretrained weights")
    parser.add_argument("--text", type=Path, dest="data", help="JSONL file in OpenMathInstruct-2's columns")
    settings = parser.parse_args()
    if (settings.model is None) != (settings.data is None):
        parser.error("--model and --text go together")
    if settings.model is not None:
        measure_pretrained(settings)
    else:
        measure_made_up()
    return 0


def measure_made_up() -> None:
    """Measure both and write the result."""
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
    run_script(main)
