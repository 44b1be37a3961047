"""Do two commits train identically? Compare the loss and gradient norm of every step, bit for bit, on the CPU.

    python benchmarks/same_losses.py OLD_REV NEW_REV        (minutes; exit code 1 at the first difference)

A refactoring must not change any number. Each commit is checked out into a temporary git worktree, and `TRAININGS` run
there on the tiny bundled model and dataset, with this interpreter and one thread per process. The last training uses
emulated fp8, the others use fp32. `loss` and `grad_norm` are read from metrics.jsonl, which has all their bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.json_files import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 20
COMMON = [
    *("--random_init", "--seed=7", "--max_seq_length=128", "--batch_size=4"),
    *("--gradient_accumulation_steps=2", "--num_of_samples=400", "--eval_batches=1", "--learning_rate=3e-3"),
    *("--lr_scheduler=constant", "--no_export"),
]
PLAIN = "--mixed_precision=no"
TORCHAO = ["--mixed_precision=fp8", "--fp8_backend=torchao"]
ONE = ["train_fp8.py"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TWO = [*TORCHRUN, "train_multi_gpu.py", PLAIN, "--sharding_mode=fsdp_full"]
TRAININGS: dict[str, list[list[str]]] = {
    "padded": [[*ONE, PLAIN, f"--max_steps={NUM_STEPS}"]],
    "packed": [[*ONE, PLAIN, f"--max_steps={NUM_STEPS}", "--packing"]],
    "LoRA": [[*ONE, PLAIN, f"--max_steps={NUM_STEPS}", "--lora_rank=4"]],
    "two ranks, fsdp_full": [[*TWO, f"--max_steps={NUM_STEPS}", "--packing"]],
    "interrupted and resumed": [
        [*ONE, PLAIN, f"--max_steps={NUM_STEPS}", f"--save_every={NUM_STEPS // 2}"],
        [*ONE, PLAIN, f"--max_steps={NUM_STEPS}", f"--resume_from={{run_dir}}/checkpoints/step-{NUM_STEPS // 2:08d}"],
    ],
    "torchao emulated": [[*ONE, *TORCHAO, f"--max_steps={NUM_STEPS}", "--packing", "--optimizer=adamw_fp32"]],
}
"""Name of a training -> its commands, which run one after the other in the same run folder, `{run_dir}`. Resuming from
the middle repeats the second half of the steps.
"""


@contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """Check out the commit `revision` into `folder` for the duration of the block."""
    git = ["git", "-C", str(ROOT), "worktree"]
    added = subprocess.run([*git, "add", "--detach", str(folder), revision], capture_output=True, text=True)
    if added.returncode != 0:
        raise UserError(f"{revision} cannot be checked out: {added.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def train(checkout: Path, commands: list[list[str]], run_dir: Path) -> list[tuple[int, float, float]]:
    """Run `commands` in turn in `checkout`, with the run folder `run_dir`. Return (step, loss, grad norm) per step."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_DATASETS_CACHE=str(run_dir.parent / "datasets"))
    for template in commands:
        options = [*(word.format(run_dir=run_dir) for word in template), *COMMON, f"--output_dir={run_dir}"]
        command = [sys.executable, *options]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        outcome = subprocess.run(command, cwd=checkout, env=environment, **streams)
        if outcome.returncode != 0:
            raise UserError(f"{' '.join(command)} ended with exit code {outcome.returncode}:\n{outcome.stdout[-3000:]}")
    records = read_jsonl(run_dir / "metrics.jsonl")
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records if "loss" in record]


def first_difference(old: list[tuple[int, float, float]], new: list[tuple[int, float, float]]) -> str | None:
    """Describe the first step whose numbers differ. Return None if all steps are equal and none is missing."""
    for (step, *before), (new_step, *after) in zip(old, new, strict=False):
        if (step, before) != (new_step, after):
            return f"step {step}: loss and grad_norm {before}, then (step {new_step}) {after}"
    for steps in (old, new):
        if [step for step, *_ in steps] != list(range(1, NUM_STEPS + 1)):
            return f"{len(steps)} steps were recorded, not {NUM_STEPS}"
    return None


def compare(old: str, new: str) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="same-losses-") as folder,
        worktree(old, Path(folder, "old")) as old_checkout,
        worktree(new, Path(folder, "new")) as new_checkout,
    ):
        for number, (name, commands) in enumerate(TRAININGS.items()):
            checkouts = (old_checkout, new_checkout)
            runs = [train(checkout, commands, Path(folder, f"{checkout.name}-{number}")) for checkout in checkouts]
            if (difference := first_difference(*runs)) is not None:
                print(f"{name}: {difference}")
                return 1
            print(f"{name}: {NUM_STEPS} steps are equal; the last loss is {runs[0][-1][1]!r}", flush=True)
    return 0


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="the commit to compare with the old one")
    options = parser.parse_args()
    return compare(options.old, options.new)


if __name__ == "__main__":
    run_script(main)
