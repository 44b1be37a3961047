"""Short training runs, started as a user starts them and read from their run folders.

On a GPU two decoder layers of --model_name are trained from random weights on the embedded dataset, at the user's
sequence length and batch size: in bf16, then in each fp8 recipe, which is judged by its certificate, its attention, and
its losses beside those of bf16. Without a GPU the embedded model trains on the CPU; torchao's recipes are emulated.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from llm_fp8.config.recipes import Backend, recipe_names
from llm_fp8.tools.verify.result import Result, Setup
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json, read_metrics
from llm_fp8.utils.packages import REPOSITORY, TRANSFORMER_ENGINE
from llm_fp8.utils.subprocesses import Ended, run_program, torchrun

OPTIONS = shlex.split("--max_steps 6 --learning_rate 1e-4 --log_every 1 --packing --validation_fraction 0 --no_export")
"""The fifth step's kernels are recorded for the certificate."""
CPU_OPTIONS = shlex.split("--model_name embedded --max_seq_length 256 --batch_size 2 --num_of_samples 200")
NUM_LAYERS = 2
MAX_LOSS_DIFFERENCE = 0.02
"""fp8 moves the losses of these few steps from bf16's by far less; a wrong scale or layout moves them by much more."""


class Run(NamedTuple):
    """A run that has ended; the summary and the losses (nats per supervised token) are empty where it wrote none."""

    name: str
    command: list[str]
    ended: Ended
    summary: dict[str, Any]
    losses: list[float]


def cut_model(setup: Setup) -> Path:
    """A model folder with the embedded tokenizer and the config of --model_name, cut to `NUM_LAYERS` layers and the
    tokenizer's vocabulary. Raises `UserError` for a model that is not there.
    """
    from llm_fp8.config.options import ModelConfig
    from llm_fp8.data.embedded import MODEL_DIR
    from llm_fp8.models.source import load_config, resolve_source

    folder = setup.scratch / "model"
    if folder.exists():
        return folder
    options = ModelConfig(model_name=setup.model_name, random_init=True)
    config: Any = load_config(options, resolve_source(options))
    config.vocab_size = read_json(MODEL_DIR / "config.json")["vocab_size"]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.num_hidden_layers = NUM_LAYERS
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:NUM_LAYERS]
    config.save_pretrained(folder)
    for file in MODEL_DIR.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def fp8_words(backend: Backend, name: str) -> list[str]:
    """The options of an fp8 recipe, which must not fall back to another one."""
    strict = ["--fp8_strict"] if backend == "te" else []  # torchao's recipes have no fallback
    return ["--mixed_precision", "fp8", "--fp8_backend", backend, "--fp8_scenario", name, *strict]


def train(setup: Setup, name: str, *words: str, num_processes: int = 0) -> Run:
    """Train for a few steps; `num_processes`: under torchrun, where it is not 0."""
    folder = Path(tempfile.mkdtemp(dir=setup.scratch, prefix=name)) / "run"
    shape = CPU_OPTIONS
    if setup.num_gpus:
        shape = ["--max_seq_length", str(setup.max_seq_length), "--batch_size", str(setup.batch_size)]
        shape += ["--model_name", str(cut_model(setup)), "--random_init"]
    given = (*OPTIONS, *shape, *words, "--output_dir", str(folder))
    if num_processes:
        command = torchrun(num_processes, str(REPOSITORY / "train_multi_gpu.py"), *given)
    else:
        command = [sys.executable, str(REPOSITORY / "train_fp8.py"), *given]
    ended = run_program(command, log=folder.with_suffix(".log"), timeout_s=300)
    if ended.failure is not None:
        return Run(name, command, ended, {}, [])
    losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    return Run(name, command, ended, read_json(folder / "summary.json"), losses)


