"""The trainings of benchmarks/rivals.py, each in a process of its own, and the probe that reads all of them alike.

A job is a JSON file that names model, rows, shape and options of one training. Its process calls the trainer's own
entry; the probe hangs on torch's hook behind every optimizer step, so that no trainer is changed to be measured.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import TrainerCallback
from transformers.utils import import_utils

from llm_fp8.observability.kernel_trace import (
    LOW_PRECISION,
    KernelTime,
    KernelTimes,
    gemm_kernels,
    kernel_times,
    record_kernels,
    time_by_class,
)
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.adamw import local_part
from llm_fp8.optim.optimizers import not_optimised
from llm_fp8.precision.certificate import attention_library
from llm_fp8.utils.json_files import read_json, read_jsonl, read_metrics, write_json_atomic

ROOT = Path(__file__).resolve().parent.parent
RECORDED_STEP = 7
"""Whose kernels are recorded: a step of warm-up, behind the fifth, which our own runs record for their certificate."""
LEARNING_RATE = 1e-4
JOB_VARIABLE = "RIVALS_JOB"
"""Environment variable with the path of the job, for trainers that call back by name."""
_NAME_LENGTH = 120


class Probe:
    """Times, memory and kernels of a training's steps, and the storage of its optimizer; written at its end.

    A step ends with the optimizer's, after a synchronisation. Memory is counted from the second step on: what loading
    the weights took is left out.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        """Of all steps, in nats per token; set by the training."""
        self.tokens_per_step: float | None = None
        """Positions of this process that are no padding, on average; set by the training, or by `count_tokens`."""
        self.attention: str | None = None
        """What the trainer was asked for, or takes by itself."""
        self.remarks: list[str] = []
        """What had to be changed for the trainer to run."""
        self.model: nn.Module | None = None
        self._counted: list[float] = []
        self._optimizer: Optimizer | None = None
        self._ends_s: list[float] = []
        self._storage: dict[str, Any] | None = None
        self._kernels: dict[str, Any] | None = None
        self._memory = [0, 0]
        self._recording: contextlib.ExitStack | None = None
        self._recorded: Any = None
        register_optimizer_step_post_hook(self._stepped)

    def count_tokens(self, num_tokens: float) -> None:
        """Of one micro-batch of this process, without padding."""
        self._counted.append(num_tokens)

    def write(self, path: Path, micro_batches: int) -> None:
        """The JSON file of this process; `micro_batches` of a step."""
        if self.tokens_per_step is None and self._counted:
            self.tokens_per_step = statistics.mean(self._counted) * micro_batches
        lost = None
        if self.model is not None and self._optimizer is not None:
            lost = not_optimised(self.model, self._optimizer)
        write_json_atomic(
            path,
            {
                "ends_s": self._ends_s,
                "losses": self.losses,
                "tokens_per_step": self.tokens_per_step,
                "peak_memory_gib": self._memory[0] / GIB if torch.cuda.is_available() else None,
                "peak_reserved_memory_gib": self._memory[1] / GIB if torch.cuda.is_available() else None,
                "optimizer": self._storage,
                "parameters_not_in_the_optimizer": lost,
                "attention": self.attention,
                "kernels": self._kernels,
                "remarks": self.remarks,
            },
        )

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:  # a container around it
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self._ends_s.append(time.perf_counter())
        step = len(self._ends_s)
        if step == 1:
            self._storage = storage_of(optimizer)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
        elif on_gpu:
            # The largest so far: some trainers reset the counters themselves.
            now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self._memory = [max(pair) for pair in zip(self._memory, now, strict=True)]
        if on_gpu and step == RECORDED_STEP - 1:
            self._recording = contextlib.ExitStack()
            self._recorded = self._recording.enter_context(record_kernels())
        elif step == RECORDED_STEP and self._recording is not None:
            self._recording.close()
            self._kernels = describe_kernels(kernel_times(self._recorded))
            self._recorded = None


