#!/usr/bin/env python
"""Train transformers' model under Accelerate, in the set-ups that the documentation of both libraries shows.

    python benchmarks/baselines.py NAME [options of the training scripts]

    hf_bf16               bf16 weights with Accelerate's bf16 mixed precision, sdpa attention, torch's fused AdamW
    hf_bf16_compiled      hf_bf16 with each decoder layer compiled
    accelerate_te         Accelerate's own fp8 (TERecipeKwargs): Transformer Engine's Linear in place of nn.Linear
    torchao_tensorwise    torchao's fp8 training, each decoder layer compiled
    torchao_rowwise       torchao_tensorwise with torchao's rowwise recipe

The options for the data, the length of the run and the optimizer are those of our own runs. Rows are padded. The output
folder gets metrics.jsonl and summary.json with the keys that our runs write. On one GPU and under DDP the weights are
bf16 without master weights, which needs less memory than our runs. --sharding_mode fsdp_full uses Accelerate's FSDP2
plugin with fp32 weights, and wraps each decoder layer.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.observability.reporter import quiet_libraries
from llm_fp8.tools.script import CUDA_DEFAULTS, run_script

os.environ.update({**CUDA_DEFAULTS, **os.environ})  # before torch is imported

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

from benchmarks.bench import BASELINES
from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.data.collate import Batch, count_tokens
from llm_fp8.data.prepare import prepare_data
from llm_fp8.models.build import decoder_size
from llm_fp8.models.model import decoder_layers
from llm_fp8.models.source import load_config, load_tokenizer, resolve_source
from llm_fp8.observability.metrics import GIB, step_flops
from llm_fp8.optim.optimizers import adamw_arguments
from llm_fp8.precision.torchao import TorchaoBackend, build_config
from llm_fp8.step.stepper import StepClock
from llm_fp8.utils.json_files import json_line, write_json_atomic, write_text_atomic


def build_accelerator(name: str, config: Config) -> Accelerator:
    """Return an `Accelerator` with the precision of the baseline `name` and the sharding mode of `config`."""
    plugin = None
    if config.parallel.sharding_mode == "fsdp_full":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",  # wraps the decoder layer's class, which transformers names
            cpu_ram_efficient_loading=False,  # weights are random
        )
    handlers: list[Any] = []
    if name == "accelerate_te":
        from accelerate.utils import TERecipeKwargs

        # All defaults, except that the amax is the maximum of its history, as in our recipe.
        handlers = [TERecipeKwargs(fp8_format="HYBRID", amax_history_len=1024, amax_compute_algo="max")]
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="fp8" if name == "accelerate_te" else "bf16",
        gradient_accumulation_steps=config.optim.gradient_accumulation_steps,
        fsdp_plugin=plugin,
        kwargs_handlers=handlers,
    )


def build_model(name: str, config: Config, hf_config: Any, device: torch.device) -> Any:
    """Build transformers' model with random weights on `device`. For baselines that use torchao, convert it to fp8."""
    weights = torch.float32 if config.parallel.sharding_mode == "fsdp_full" else torch.bfloat16
    with device:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=weights, attn_implementation="sdpa")
    if name.startswith("torchao"):
        recipe = name.removeprefix("torchao_")
        TorchaoBackend(build_config(recipe, emulate=not torch.cuda.is_available())).convert(model)
    return model.train()


def hf_inputs(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return a padded batch as arguments of transformers' model. Its labels are unshifted, as the model shifts them."""
    batch = batch.to(device)
    # Rolling the labels loses none, since a row's last label is never supervised.
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels.roll(1, 1)}


def train(name: str, config: Config) -> None:
    accelerator = build_accelerator(name, config)
    device, num_gpus = accelerator.device, accelerator.num_processes
    set_seed(config.optim.seed)
    source = resolve_source(config.model)
    hf_config = load_config(source)
    tokenizer, _ = load_tokenizer(config.model, source)
    size = decoder_size(hf_config)
    ranks = {"rank": accelerator.process_index, "world_size": num_gpus}
    first = accelerator.local_main_process_first
    data = prepare_data(config.with_options(packing=False), tokenizer, **ranks, main_process_first=first)
    model = build_model(name, config, hf_config, device)
    arguments = {"weight_decay": config.optim.weight_decay, **adamw_arguments(config.optim)}
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **arguments)
    model, optimizer = accelerator.prepare(model, optimizer)
    if name.endswith("compiled") or name.startswith("torchao"):
        for layer in decoder_layers(accelerator.unwrap_model(model)):
            layer.compile()
    clock = StepClock(device)
    losses, tokens, stamps = [], [], [clock.stamp()]
    for batches in itertools.islice(data.train, config.optim.max_steps or 1):
        batch_losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**hf_inputs(batch, device), use_cache=False).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            batch_losses.append(loss.detach())
        stamps.append(clock.stamp())
        losses.append(torch.stack(batch_losses).mean())
        tokens.append(count_tokens(batches))
    values = torch.stack(losses).tolist()  # waits for the GPU to finish the last step
    peak = torch.tensor([torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0], device=device)
    peak_gib = float(accelerator.gather(peak).max()) / GIB
    if not accelerator.is_main_process:
        return
    times = [clock.seconds(start, end) for start, end in itertools.pairwise(stamps)]
    records = []
    for number, (loss, counted, time_s) in enumerate(zip(values, tokens, times, strict=True), start=1):
        record = {  # keys as in our own runs; every process has as many tokens as this one
            "step": number,
            "loss": loss,
            "step_time_s": time_s,
            "tokens_per_s": counted.num_tokens * num_gpus / time_s,
            "real_tokens_per_s": counted.num_real_tokens * num_gpus / time_s,
            "model_tflops": step_flops(size, counted) / time_s / 1e12,
        }
        if peak_gib:
            record["peak_memory_gib"] = peak_gib
        records.append(record)
    folder = Path(config.run.output_dir or "")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / "metrics.jsonl", "".join(map(json_line, records)))
    write_json_atomic(folder / "summary.json", {"baseline": name, "steps": len(values)})


def main() -> int:
    name, *argv = sys.argv[1:] or ["--help"]
    if name not in BASELINES:
        print(__doc__)
        return 0 if name in ("--help", "-h") else 2
    config = parse_config(argv, prog=name, parallel="WORLD_SIZE" in os.environ)
    quiet_libraries()
    train(name, config)
    return 0


if __name__ == "__main__":
    run_script(main)
