"""Start short training runs by a user's commands, and read the results from their run folders.

On a GPU, two decoder layers of --model_name train from random weights on the bundled dataset, in bf16 and in each fp8
recipe. A recipe is judged by its certificate, its attention backend and the distance of its losses from bf16's. Without
a GPU, the tiny bundled model trains on the CPU and emulates torchao's recipes.
"""

from __future__ import annotations

import importlib.util
import math
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from llm_fp8.config.options import Config, ModelConfig
from llm_fp8.config.recipes import DEFAULTS, recipe_names
from llm_fp8.tools.programs import Outcome, recipe_argv, run_program, training_command
from llm_fp8.tools.verify.checks import Result, Setup
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json, read_jsonl
from llm_fp8.utils.packages import TRANSFORMER_ENGINE

OPTIONS = shlex.split("--max_steps 6 --learning_rate 1e-4 --log_every 1 --packing --validation_fraction 0 --no_export")
"""Options of every run. The certificate records the kernels of the fifth step."""
CPU_OPTIONS = shlex.split("--model_name embedded --max_seq_length 256 --batch_size 2 --num_of_samples 200")
NUM_LAYERS = 2
MAX_LOSS_DIFFERENCE = 0.02
"""Largest relative difference from bf16's losses. Correct fp8 stays far below, a wrong scale or layout far above."""


class Run(NamedTuple):
    """A run and its results. If it failed, its summary and its losses (nats per supervised token) are empty."""

    name: str
    command: list[str]
    outcome: Outcome
    summary: dict[str, Any]
    losses: list[float]


def cut_model(setup: Setup) -> Path:
    """Return a model folder that has a bundled tokenizer and --model_name's config, cut to `NUM_LAYERS` layers."""
    from llm_fp8.data.embedded import MODEL_DIR
    from llm_fp8.models.source import load_config, resolve_source

    folder = setup.scratch / "model"
    if folder.exists():
        return folder
    config: Any = load_config(resolve_source(ModelConfig(model_name=setup.model_name, random_init=True)))
    config.vocab_size = read_json(MODEL_DIR / "config.json")["vocab_size"]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.num_hidden_layers = NUM_LAYERS
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:NUM_LAYERS]
    config.save_pretrained(folder)
    for file in MODEL_DIR.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def train(setup: Setup, name: str, *argv: str, num_processes: int = 1) -> Run:
    folder = Path(tempfile.mkdtemp(dir=setup.scratch, prefix=name)) / "run"
    shape = CPU_OPTIONS
    if setup.num_gpus:
        shape = ["--max_seq_length", str(setup.max_seq_length), "--batch_size", str(setup.batch_size)]
        shape += ["--model_name", str(cut_model(setup)), "--random_init"]
    command = training_command(num_processes, *OPTIONS, *shape, *argv, "--output_dir", str(folder))
    outcome = run_program(command, log=folder.with_suffix(".log"), timeout_s=300)
    if outcome.failure is not None:
        return Run(name, command, outcome, {}, [])
    losses = [record["loss"] for record in read_jsonl(folder / "metrics.jsonl") if "loss" in record]
    return Run(name, command, outcome, read_json(folder / "summary.json"), losses)


def judge(result: Result, run: Run, baseline: Run | None = None) -> None:
    """Add a run's facts and failures to `result`. The kernels must have the requested precision, attention must be
    fused, and the loss must fall. Losses must stay within `MAX_LOSS_DIFFERENCE` (relative) of those of `baseline`.
    """
    name, losses, rerun = run.name, run.losses, shlex.join(run.command)
    result.facts[name] = {"wall_s": run.outcome.wall_s, "losses": losses, "summary": run.summary}
    if run.outcome.failure is not None:
        result.fail(f"{name}: the run failed: {run.outcome.failure}", rerun)
        result.details += run.outcome.output.strip().splitlines()[-12:]
        return
    certificate = run.summary.get("certificate") or {}
    verdict = certificate.get("verdict", "certified")
    if verdict != "certified":
        report = result.fail if verdict == "failed" else result.warn
        report(f"{name}: the certificate is {verdict}: {'; '.join(certificate['reasons'])}", rerun)
    if run.summary["attention_backend"] == "unfused":
        fix = "unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN CUDNN_HOME CUDNN_PATH"
        result.fail(f"{name}: attention runs unfused, several times slower than cuDNN's", fix)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        result.fail(f"{name}: the loss does not fall ({losses})", rerun)
    elif baseline is not None and baseline.losses:
        difference = max(abs(loss / base - 1) for loss, base in zip(losses, baseline.losses, strict=True))
        if difference > MAX_LOSS_DIFFERENCE:
            result.fail(f"{name}: the losses {losses} differ from bf16's {baseline.losses} by {difference:.1%}", rerun)
    kernels = f", {verdict}, {certificate['num_fp8_gemm_kernels']} fp8 GEMM kernels" if certificate else ""
    result.details.append(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}{kernels}, {run.outcome.wall_s:.0f} s")


def train_all(setup: Setup, recipes: Iterable[str], *argv: str) -> Result:
    """Train and judge a bf16 run and a run in each of `recipes`. A run that falls back to another recipe fails."""
    result = Result()
    baseline = train(setup, "bf16", "--mixed_precision", "bf16", *argv)
    judge(result, baseline)
    for name in recipes:
        judge(result, train(setup, name, *recipe_argv(name), "--fp8_strict", *argv), baseline)
    if not result.failures:
        evidence = "certified" if setup.num_gpus else "on the CPU, which has no fp8 kernels"
        result.summary = f"{', '.join(result.facts)}: the loss falls as it should, {evidence}"
        if attention := baseline.summary["attention_backend"]:  # known only with Transformer Engine
            result.summary += f"; attention: {attention}"
    return result


def check_steps(setup: Setup) -> Result:
    """Train in bf16 and in each recipe of Transformer Engine that this GPU supports. On the CPU, train in bf16 only."""
    if not setup.num_gpus:
        return train_all(setup, ())
    from llm_fp8.settle.machine import detect_machine
    from llm_fp8.utils.ranks import LaunchRanks

    try:
        unavailable = detect_machine(Config().with_options(mixed_precision="fp8", use_te=True), LaunchRanks()).lacking
    except UserError as error:  # Transformer Engine cannot be used
        unavailable = dict.fromkeys(recipe_names("te"), str(error))
    available = [name for name in recipe_names("te") if name not in unavailable]
    result = train_all(setup, available, "--use_te")
    result.details += [f"{name}: {reason}" for name, reason in unavailable.items()]
    if not available:
        result.fail("no fp8 recipe of Transformer Engine runs on this GPU", TRANSFORMER_ENGINE.install)
    return result


def check_torchao_steps(setup: Setup) -> Result:
    """Train in bf16 and in each recipe of torchao. A missing package is a warning, since only one option needs it."""
    result = train_all(setup, recipe_names("torchao"))
    if all("exit code 2" in sentence for sentence in result.failures):
        result.warnings += result.failures
        result.failures = []
    return result


def check_mode(setup: Setup, mode: str) -> Result:
    """Train in fp8 on all GPUs in the sharding mode `mode`, whose package may be missing."""
    if mode.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return Result("deepspeed is not installed", skipped=True)
    result = Result()
    argv = ("--fp8_strict", "--use_te", "--sharding_mode", mode, *recipe_argv(DEFAULTS["te"]))
    judge(result, train(setup, mode, *argv, num_processes=setup.num_gpus))
    result.summary = "" if result.failures else f"{mode} trains in fp8; GPUs: {setup.num_gpus}"
    return result
