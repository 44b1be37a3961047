"""What bf16 compute shows of the first updates when training starts from weights that bf16 holds exactly.

    python benchmarks/first_updates.py        (CPU, about a minute; writes benchmarks/results/first_updates.json)

The same training four times: computed in fp32 or in bf16 (fp32 master weights in both), from the embedded
architecture's random weights as they are or rounded to bf16 first, as published checkpoints are. An update smaller than
half a spacing of bf16 moves the master weights but not the bf16 copies that the model computes with, until updates add
up; weights that are not on bf16's grid are rounded up or down to begin with, and show the update on average. So only
the run from rounded weights should lag behind fp32.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.utils.errors import OneSentenceParser
from llm_fp8.utils.json_files import read_metrics, write_json_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "first_updates.json"
NUM_STEPS = 20
LEARNING_RATE = 1e-4


def write_models(folder: Path) -> dict[str, Path]:
    """Folders of a model with the same random weights, in fp32 and rounded to bf16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EMBEDDED_MODEL), dtype=torch.float32)
    folders = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        folders[name] = folder / name
        model.to(dtype).save_pretrained(folders[name])
        AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folders[name])
    return folders


def losses(model: Path, precision: str, folder: Path) -> list[float]:
    """Train; the loss of each step."""
    command = [
        sys.executable, "train_fp8.py", f"--model_name={model}", f"--mixed_precision={precision}",
        "--max_seq_length=256", "--batch_size=16", f"--learning_rate={LEARNING_RATE}", f"--max_steps={NUM_STEPS}",
        "--validation_fraction=0", "--no_export", f"--output_dir={folder}"
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = read_metrics(folder / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


def main() -> None:
    """Run the four trainings and write the result."""
    OneSentenceParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()  # --help must not measure anew
    with tempfile.TemporaryDirectory() as scratch:
        models = write_models(Path(scratch))
        runs = {
            weights: {
                compute: losses(model, option, Path(scratch) / f"{weights}-{compute}")
                for compute, option in (("fp32", "no"), ("bf16", "bf16"))
            }
            for weights, model in models.items()
        }
    lag = {
        weights: [bf16 / fp32 - 1 for bf16, fp32 in zip(run["bf16"], run["fp32"], strict=True)]
        for weights, run in runs.items()
    }
    record = {
        "provenance": collect_provenance(sys.argv),
        "learning_rate": LEARNING_RATE,
        "losses": runs,
        "bf16_over_fp32_minus_1": lag,
    }
    write_json_atomic(RESULT, record)
    for weights, values in lag.items():
        print(
            f"initial weights in {weights}: bf16's loss over fp32's "
            + ", ".join(f"{value:+.2%}" for value in values[:8])
        )


if __name__ == "__main__":
    main()
