"""How far AdamW's moments may be rounded: bf16 against fp32, at two values of beta2.

    python benchmarks/moment_dtypes.py            (CPU, some seconds; writes benchmarks/results/moment_dtypes.json)

AdamW runs twice on the same gradients, noise of a fixed scale for each coordinate plus 0.3 of it as signal, with master
weights in fp32: once with fp32 moments and once with moments rounded to the given dtypes after each step. Half-way the
gradients fall to a quarter, as they do when a model settles on new data: v has to follow downwards. Reported:
`relative_error`, the norm of the difference between the two runs' movements over that of the fp32 run's, in the first
and second half, and `v_ratio`, the rounded v over the fp32 v at the end (1 is right; larger means steps that are too
small by its square root).
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

NUM_COORDINATES = 20_000
NUM_STEPS = 2_000
LEARNING_RATE = 1e-5
BETA1, EPSILON = 0.9, 1e-8
SEED = 0
RESULT = Path(__file__).parent / "results" / "moment_dtypes.json"


class Run:
    """AdamW in fp32 on fp32 weights, with moments stored in the given dtypes between steps."""

    def __init__(self, m_dtype: torch.dtype, v_dtype: torch.dtype, beta2: float) -> None:
        self.beta2 = beta2
        self.movement = torch.zeros(NUM_COORDINATES)
        self.m = torch.zeros(NUM_COORDINATES, dtype=m_dtype)
        self.v = torch.zeros(NUM_COORDINATES, dtype=v_dtype)

    def step(self, index: int, gradient: torch.Tensor) -> None:
        m = self.m.float().lerp(gradient, 1 - BETA1)
        v = self.v.float().lerp(gradient.square(), 1 - self.beta2)
        m_hat, v_hat = m / (1 - BETA1 ** (index + 1)), v / (1 - self.beta2 ** (index + 1))
        self.movement -= LEARNING_RATE * m_hat / (v_hat.sqrt() + EPSILON)
        self.m, self.v = m.to(self.m.dtype), v.to(self.v.dtype)


def measure(m_dtype: torch.dtype, v_dtype: torch.dtype, beta2: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(SEED)
    scale = torch.exp(torch.randn(NUM_COORDINATES, generator=generator)) * 1e-3
    reference, rounded = Run(torch.float32, torch.float32, beta2), Run(m_dtype, v_dtype, beta2)
    result: dict[str, float] = {}
    for half in ("first", "second"):
        starts = reference.movement.clone(), rounded.movement.clone()
        for index in range(NUM_STEPS // 2):
            gradient = scale * (0.3 + torch.randn(NUM_COORDINATES, generator=generator))
            for run in (reference, rounded):
                run.step(index + (NUM_STEPS // 2 if half == "second" else 0), gradient)
        moved, want = rounded.movement - starts[1], reference.movement - starts[0]
        result[f"relative_error_{half}_half"] = ((moved - want).norm() / want.norm()).item()
        scale = scale / 4
    result["v_ratio"] = (rounded.v.float() / reference.v.float()).mean().item()
    return result


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()  # --help must not measure anew
    torch.set_num_threads(1)
    bf16, fp32 = torch.bfloat16, torch.float32
    rows = [
        {"beta2": beta2, "m": str(m), "v": str(v), **measure(m, v, beta2)}
        for beta2 in (0.95, 0.999)
        for m, v in ((bf16, fp32), (bf16, bf16))
    ]
    result: dict[str, Any] = {
        "script": "benchmarks/moment_dtypes.py",
        "machine": {"cpu": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "num_coordinates": NUM_COORDINATES,
        "num_steps": NUM_STEPS,
        "seed": SEED,
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
