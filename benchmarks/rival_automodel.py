"""NeMo Automodel for benchmarks/rivals.py: its own entry, with a config as its examples have them.

The settings are those of llama3_1_8b_hellaswag_fp8.yaml and llama3_2_1b_packed_cp2.yaml of its repository: weights and
optimizer in bf16, packed rows in Transformer Engine's attention, torchao's fp8 with compiled layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.rival_trainings import LEARNING_RATE, Probe
from llm_fp8.utils.json_files import read_jsonl


def config_of(job: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """The entries of a recipe's YAML file."""
    options = job["options"]
    packing = options["packing"] if on_gpu else "neat"
    backend = {
        "_target_": "nemo_automodel.components.models.common.BackendConfig",
        "attn": "te" if packing == "thd" else "sdpa",
        "linear": "te" if "te_fp8" in options else "torch",
        "rms_norm": "torch_fp32",
    }
    if "te_fp8" in options:
        backend["te_fp8"] = {"recipe": options["te_fp8"]}
    entries = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": job["batch_size"] * job["micro_batches"] * job["num_gpus"],
            "local_batch_size": job["batch_size"],
            "max_steps": job["steps"],
            "ckpt_every_steps": 10_000,
            "val_every_steps": 10_000,
            "num_epochs": 1,
        },
        "dist_env": {"backend": "nccl" if on_gpu else "gloo", "timeout_minutes": 5},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": job["model"],
            "torch_dtype": "bf16",
            "backend": backend,
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": job["folder"]},
        "distributed": {"strategy": "fsdp2", "tp_size": 1, "cp_size": 1},
        "clip_grad_norm": {"max_norm": 1.0},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset."
            "ColumnMappedTextInstructionDataset",
            "path_or_dataset_id": job["rows"],
            "column_mapping": {"question": "problem", "answer": "generated_solution"},
            "answer_only_loss_mask": True,
            "use_hf_chat_template": True,
        },
        # Each strategy has a collater of its own; thd needs Transformer Engine's attention.
        "packed_sequence": {"packed_sequence_size": job["seq_length"], "packing_strategy": packing},
        "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "shuffle": False},
        "optimizer": {
            "_target_": "torch.optim.AdamW",
            "lr": LEARNING_RATE,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "fused": True,
        },
    }
    if options.get("compile"):
        entries["distributed"]["enable_compile"] = True  # under fsdp2 the entry "compile" is ignored
    if "recipe" in options:
        entries["fp8"] = {"enabled": True, "recipe_name": options["recipe"], "filter_fqns": ["lm_head"]}
    return entries


def train(job: dict[str, Any], probe: Probe) -> None:
    """Run the recipe's main; losses and tokens are what it writes to training.jsonl."""
    folder = Path(job["folder"])
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    entries = config_of(job, torch.cuda.is_available())
    path.write_text(yaml.safe_dump(entries, sort_keys=False))
    probe.attention = entries["model"]["backend"]["attn"]
    sys.argv = ["automodel", "--config", str(path)]
    from nemo_automodel.recipes.llm.train_ft import main

    try:
        main()
    finally:
        found = folder / "training.jsonl"
        steps = read_jsonl(found) if found.exists() else []
        probe.losses = [step["loss"] for step in steps]
        for step in steps:
            # As of a micro-batch of this process.
            probe.count_tokens(step["num_tokens_per_step"] / job["num_gpus"] / job["micro_batches"])
