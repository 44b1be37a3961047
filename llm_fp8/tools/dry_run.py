"""Implement --dry_run: decide the open options, prepare the data, and print what the run would do."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from llm_fp8.config.options import AUTO_BATCH_SIZE, Config
from llm_fp8.distributed.process_group import device_of_process, start_process_group
from llm_fp8.models.build import model_on_meta
from llm_fp8.models.source import check_model, load_config, load_tokenizer, resolve_source
from llm_fp8.observability.reporter import quiet_libraries
from llm_fp8.run import run_dir
from llm_fp8.run.run import load_data
from llm_fp8.settle.machine import assumed_machine, detect_machine
from llm_fp8.settle.plan import probe_hf_layers
from llm_fp8.settle.resume import total_steps
from llm_fp8.settle.settle import settle
from llm_fp8.tools.gpus import named_machine
from llm_fp8.tools.memory import memory_lines
from llm_fp8.utils.ranks import LaunchRanks


def dry_run(config: Config) -> int:
    """Describe the data, the number of steps and the memory of the run without training. Return the exit code. If the
    options need a GPU and there is none, assume an H100. Transformer Engine need not be installed. Collective.
    """
    quiet_libraries()
    ranks = LaunchRanks.from_environment(os.environ)
    start_process_group(ranks)
    source = resolve_source(config.model)
    hf_config = load_config(source)
    gpu = config.run.gpu
    machine = detect_machine(config, ranks, asks_te=False) if gpu is None else named_machine(gpu, ranks)
    asks_for_gpu = config.model.use_te or config.data.batch_size == AUTO_BATCH_SIZE
    if machine.gpu is None and (asks_for_gpu or config.precision.mixed_precision in ("bf16", "fp8")):
        machine = assumed_machine(ranks)
    resumed = run_dir.find_checkpoint(Path(config.run.output_dir or "runs"), config.run.resume_from, ranks)
    settled = settle(config, hf_config, machine, None if resumed is None else resumed.meta)
    config = settled.config
    tokenizer, note = load_tokenizer(config.model, source)
    check_model(config, hf_config, tokenizer)
    probe_hf_layers(settled, device_of_process())
    if config.trains_adapters:
        from llm_fp8.models.lora import add_adapters

        add_adapters(model_on_meta(hf_config), config.lora, torch.bfloat16)  # checks the names in --lora_targets
    data = load_data(settled, tokenizer)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if ranks.rank != 0:
        return 0
    lines = [*([note] if note else []), data.description, *settled.notes, *memory_lines(settled)]
    num_steps, rows = total_steps(config, data, resumed), data.train.global_batch_size
    lines.append(f"dry run: {num_steps:,} steps of {rows:,} sequences; no weight was loaded and no run written")
    print("\n".join(lines), flush=True)
    return 0