def storage_of(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer's live tensors occupy right after a step, in bytes per parameter of this process, by dtype."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_parameters = sum(local_part(parameter).numel() for parameter in parameters)
    found: dict[str, dict[str, int]] = {"parameters": {}, "gradients": {}, "state": {}}

    def add(kind: str, name: str, tensor: Tensor) -> None:
        label = f"{name}{_dtype_name(tensor)}"
        found[kind][label] = found[kind].get(label, 0) + _num_bytes(tensor)

    for parameter in parameters:
        add("parameters", "", parameter)
        if parameter.grad is not None:
            add("gradients", "", parameter.grad)
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.numel() > 1:
                add("state", f"{name} ", value)
    total = sum(size for sizes in found.values() for size in sizes.values())
    per_parameter = {
        kind: {label: size / num_parameters for label, size in sizes.items()} for kind, sizes in found.items()
    }
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "num_parameters": num_parameters,
        "bytes_per_parameter": per_parameter,
        "total_bytes_per_parameter": total / num_parameters,
    }


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor subclass holds, such as codes and scales."""
    local = local_part(tensor)
    if type(local) in (Tensor, nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
        return [local]
    return [part for name in local.__tensor_flatten__()[0] for part in _parts(getattr(local, name))]


def _num_bytes(tensor: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _parts(tensor))


def _dtype_name(tensor: Tensor) -> str:
    return str(max(_parts(tensor), key=Tensor.numel).dtype).removeprefix("torch.")


def describe_kernels(times: KernelTimes) -> dict[str, Any]:
    """The recorded step's kernels: GEMMs by operand type, seconds by class, and what attention ran on."""
    gemms, classes = gemm_kernels(times), time_by_class(times)
    gemm_s = sum(found.time_s for found in gemms.values())
    low = [gemms[kind] for kind in LOW_PRECISION if kind in gemms]
    attention = classes.get("attention", KernelTime())
    return {
        "num_gemm_kernels": {str(kind): found.count for kind, found in gemms.items()},
        "num_fp8_gemm_kernels": sum(found.count for found in low),
        "fp8_gemm_time_share": sum(found.time_s for found in low) / gemm_s if gemm_s else None,
        "time_s_by_class": {name: found.time_s for name, found in classes.items()},
        "attention_library": attention_library(times),
        "attention_kernels": [name[:_NAME_LENGTH] for name in list(attention.names)[:3]],
    }


# ---- ours ----


def our_words(job: dict[str, Any]) -> list[str]:
    """The command of this project's training, without python."""
    options = {
        "model_name": job["model"],
        "dataset_name": job["rows"],
        "mixed_precision": job["options"]["mixed_precision"],
        "batch_size": job["batch_size"],
        "gradient_accumulation_steps": job["micro_batches"],
        "max_seq_length": job["seq_length"],
        "max_steps": job["steps"],
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "num_warmup_steps": 0,
        "validation_fraction": 0,
        "log_every": 1,
        "output_dir": job["folder"],
    }
    if job["num_gpus"] > 1:
        options["sharding_mode"] = "fsdp_full"
    elif job["light"]:
        options["optimizer"] = "adamw_8bit"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    script = "train_fp8.py" if job["num_gpus"] == 1 else "train_multi_gpu.py"
    switches = ["--packing", "--no_export"]
    switches += ["--use_te"] if torch.cuda.is_available() else []
    switches += ["--sync_every_micro_batch"] if job["light"] and job["num_gpus"] > 1 else []
    return [script, *words, *switches]


def train_ours(job: dict[str, Any], probe: Probe) -> None:
    """train_fp8.py, or train_multi_gpu.py on several GPUs, as python starts it."""
    script, *words = our_words(job)
    sys.argv = [script, *words]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    steps = [record for record in read_metrics(Path(job["folder"], "metrics.jsonl")) if "loss" in record]
    tokens = [record["real_tokens_per_s"] * record["step_time_s"] for record in steps]
    probe.losses = [record["loss"] for record in steps]
    probe.tokens_per_step = statistics.mean(tokens) / job["num_gpus"]
    probe.attention = "Transformer Engine"


# ---- TRL ----


def best_packed_attention() -> str:
    """The fastest attention of transformers for packed documents that is installed here."""
    if not torch.cuda.is_available():
        return "sdpa"
    for version in (3, 4, 2):
        if getattr(import_utils, f"is_flash_attn_{version}_available")():
            return f"flash_attention_{version}"
    return "flex_attention"


