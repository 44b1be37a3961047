"""torchtitan for benchmarks/rivals.py: its own entry, torchtitan.train, with its own llama3 and a config of the job.

torchtitan 0.3.0 is made for a newer torch than 2.11. There it runs with what `adapt` does, each change a remark of the
entry. 0.2.2 fits torch 2.11 as it is; it packs text without regard to documents and predicts all of it.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch.nn.attention import flex_attention

from benchmarks.rival_trainings import JOB_VARIABLE, LEARNING_RATE, Probe
from llm_fp8.utils.json_files import read_json

FLAVOURS = {"Llama-3.2-1B": "1B", "Llama-3.2-3B": "3B", "Llama-3.1-8B": "8B", "tiny": "debugmodel"}
"""Our architecture -> torchtitan's."""


class DataParallelMeshDims:
    """Stands in for a class of torch.distributed.fsdp that torchtitan 0.3 imports."""


def is_adapted() -> bool:
    """Whether torch is too old for torchtitan 0.3."""
    return getattr(torch.distributed.fsdp, "DataParallelMeshDims", DataParallelMeshDims) is DataParallelMeshDims


def adapt(probe: Probe) -> None:
    """Make torchtitan 0.3 run on torch 2.11, as far as its Llama needs it."""
    fsdp: Any = torch.distributed.fsdp
    fsdp.DataParallelMeshDims = DataParallelMeshDims
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
    from torchtitan.models.common import decoder

    create = decoder.create_attention_mask

    def create_attention_mask(*args: Any, separate_full_blocks: bool = True, **kwargs: Any) -> Any:
        assert separate_full_blocks  # what an older torch always does
        return create(*args, **kwargs)

    if "separate_full_blocks" not in inspect.signature(flex_attention.create_block_mask).parameters:
        decoder.create_attention_mask = create_attention_mask
    probe.remarks += [
        f"torchtitan made to run on torch {torch.__version__}: stand-ins for torch.distributed.fsdp's "
        "DataParallelMeshDims and torch.distributed's set_timeout, and no separate_full_blocks passed to "
        "create_block_mask, whose default it is",
        "parallelism.spmd_backend partial_dtensor, since the default needs that class",
        "CrossEntropyLoss in place of ChunkedLossWrapper, which fails under FSDP of this torch",
    ]


def watch_losses(probe: Probe) -> None:
    """Let the probe see what torchtitan logs."""
    from torchtitan.components.metrics import MetricsProcessor

    log = MetricsProcessor.log

    def log_loss(self: Any, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
        probe.losses.append(global_avg_loss)
        log(self, step, global_avg_loss, *args, **kwargs)

    MetricsProcessor.log = log_loss


def train(job: dict[str, Any], probe: Probe) -> None:
    """Run torchtitan.train of 0.3 with `of_job`."""
    if is_adapted():
        adapt(probe)
    probe.attention = "flex_attention"
    watch_losses(probe)
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.hf_datasets.text_datasets import ChatDataset
    from torchtitan.train import main

    flush = ChatDataset._flush_buffers

    def count_row(self: Any) -> Any:
        inputs, labels = flush(self)
        last = int((inputs["positions"] == 0).nonzero()[-1])
        padded = bool((labels[last:] == IGNORE_INDEX).all())
        # As of a micro-batch of such rows.
        probe.count_tokens(job["batch_size"] * (last if padded else len(labels)))
        return inputs, labels

    ChatDataset._flush_buffers = count_row
    sys.argv = ["torchtitan", "--module", "benchmarks.rival_torchtitan", "--config", "of_job"]
    main()


def conversation(row: dict[str, Any]) -> list[dict[str, str]]:
    """A row as torchtitan's chat loader takes it."""
    return [
        {"role": "user", "content": row["problem"]},
        {"role": "assistant", "content": row["generated_solution"]},
    ]


def of_job() -> Any:
    """llama3_8b of torchtitan's registry with the job's model, rows and shape.

    Differences from the registry: fp8 without lm_head, as in its llama3_405b; compiled; the answers of chats, packed by
    its own loader; nothing recomputed where it fits; neither validation, checkpoints nor profiles.
    """
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.hf_datasets.text_datasets import ChatDataLoader
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_8b
    from torchtitan.tools.profiler import Profiler

    job = read_json(Path(os.environ[JOB_VARIABLE]))
    options = job["options"]
    converters = []
    if "recipe" in options:
        converters = [
            Float8LinearConverter.Config(
                recipe_name=options["recipe"],
                filter_fqns=["lm_head"],
                model_compile_enabled=options["compile"],
            )
        ]
    config = llama3_8b()
    config.model_spec = model_registry(FLAVOURS[job["architecture"]], converters=converters)
    config.loss.loss_fn.global_vocab_size = config.model_spec.model.vocab_size
    config.hf_assets_path, config.dump_folder = job["model"], job["folder"]
    config.profiler, config.validator = Profiler.Config(enable_profiling=False), Validator.Config(enable=False)
    config.metrics, config.checkpoint = MetricsProcessor.Config(log_freq=1), CheckpointManager.Config(enable=False)
    config.optimizer = default_adamw(lr=LEARNING_RATE)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0)
    config.training = TrainingConfig(
        local_batch_size=job["batch_size"],
        global_batch_size=job["batch_size"] * job["micro_batches"] * job["num_gpus"],
        seq_len=job["seq_length"],
        steps=job["steps"],
        dtype="bfloat16" if job["light"] else "float32",
        disable_cuda_graphs=not options["cuda_graphs"],
    )
    config.dataloader = ChatDataLoader.Config(
        dataset_path="json",
        load_dataset_kwargs={"data_files": job["rows"], "split": "train"},
        sample_processor=conversation,
    )
    config.activation_checkpoint = SelectiveAC.Config() if job["light"] else None
    config.compile = CompileConfig(enable=options["compile"])
    if is_adapted():
        config.parallelism.spmd_backend = "partial_dtensor"
        config.loss = config.loss.loss_fn
    return config


