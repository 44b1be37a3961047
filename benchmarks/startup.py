#!/usr/bin/env python
"""Time from the command to the end of the first optimizer step, with weights read from local safetensors files.

    python benchmarks/startup.py --model Llama-3.1-8B --output benchmarks/results/startup_8b.json -- \\
        --use_te --mixed_precision fp8
    python benchmarks/startup.py --model Llama-3.1-8B --num_gpus 4 --output benchmarks/results/startup_8b_x4.json -- \\
        --sharding_mode fsdp_full --use_te

Writes a folder as the hub lays it out (random weights, the embedded tokenizer), then starts the training command on it,
`--repeats` times, with what stands behind `--`. The phases are those that the run measures itself (`phases_s` of its
summary.json, docs/monitoring.md). The files were just written, so they are read from the page cache: the first start
after a reboot also waits for the disk.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.config.options import ModelConfig
from llm_fp8.models.architectures import bundled_architectures
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable, write_json_atomic
from llm_fp8.utils.subprocesses import torchrun

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.1


def write_model_folder(model: str, folder: Path) -> float:
    """Random bf16 weights of a bundled architecture as safetensors files; returns their size in bytes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_fp8.models.source import EMBEDDED_MODEL, load_config, resolve_source

    options = ModelConfig(model_name=model, random_init=True)
    config = load_config(options, resolve_source(options))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(folder, max_shard_size="5GB")
    del network
    gc.collect()
    torch.cuda.empty_cache()  # the training is another process, and needs the memory
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))


def phases_of(first_step_s: float, summary: dict[str, Any]) -> dict[str, float]:
    """Seconds by phase from the command to the end of the first step, in order.

    `launch` is what the run's own clock does not see: the launcher and the interpreter, before; the poll of its metrics
    (0.1 s), after.
    """
    phases = summary["phases_s"]
    return {"launch": first_step_s - sum(phases.values()), **phases}


def time_to_first_step(command: list[str], folder: Path, timeout_s: float) -> tuple[float, float, str]:
    """Run the command with `folder` as its output; seconds to the record of its first step and to its end, and what
    it printed.
    """
    started = time.monotonic()
    log = folder.with_suffix(".log")
    first_s: float | None = None
    metrics = folder / "metrics.jsonl"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if first_s is None and metrics.exists() and '"loss"' in metrics.read_text():
                first_s = time.monotonic() - started
            if time.monotonic() - started > timeout_s:
                process.terminate()
            time.sleep(POLL_S)
    if process.returncode or first_s is None:
        raise RuntimeError(
            f"the training ended with code {process.returncode} before its first step was "
            f"seen:\n{log.read_text()[-4000:]}"
        )
    return first_s, time.monotonic() - started, log.read_text()


def main() -> int:
    """Write the model, start the training, keep the times as JSON."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="Llama-3.1-8B", help="a bundled architecture (default %(default)s)")
    parser.add_argument("--num_gpus", type=int, default=1, help="1: train_fp8.py, more: train_multi_gpu.py (default 1)")
    parser.add_argument("--repeats", type=int, default=1, help="starts (default 1)")
    parser.add_argument(
        "--timeout_s", type=float, default=300, help="a start that takes longer has failed (default 300)"
    )
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("training", nargs="*", help="options of the training script, behind --")
    options = parser.parse_args()
    if options.model not in bundled_architectures():
        raise UserError(f"--model {options.model} is not bundled; give one of {', '.join(bundled_architectures())}.")
    for name in ("num_gpus", "repeats"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}.")
    require_writable("--output", options.output)
    from llm_fp8.observability.provenance import (
        collect_provenance,  # after the parser: --help and mistakes answer without loading torch
    )

    launch = [sys.executable, "train_fp8.py"]
    if options.num_gpus > 1:
        launch = torchrun(options.num_gpus, "train_multi_gpu.py")
    common = [
        "--batch_size=1",
        "--max_seq_length=1024",
        "--gradient_accumulation_steps=1",
        "--max_steps=2",
        "--log_every=1",
        "--no_export",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        size_bytes = write_model_folder(options.model, model)
        starts = []
        for number in range(options.repeats):
            folder = Path(scratch) / f"run-{number}"
            command = [*launch, f"--model_name={model}", *common, f"--output_dir={folder}", *options.training]
            first_s, total_s, log = time_to_first_step(command, folder, options.timeout_s)
            summary = json.loads((folder / "summary.json").read_text())
            phases = phases_of(first_s, summary)
            starts.append({"first_step_s": first_s, "phases_s": phases, "whole_run_s": total_s, "summary": summary})
            print("\n".join(log.splitlines()[-25:]), flush=True)
            print(f"first step after {first_s:.1f} s, end after {total_s:.1f} s", flush=True)
            print(", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items()), flush=True)
    record = {
        "provenance": collect_provenance(sys.argv),
        "model": options.model,
        "num_gpus": options.num_gpus,
        "weights_gib": size_bytes / 2**30,
        "from_page_cache": True,
        "starts": starts,
    }
    write_json_atomic(options.output, record)
    return 0


if __name__ == "__main__":
    run_script(main)