def cast_for_flex_attention(probe: Probe) -> None:
    """Let transformers' flex attention have operands of one dtype: under autocast RoPE makes fp32 of queries and keys,
    which flash attention casts back and flex attention does not.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    flex = ALL_ATTENTION_FUNCTIONS["flex_attention"]

    def in_one_dtype(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return flex(module, query.to(value.dtype), key.to(value.dtype), value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["flex_attention"] = in_one_dtype
    probe.remarks.append("queries and keys of flex_attention cast to the values' dtype")


class TrlCallback(TrainerCallback):
    """Tells the probe what a Trainer knows."""

    def __init__(self, probe: Probe, fix_head_bias: bool) -> None:
        self._probe, self._fix_head_bias = probe, fix_head_bias

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._probe.model = kwargs["model"]
        head = kwargs["model"].get_output_embeddings()
        if self._fix_head_bias and head.bias is not None and head.bias.numel() == 0:
            # te.Linear has an empty tensor where nn.Linear has None, and TRL's fused head adds it to the logits.
            head.bias = None
            self._probe.remarks.append("lm_head.bias set from Transformer Engine's empty tensor to None")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._probe.losses = [record["loss"] for record in state.log_history if "loss" in record]


def train_sft(job: dict[str, Any], probe: Probe, model: Any, options: dict[str, Any], **arguments: Any) -> None:
    """SFTTrainer of the TRL that is installed, on prompts and completions, with the loss on the completions: TRL's
    default for them. `options` are SFTConfig's, `arguments` the trainer's.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    chats = [
        {
            "prompt": [{"role": "user", "content": row["problem"]}],
            "completion": [{"role": "assistant", "content": row["generated_solution"]}],
        }
        for row in read_jsonl(Path(job["rows"]))
    ]
    options = {"packing": True, **options}
    fix_head_bias = options.pop("fix_head_bias", False)
    documents_per_row = 1 if options["packing"] else job["documents_per_row"]
    if job["light"]:
        options["optim"] = "adamw_torch_8bit"
    args = SFTConfig(
        output_dir=job["folder"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch_size"] * documents_per_row,
        gradient_accumulation_steps=job["micro_batches"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        max_length=job["seq_length"],
        gradient_checkpointing=False,
        **options,
    )
    callback = TrlCallback(probe, fix_head_bias)
    trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_list(chats), callbacks=[callback], **arguments)
    collate = trainer.data_collator

    def counting(examples: list[dict[str, Any]]) -> dict[str, Any]:
        probe.count_tokens(sum(len(example["input_ids"]) for example in examples))
        return collate(examples)

    trainer.data_collator = counting
    trainer.train()


def train_with_trl(job: dict[str, Any], probe: Probe) -> None:
    """TRL's SFTTrainer."""
    options = dict(job["options"])
    probe.attention = options.pop("attention", "sdpa")
    if options.get("packing_strategy") == "bfd":
        if probe.attention == "best":
            probe.attention = best_packed_attention()
        if probe.attention == "flex_attention":
            cast_for_flex_attention(probe)
        # Of one size, for compiled flex attention and for fp8.
        options["pad_to_multiple_of"] = job["batch_size"] * job["seq_length"]
    dtype = "bfloat16" if job["light"] else "float32"
    options["model_init_kwargs"] = {"attn_implementation": probe.attention, "dtype": dtype}
    train_sft(job, probe, job["model"], options)


def train_with_unsloth(job: dict[str, Any], probe: Probe) -> None:
    """Unsloth's model, all of it trained, in TRL's SFTTrainer as Unsloth patches it; started by rival_unsloth.py."""
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        job["model"],
        max_seq_length=job["seq_length"],
        full_finetuning=True,
        load_in_4bit=False,
        use_gradient_checkpointing=False,
    )
    probe.attention = model.config._attn_implementation
    train_sft(job, probe, model, job["options"], processing_class=tokenizer)


# ---- torchtitan ----


def train_with_torchtitan(job: dict[str, Any], probe: Probe) -> None:
    """torchtitan 0.3, or 0.2 where that is the job's package."""
    from benchmarks import rival_torchtitan

    train = rival_torchtitan.train if job["package"] == "torchtitan" else rival_torchtitan.train_02
    train(job, probe)


# ---- NeMo Automodel ----


def train_with_automodel(job: dict[str, Any], probe: Probe) -> None:
    """NeMo Automodel's fine-tuning recipe."""
    from benchmarks import rival_automodel

    rival_automodel.train(job, probe)


TRAININGS: dict[str, Callable[[dict[str, Any], Probe], None]] = {
    "ours": train_ours,
    "trl": train_with_trl,
    "torchtitan": train_with_torchtitan,
    "torchtitan02": train_with_torchtitan,
    "automodel": train_with_automodel,
    "unsloth": train_with_unsloth,
}


def probe_file(folder: str | Path, rank: int) -> Path:
    """What the probe of a process of a job wrote."""
    return Path(f"{folder}-probe-{rank}.json")


def run_job(path: Path) -> None:
    """Train by a job's file; what was seen is written where the training fails, too."""
    job = read_json(path)
    os.environ[JOB_VARIABLE] = str(path)
    probe = Probe()
    try:
        TRAININGS[job["package"]](job, probe)
    finally:
        probe.write(probe_file(job["folder"], int(os.environ.get("RANK", "0"))), job["micro_batches"])