# ---- 0.2 ----


def words_02(job: dict[str, Any]) -> list[str]:
    """The command line of torchtitan.train of 0.2."""
    options = {
        "model.name": "llama3",
        "model.flavor": FLAVOURS[job["architecture"]],
        "model.hf_assets_path": job["model"],
        "job.dump_folder": job["folder"],
        "training.dataset": "rows",
        "training.dataset_path": job["rows"],
        "training.local_batch_size": job["batch_size"],
        "training.global_batch_size": job["batch_size"] * job["micro_batches"] * job["num_gpus"],
        "training.seq_len": job["seq_length"],
        "training.steps": job["steps"],
        "training.dtype": "bfloat16" if job["light"] else "float32",
        "optimizer.lr": LEARNING_RATE,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.min_lr_factor": 1.0,
        "activation_checkpoint.mode": "selective" if job["light"] else "none",
        "activation_checkpoint.selective_ac_option": "op",
        "metrics.log_freq": 1,
    }
    if "recipe" in job["options"]:
        options |= {
            "model.converters": "quantize.linear.float8",
            "quantize.linear.float8.recipe_name": job["options"]["recipe"],
            "quantize.linear.float8.filter_fqns": "output",
        }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, *(["--compile.enable"] if job["options"]["compile"] else [])]


def train_02(job: dict[str, Any], probe: Probe) -> None:
    """Run torchtitan.train of 0.2, with the rows added to its datasets and the smaller models to its flavours."""
    sys.argv = ["torchtitan", *words_02(job)]  # before torchtitan is imported, which reads it then
    watch_losses(probe)
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    def load(path: str) -> Any:
        return load_dataset("json", data_files=path, split="train")

    def as_text(row: dict[str, Any]) -> str:
        return f"user:\n{row['problem']}\n\nassistant:\n{row['generated_solution']}"

    DATASETS["rows"] = DatasetConfig(path=job["rows"], loader=load, sample_processor=as_text)
    shared = {"n_kv_heads": 8, "multiple_of": 1024, "rope_theta": 500000}
    llama3_args["1B"] = TransformerModelArgs(dim=2048, n_layers=16, n_heads=32, ffn_dim_multiplier=1.5, **shared)
    llama3_args["3B"] = TransformerModelArgs(dim=3072, n_layers=28, n_heads=24, ffn_dim_multiplier=1.0, **shared)
    if FLAVOURS[job["architecture"]] in ("1B", "3B"):
        probe.remarks.append("its llama3 ties no embeddings: lm_head has weights of its own")
    probe.attention = "sdpa"
    probe.tokens_per_step = job["batch_size"] * job["micro_batches"] * job["seq_length"]
    from torchtitan.train import Trainer, main

    main(Trainer)
