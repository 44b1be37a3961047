"""The usual set-up, to be measured beside ours: transformers' model and Accelerate in bf16, written as their documentation does.

sdpa attention, torch's fused AdamW, the loss as transformers computes it, gradients accumulated by `accelerator.accumulate`.

    one process, DDP   bf16 weights and no master: lighter than ours
    FSDP2              Accelerate's plugin, wrapped per decoder layer: fp32 weights and moments, split; gathered and reduced in bf16
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from llm_fp8.loop import StepClock
from llm_fp8.models import decoder_layers
from llm_fp8.throughput.workload import Recorder, Workload


class HfTraining:
    """A rival arm, built; in several processes with DDP, or split by FSDP2.

    Attributes:
        accelerator: of this arm.
        recorder: times and losses of the steps so far; a loss is that of the step's last micro-batch on this process.
        facts: what a reader should know of the arm.
    """

    def __init__(self, work: Workload, fsdp2: bool = False) -> None:
        plugin = None
        if fsdp2:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=True,
                auto_wrap_policy="transformer_based_wrap",  # transformers names its decoder layer
                cpu_ram_efficient_loading=False,  # nothing is loaded
            )
        self.accelerator = accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="bf16",
            gradient_accumulation_steps=work.micro_batches,
            fsdp_plugin=plugin,
        )
        name, weights = ("fp32", torch.float32) if fsdp2 else ("bf16", torch.bfloat16)
        config = work.hf_config()
        torch.manual_seed(0)
        with accelerator.device:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation="sdpa")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        if fsdp2 and not isinstance(decoder_layers(self._model)[0], FSDPModule):
            raise RuntimeError("Accelerate did not wrap the decoder layers")
        self._model.train()
        batches = work.batches(config.vocab_size, accelerator.process_index)
        self._rows = [batch.input_ids.view(work.batch_size, -1).to(accelerator.device) for batch in batches]
        self._clock = StepClock(accelerator.device)
        self.recorder = Recorder()
        self.facts: dict[str, Any] = {"attention": "sdpa", "optimizer": f"torch fused AdamW on {name} weights"}

    def take(self, num_steps: int) -> None:
        """Take so many optimizer steps."""
        accelerator, model, optimizer = self.accelerator, self._model, self._optimizer
        stamps, losses = [self._clock.stamp()], []
        for _ in range(num_steps):
            for input_ids in self._rows:
                with accelerator.accumulate(model):
                    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            stamps.append(self._clock.stamp())
            losses.append(loss.detach())
        self.recorder.losses += torch.stack(losses).tolist()  # waits for the last step
        self.recorder.step_times_s += [
            self._clock.seconds(start, end) for start, end in zip(stamps[:-1], stamps[1:], strict=True)
        ]
