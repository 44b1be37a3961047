"""What gradients lose when micro-batches are summed in bf16 instead of fp32.

    python benchmarks/grad_accumulation.py        (CPU, some seconds)

Writes benchmarks/results/grad_accumulation_bf16.json.

A micro-batch's gradient is modelled as scale_i * (signal + noise) for each coordinate i, rounded to bf16 as a backward
pass in bf16 leaves it. scale_i is log-normal over three orders of magnitude, as gradients of a layer are; noise is
standard normal and new in each micro-batch; the signal is the same in all of them. Its size tells the regimes apart: 0
(noise alone), 0.3 (fine- tuning on small micro-batches) and 3 (large micro-batches that nearly agree). The same rounded
gradients are summed twice, once in fp32 and once in bf16, where each addition is rounded to nearest, as autograd's
accumulation into a bf16 `.grad` does.

Reported for each number of micro-batches: `relative_error`, the norm of the difference over the norm of the fp32 sum,
and `shrinkage`, one minus the projection of the bf16 sum on the fp32 sum. `rounding_only` is the relative error of
rounding the fp32 sum to bf16 once: what is lost if only the result is bf16.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

NUM_COORDINATES = 200_000
NUM_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SIGNALS = (0.0, 0.3, 3.0)
SEED = 0
RESULT = Path(__file__).parent / "results" / "grad_accumulation_bf16.json"


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def measure(signal: float) -> list[dict[str, float]]:
    """One row for each number of micro-batches in `NUM_MICRO_BATCHES`."""
    generator = torch.Generator().manual_seed(SEED)
    scale = torch.exp(1.75 * torch.randn(NUM_COORDINATES, generator=generator)) * 1e-4
    in_fp32 = torch.zeros(NUM_COORDINATES)
    in_bf16 = torch.zeros(NUM_COORDINATES, dtype=torch.bfloat16)
    rows = []
    for count in range(1, max(NUM_MICRO_BATCHES) + 1):
        gradient = (scale * (signal + torch.randn(NUM_COORDINATES, generator=generator))).bfloat16()
        in_fp32 += gradient
        in_bf16 += gradient
        if count in NUM_MICRO_BATCHES:
            reference = in_fp32.double()
            rows.append(
                {
                    "num_micro_batches": count,
                    "relative_error": relative_error(in_bf16, in_fp32),
                    "shrinkage": 1.0 - ((in_bf16.double() @ reference) / (reference @ reference)).item(),
                    "rounding_only": relative_error(in_fp32.bfloat16(), in_fp32),
                }
            )
    return rows


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()  # --help must not measure anew
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "script": "benchmarks/grad_accumulation.py",
        "machine": {"cpu": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "num_coordinates": NUM_COORDINATES,
        "seed": SEED,
        "by_signal_to_noise": {str(signal): measure(signal) for signal in SIGNALS},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for signal, rows in result["by_signal_to_noise"].items():
        for row in rows:
            print(f"signal {signal}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
