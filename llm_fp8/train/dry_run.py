"""--dry_run: the data, the number of steps and the memory of a run that does not take place, on any machine.

Nothing of a run is built, so neither a GPU nor Transformer Engine is needed: where the options ask for what only a GPU
has, one is assumed.
"""

from __future__ import annotations

import dataclasses

import torch
from accelerate import PartialState

from llm_fp8.config.options import AUTO_BATCH_SIZE, Config
from llm_fp8.config.recipes import DEFAULTS, RECIPES, chosen
from llm_fp8.data.prepare import prepare_data
from llm_fp8.distributed.memory import RunSize, settle_memory
from llm_fp8.distributed.process_group import own_device, smallest_gpu_gib, start_process_group
from llm_fp8.distributed.sharding_mode import choose_mode, num_shards
from llm_fp8.models.build import count_parameters, model_on_meta
from llm_fp8.models.lora import add_adapters
from llm_fp8.models.probe import probe
from llm_fp8.models.source import check_model, load_config, load_tokenizer, resolve_source
from llm_fp8.train.run_dir import find_checkpoint
from llm_fp8.train.train_state import total_steps
from llm_fp8.utils.ranks import LaunchRanks

ASSUMED_GPU, ASSUMED_GIB, ASSUMED_CAPABILITY = "H100 80 GB", 79.2, (9, 0)
"""The GPU where there is none, and what torch says of its memory and compute capability."""


def dry_run(config: Config, ranks: LaunchRanks) -> int:
    """Print what the run would come to; returns the exit code. Collective."""
    start_process_group(ranks)
    own_gib = smallest_gpu_gib(own_device())
    gpu_gib = own_gib or ASSUMED_GIB
    source = resolve_source(config.model)
    hf_config = load_config(source)
    num_parameters = count_parameters(hf_config)
    mode, _ = choose_mode(config, ranks, num_parameters, gpu_gib)
    name = config.precision.mixed_precision
    asks_for_gpu = config.model.use_te or config.data.batch_size == AUTO_BATCH_SIZE or name in ("bf16", "fp8", "auto")
    counts_memory = own_gib is not None or asks_for_gpu
    is_fp8 = name in ("fp8", "auto")
    recipe = chosen(config.precision.fp8_scenario, config.precision.fp8_backend) if is_fp8 else name or "bf16"
    capability, lines = torch.cuda.get_device_capability() if own_gib else ASSUMED_CAPABILITY, list[str]()
    if recipe in RECIPES and capability < RECIPES[recipe].capability:
        wanted, recipe = recipe, DEFAULTS["te"]
        gpu = "This GPU" if own_gib else f"The assumed {ASSUMED_GPU}"
        lines.append(f"WARNING: --fp8_scenario {wanted} falls back to {recipe}: {gpu} has no {wanted}")
    may_be_bf16 = name == "auto" or config.precision.fp8_until < 1
    run = RunSize(config, hf_config, recipe, mode, num_shards(mode, ranks), num_parameters, may_be_bf16)
    resumed = find_checkpoint(config, ranks)
    if counts_memory:
        config, notes = settle_memory(run, gpu_gib, None if resumed is None else resumed.micro_batch_rows)
        lines += notes
    tokenizer, note = load_tokenizer(config.model, source)
    check_model(config, hf_config, tokenizer)
    if not config.model.use_te:
        probe(config, hf_config, own_device(), torch.float32 if recipe == "no" else torch.bfloat16)
    if config.lora.lora_rank:
        add_adapters(model_on_meta(hf_config), config.lora, torch.bfloat16)  # which knows the names of --lora_targets
    data = prepare_data(
        config,
        tokenizer,
        rank=ranks.rank,
        world_size=ranks.world_size,
        main_process_first=PartialState(cpu=not torch.cuda.is_available()).local_main_process_first,
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if ranks.rank != 0:
        return 0
    said = [*([note] if note else []), data.description, *lines]
    if counts_memory:
        found = dataclasses.replace(run, config=config).estimate()
        gpus = "GPUs of this machine" if own_gib else f"{ASSUMED_GPU}, assumed"
        said.append(f"memory: {found.needed_gib:.2f} GiB of {gpu_gib:.1f} on each of {ranks.world_size} ({gpus})")
        parts = found.parts | {"CUDA, allocator, communication": found.beside_gib}
        said += [f"  {part:32} {part_gib:8.2f} GiB" for part, part_gib in parts.items()]
        said += [] if found.is_whole else ["  activations are not counted: they are known of TE decoders alone"]
    num_steps, rows = total_steps(config, data, resumed), data.train.global_batch_size
    said.append(f"dry run: {num_steps:,} steps of {rows:,} sequences; no weight was loaded and no run written")
    print("\n".join(said), flush=True)
    return 0