def judge(result: Result, run: Run, baseline: Run | None = None) -> None:
    """Add a run to the result: it must end, be certified, use fast attention, learn, and stay near `baseline`."""
    name, losses, again = run.name, run.losses, shlex.join(run.command)
    result.facts[name] = {"wall_s": run.ended.wall_s, "losses": losses, "summary": run.summary}
    if run.ended.failure is not None:
        result.fail(f"{name}: the run failed: {run.ended.failure}", again)
        result.details += run.ended.output.strip().splitlines()[-12:]
        return
    certificate = run.summary.get("certificate") or {}
    verdict = certificate.get("verdict", "certified")
    if verdict != "certified":
        report = result.fail if verdict == "failed" else result.warn
        report(f"{name}: the certificate is {verdict}: {'; '.join(certificate['reasons'])}", again)
    if run.summary["attention_backend"] == "unfused":
        fix = "unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN CUDNN_HOME CUDNN_PATH"
        result.fail(f"{name}: attention runs unfused, several times slower than cuDNN's", fix)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        result.fail(f"{name}: the loss does not fall ({losses})", again)
    elif baseline is not None and baseline.losses:
        away = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, baseline.losses, strict=True))
        if away > MAX_LOSS_DIFFERENCE:
            result.fail(f"{name}: the losses {losses} are {away:.1%} from bf16's {baseline.losses}", again)
    ran = f", {verdict}, {certificate['num_fp8_gemm_kernels']} fp8 GEMM kernels" if certificate else ""
    result.details.append(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}{ran}, {run.ended.wall_s:.0f} s")


def train_in_each(setup: Setup, backend: Backend, recipes: Iterable[str], *words: str) -> Result:
    """Train in bf16, then in each recipe of the backend."""
    result = Result()
    baseline = train(setup, "bf16", "--mixed_precision", "bf16", *words)
    judge(result, baseline)
    for name in recipes:
        judge(result, train(setup, name, *fp8_words(backend, name), *words), baseline)
    if not result.failures:
        where = "certified" if setup.num_gpus else "on the CPU, so nothing is said of fp8 kernels"
        attention = baseline.summary["attention_backend"]
        result.summary = f"{', '.join(result.facts)}: the loss falls as it should, {where}; attention: {attention}"
    return result


def check_steps(setup: Setup) -> Result:
    """bf16 and each of Transformer Engine's recipes that this GPU has; on the CPU bf16 alone."""
    if not setup.num_gpus:
        return train_in_each(setup, "te", ())
    import torch

    from llm_fp8.config.options import PrecisionConfig
    from llm_fp8.precision.plan import resolve_precision

    usable, lacking = [], []
    for name in recipe_names("te"):
        options = PrecisionConfig(mixed_precision="fp8", fp8_scenario=name, fp8_strict=True)
        try:
            resolve_precision(options, torch.device("cuda", 0))
            usable.append(name)
        except UserError as error:
            lacking.append(f"{name}: {error}")
    result = train_in_each(setup, "te", usable, "--use_te")
    result.details += lacking
    if not usable:
        result.fail("no fp8 recipe of Transformer Engine runs on this GPU", TRANSFORMER_ENGINE.install)
    return result


def check_torchao_steps(setup: Setup) -> Result:
    """bf16 and each of torchao's recipes, emulated on the CPU. A lacking package is a warning: one option needs it."""
    result = train_in_each(setup, "torchao", recipe_names("torchao"))
    if result.failures and all("exit code 2" in sentence for sentence in result.failures):
        result.warnings, result.failures = result.failures, []
    return result


def check_several_gpus(setup: Setup) -> Result:
    """fp8 on all GPUs, sharded with FSDP2."""
    result, words = Result(), ("--use_te", "--sharding_mode", "fsdp_full", *fp8_words("te", "delayed"))
    judge(result, train(setup, "fsdp_full", *words, num_processes=setup.num_gpus))
    if not result.failures:
        result.summary = f"fsdp_full trains in fp8 on {setup.num_gpus} GPUs"
    return result
