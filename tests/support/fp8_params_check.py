"""--fp8_params on GPUs: the steps of a run without it, half the traffic, exact masters, sums of gradients in GEMMs.

    torchrun --nproc_per_node=2 tests/support/fp8_params_check.py [--output FILE]

Trains a small model with weights, each time by the code of train_multi_gpu.py, and compares. Rank 0 prints a JSON line
per check; what the runs say goes to stderr. The exit code is 1 if any check fails; one that fails does not keep the
others from running. After WATCHDOG_S seconds all stacks are printed and the process ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import contextlib
import faulthandler
import gc
import json
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from llm_fp8.config.parser import parse_config
from llm_fp8.distributed.fp8_params import master_of
from llm_fp8.distributed.fsdp_internals import UnshardedGradients
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.models.build import decoder_layers
from llm_fp8.train import run as run_module
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.train_state import RunState
from llm_fp8.utils.json_files import read_jsonl
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_import import forget_delayed_scales
from tests.support.check_records import report, write_records
from tests.support.counted_gather import CountedAllGather
from tests.support.families import write_family

WATCHDOG_S = 80
SCENARIOS = ("delayed", "current")
STEPS, MICRO_BATCHES, EVAL_BATCHES = 20, 2, 1
FP8_WEIGHTS_PER_LAYER = 4
"""Fused QKV, attention's output, fc1 and fc2."""

FIRST_LOSS = 2e-3
"""Relative difference allowed in the first step: one run rounds its masters to bf16 and then to fp8, the other at
once.
"""
EXCESS, FLOOR = 2.0, 5e-3
"""In 20 steps losses may be so many times as far from bf16's as those of fp8 without fp8 parameters are, and a little:
some weights differ by a spacing of fp8."""
SAME_LOSSES = 1e-3
"""Between runs that compute the same. Gradients of attention are not bitwise reproducible."""
RECOMPUTED = 2e-3


def _stay_in_group(_: Accelerator) -> None:
    """In place of leaving the process group at the end of a run: the next one needs it."""


@dataclass
class InspectedRun:
    """What a run is looked at by when it is over."""

    loop: TrainingLoop
    gathers: CountedAllGather
    initial: dict[str, Tensor]


INSPECTED: list[InspectedRun] = []
"""The last run."""
_build_loop = run_module.build_loop


def _build_inspected_loop(state: RunState, *arguments: Any) -> TrainingLoop:
    loop, local_tensor = _build_loop(state, *arguments), state.setup.plan.strategy.local_tensor
    initial = {name: local_tensor(parameter).clone() for name, parameter in loop.model.named_parameters()}
    INSPECTED[:] = [InspectedRun(loop, CountedAllGather(loop.model), initial)]
    return loop


class CountedSums:
    """How often a weight's sum of gradients was given to a GEMM, by the sum's dtype."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._find = UnshardedGradients.find
        UnshardedGradients.find = lambda found, weight: self._counted(found, weight)  # type: ignore[method-assign]

    def _counted(self, found: UnshardedGradients, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        whole, total = self._find(found, weight)
        if total is not None:
            self.counts[str(total.dtype)] += 1
        return whole, total


SUMS = CountedSums()
run_module.build_loop = _build_inspected_loop
run_module.end_process_group = _stay_in_group


@dataclass
class Result:
    """What a run left. `parameters`: this rank's part of the decoder layers' weights, (master fp32, what is between
    steps) by name.
    """

    losses: list[float]
    grad_norms: list[float]
    summary: dict[str, Any]
    folder: Path
    sums_in_gemms: dict[str, int]
    """Sums of gradients that GEMMs were given to add to, by dtype."""
    kept_casts: int
    """Weights whose fp8 cast Transformer Engine's modules keep between micro-batches."""
    sent_bytes: list[int]
    layer_bytes: dict[str, int]
    """What a rank puts into the gather of one decoder layer, by what it holds: 'fp8' as it is, 'bf16' if all of it
    were bf16.
    """
    initial: dict[str, Tensor]
    masters: dict[str, Tensor]
    parameters: dict[str, Tensor]
    seconds: float


class Trainings:
    """Runs of one scenario, each made when it is first asked for."""

    def __init__(self, scenario: str, model: Path, folder: Path) -> None:
        self.scenario, self.model, self.folder = scenario, model, folder
        self._results: dict[str, Result] = {}
        self._failed: set[str] = set()

    def __call__(self, name: str, *options: str) -> Result:
        """The run of this name."""
        if name in self._failed:
            raise RuntimeError(f"the run '{name}' failed in a check before")
        if name not in self._results:
            self._failed.add(name)
            self._results[name] = self._train(self.folder / f"{self.scenario}-{name}", options)
            self._failed.discard(name)
        return self._results[name]

    def plain(self) -> Result:
        """Without fp8 parameters."""
        return self("plain", f"--max_steps={STEPS}", "--no_export", "--sharding_mode=fsdp_full")

    def fp8(self) -> Result:
        """With them; the one that others are compared with."""
        return self("fp8", f"--max_steps={STEPS}", "--save_every=10", "--save_total_limit=9", *FP8)

    def bf16(self) -> Result:
        """Without fp8."""
        return self("bf16", f"--max_steps={STEPS}", "--no_export", "--sharding_mode=fsdp_full")

    def _train(self, folder: Path, options: tuple[str, ...]) -> Result:
        precision = ["--mixed_precision=fp8", f"--fp8_scenario={self.scenario}"]
        if folder.name.endswith("bf16"):
            precision = ["--mixed_precision=bf16"]
        started = time.monotonic()
        SUMS.counts.clear()
        forget_delayed_scales()  # and whatever a run that failed left behind
        words = [
            f"--model_name={self.model}", "--use_te", *precision, "--max_seq_length=256",
            "--batch_size=4", "--learning_rate=1e-4", f"--gradient_accumulation_steps={MICRO_BATCHES}", "--log_every=1",
            f"--eval_batches={EVAL_BATCHES}", f"--output_dir={folder}", *options
        ]  # fmt: skip
        with contextlib.redirect_stdout(sys.stderr):
            code = run_module.run_training(parse_config(words, parallel=True))
        assert code == 0
        (run,) = INSPECTED
        dist.barrier()
        records = read_jsonl(folder / "metrics.jsonl")
        named = dict(run.loop.model.named_parameters())
        locals_ = {name: parameter._local_tensor.detach() for name, parameter in named.items() if ".layers." in name}
        layer = decoder_layers(run.loop.model.model)[0]  # type: ignore[arg-type]
        parts = [parameter._local_tensor for parameter in layer.parameters()]
        result = Result(
            losses=[record["loss"] for record in records if "loss" in record],
            grad_norms=[record["grad_norm"] for record in records if "loss" in record],
            summary=json.loads((folder / "summary.json").read_text()),
            folder=folder,
            sums_in_gemms=dict(SUMS.counts),
            kept_casts=sum(len(getattr(module, "_fp8_workspaces", ())) for module in run.loop.model.modules()),
            sent_bytes=list(run.gathers.sent_bytes),
            layer_bytes={
                "fp8": sum(part.numel() * (1 if is_fp8(part) else 2) for part in parts),
                "bf16": sum(part.numel() * 2 for part in parts),
            },
            initial=run.initial,
            masters={name: master_of(parameter)._local_tensor.detach().clone() for name, parameter in named.items()},
            parameters=locals_,
            seconds=time.monotonic() - started,
        )
        INSPECTED.clear()
        del run, named, layer, parts
        gc.collect()
        torch.cuda.empty_cache()
        return result


FP8 = ("--fp8_params", "--sharding_mode=fsdp_full")


def is_fp8(tensor: Tensor) -> bool:
    """Whether this is TE's tensor of bytes."""
    return type(tensor).__name__ == "Float8Tensor"


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Relative, over the steps of two runs of equal length."""
    assert len(losses) == len(others) > 0, (len(losses), len(others))
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def num_layers(result: Result) -> int:
    """Decoder layers of the model."""
    return len({name.split(".layers.")[1].split(".")[0] for name in result.parameters})


def layer_gathers(result: Result, num_steps: int, per_step: int) -> int:
    """How often layers must have been gathered, the evaluation at the end included."""
    return (num_steps * per_step + EVAL_BATCHES) * num_layers(result)


# --- Checks: each gives (whether it holds, its figures) ---------------------------------------------------------------


def same_steps(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """(1) Losses as near to those of bf16 as those of a run without fp8 parameters are, and the same fp8 GEMMs."""
    plain, fp8, bf16 = trainings.plain(), trainings.fp8(), trainings.bf16()
    first = largest_difference(fp8.losses[:1], plain.losses[:1])
    worst, worst_plain = (largest_difference(result.losses, bf16.losses) for result in (fp8, plain))
    gemms = {name: result.summary["recorded_step"]["gemm_kernels"] for name, result in (("plain", plain), ("fp8", fp8))}
    holds = (
        len(fp8.losses) == STEPS
        and first <= FIRST_LOSS
        and worst <= EXCESS * worst_plain + FLOOR
        and fp8.losses[-1] < fp8.losses[0] - 0.05
        and gemms["fp8"].get("fp8", 0) >= num_layers(fp8) * FP8_WEIGHTS_PER_LAYER * 3 * MICRO_BATCHES
    )
    return holds, {
        "first_loss": [plain.losses[0], fp8.losses[0]],
        "last_loss": [plain.losses[-1], fp8.losses[-1]],
        "first_difference": first,
        "difference_from_bf16": worst,
        "difference_from_bf16_without": worst_plain,
        "losses": {"plain": plain.losses, "fp8": fp8.losses, "bf16": bf16.losses},
        "grad_norms": {"plain": plain.grad_norms, "fp8": fp8.grad_norms, "bf16": bf16.grad_norms},
        "gemm_kernels": gemms,
        "seconds": [plain.seconds, fp8.seconds],
    }


def bytes_between_steps(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """(2) One byte per element of the linear weights, and no transpose beside it."""
    result = trainings.fp8()
    weights = [tensor for tensor in result.parameters.values() if tensor.ndim == 2]
    fp8: list[Any] = [tensor for tensor in weights if is_fp8(tensor)]
    held = sum(tensor._data.nbytes for tensor in fp8)
    elements = sum(tensor.numel() for tensor in weights)
    transposes = sum(tensor._transpose is not None for tensor in fp8)
    holds = (
        len(fp8) == len(weights) == num_layers(result) * FP8_WEIGHTS_PER_LAYER and held == elements and transposes == 0
    )
    return holds, {
        "weights": len(weights),
        "in_fp8": len(fp8),
        "held_bytes": held,
        "elements": elements,
        "transposes": transposes,
    }


def bytes_gathered(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """(2) Every layer is gathered as bytes, for each forward and backward pass."""
    plain, fp8 = trainings.plain(), trainings.fp8()
    expected = layer_gathers(fp8, STEPS, per_step=2 * MICRO_BATCHES)
    counts = {
        "plain": plain.sent_bytes.count(plain.layer_bytes["bf16"]),
        "fp8": fp8.sent_bytes.count(fp8.layer_bytes["fp8"]),
    }
    share = fp8.layer_bytes["fp8"] / plain.layer_bytes["bf16"]
    holds = (
        counts == {"plain": expected, "fp8": expected} and len(plain.sent_bytes) == len(fp8.sent_bytes) and share < 0.51
    )
    return holds, {
        "layer_gathers": counts,
        "expected": expected,
        "layer_bytes": [plain.layer_bytes["bf16"], fp8.layer_bytes["fp8"]],
        "share": share,
        "all_gathers": [len(plain.sent_bytes), len(fp8.sent_bytes)],
        "sent_bytes": [sum(plain.sent_bytes), sum(fp8.sent_bytes)],
    }


def sums_in_gemms(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """GEMMs add to the whole fp32 gradients of the linear weights, in all micro-batches but a step's first; with fp8
    parameters and without fp8 too.

    Of fsdp_full in fp8 without fp8 parameters the fused projection is left out
    (`llm_fp8.utils.te_internals.would_lose_main_grad`).
    """
    runs = {"plain": trainings.plain(), "fp8": trainings.fp8(), "bf16": trainings.bf16()}
    per_layer = {"plain": FP8_WEIGHTS_PER_LAYER - 1, "fp8": FP8_WEIGHTS_PER_LAYER, "bf16": FP8_WEIGHTS_PER_LAYER}
    layers = STEPS * (MICRO_BATCHES - 1) * num_layers(runs["fp8"])
    expected = {name: {"torch.float32": layers * weights} for name, weights in per_layer.items()}
    found = {name: result.sums_in_gemms for name, result in runs.items()}
    return found == expected, {"sums": found, "expected": expected}


def one_scale_per_weight(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """Ranks agree on every scale, and the bytes are the masters to half a spacing of fp8."""
    result = trainings.fp8()
    fp8: dict[str, Any] = {name: tensor for name, tensor in result.parameters.items() if is_fp8(tensor)}
    scale_inv = torch.stack([tensor._scale_inv.reshape(()) for tensor in fp8.values()])
    others = [torch.empty_like(scale_inv) for _ in range(dist.get_world_size())]
    dist.all_gather(others, scale_inv)
    agree = all(torch.equal(scale_inv, other) for other in others)
    worst = 0.0
    for name, tensor in fp8.items():
        master = result.masters[name]
        # E4M3: three bits behind the leading one; below 2^-6 a fixed spacing of 2^-9.
        half_spacing = torch.maximum(master.abs() * 2.0**-4, tensor._scale_inv * 2.0**-10)
        worst = max(worst, float(((tensor.dequantize(dtype=torch.float32) - master).abs() / half_spacing).max()))
    return agree and len(fp8) > 0 and worst <= 1.001, {
        "ranks_agree": agree,
        "weights": len(fp8),
        "error_in_half_spacings": worst,
    }


def small_updates(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """(3) Steps of 1e-5 add up in the masters: every element moves, on average by more than one step."""
    result = trainings("small", "--max_steps=5", "--learning_rate=1e-5", "--lr_scheduler=constant", "--no_export", *FP8)
    names = [name for name, tensor in result.parameters.items() if is_fp8(tensor)]
    before = torch.cat([result.initial[name].flatten() for name in names])
    after = torch.cat([result.masters[name].flatten() for name in names])
    moved, mean = float((after != before).float().mean()), float((after - before).abs().mean())
    shows = float((after.bfloat16() != before.bfloat16()).float().mean())
    holds = after.dtype == torch.float32 and moved > 0.99 and 1e-5 < mean < 6e-5
    return holds, {"moved": moved, "mean_update": mean, "would_show_in_bf16": shows}


def resumed(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """(4) A run that goes on from a checkpoint takes the same steps; the fp8 bytes come from its masters."""
    whole = trainings.fp8()
    checkpoint = whole.folder / "checkpoints" / "step-00000010"
    result = trainings("resumed", f"--max_steps={STEPS}", "--no_export", f"--resume_from={checkpoint}", *FP8)
    worst = largest_difference(result.losses, whole.losses[10:])
    tensors = json.loads((checkpoint / "manifest.json").read_text())["tensors"]
    weights = {name: entry["dtype"] for name, entry in tensors.items() if name.startswith("model.")}
    saved = set(weights.values())
    return worst <= SAME_LOSSES and saved == {"torch.float32"}, {
        "largest_difference": worst,
        "saved_dtypes": sorted(saved),
    }


def round_trip(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """(5) Steps that move nothing leave the exported weights as they were loaded, bit for bit; parity gate on."""
    result = trainings("still", "--max_steps=2", "--learning_rate=0", "--fp8_params", "--sharding_mode=fsdp_full")
    before = load_file(trainings.model / "model.safetensors")
    after = load_file(result.folder / "final" / "model.safetensors")
    different = [
        n for n in before if n not in after or before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])
    ]
    return before.keys() == after.keys() and not different, {"tensors": len(before), "different": different[:4]}


def recomputed(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """Gradient checkpointing takes the same steps: it computes a layer again from rows gathered for the backward
    pass.
    """
    result = trainings(
        "recomputed", "--max_steps=3", "--lr_scheduler=constant", "--no_export", "--gradient_checkpointing", *FP8
    )
    kept = trainings("three", "--max_steps=3", "--lr_scheduler=constant", "--no_export", *FP8)
    worst = largest_difference(result.losses, kept.losses)
    return worst <= RECOMPUTED, {"largest_difference": worst}


def kept_whole(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """fsdp_grad: whole fp8 weights from a step's first forward to its last backward pass, one gather a step."""
    options = ("--fp8_params", "--sharding_mode=fsdp_grad")
    result = trainings("grad", "--max_steps=3", "--lr_scheduler=constant", "--no_export", *options)
    other = trainings("three", "--max_steps=3", "--lr_scheduler=constant", "--no_export", *FP8)
    worst = largest_difference(result.losses, other.losses)
    gathers = [r.sent_bytes.count(r.layer_bytes["fp8"]) for r in (result, other)]
    expected = [layer_gathers(result, 3, per_step=1), layer_gathers(other, 3, per_step=2 * MICRO_BATCHES)]
    return worst <= SAME_LOSSES and gathers == expected, {
        "largest_difference": worst,
        "layer_gathers": gathers,
        "expected": expected,
    }


def casts_kept_whole(trainings: Trainings) -> tuple[bool, dict[str, Any]]:
    """fsdp_grad without fp8 parameters: one gather a step, and casts that serve its micro-batches, where fsdp_full
    keeps none; GEMMs add for all weights.
    """
    options = ("--no_export", "--max_steps=3", "--lr_scheduler=constant")
    result = trainings("grad-plain", *options, "--sharding_mode=fsdp_grad")
    other = trainings("three-plain", *options, "--sharding_mode=fsdp_full")
    weights = num_layers(result) * FP8_WEIGHTS_PER_LAYER
    worst = largest_difference(result.losses, other.losses)
    found = {
        "layer_gathers": [r.sent_bytes.count(r.layer_bytes["bf16"]) for r in (result, other)],
        "kept_casts": [result.kept_casts, other.kept_casts],
        "sums": sum(result.sums_in_gemms.values()),
    }
    expected = {
        "layer_gathers": [layer_gathers(result, 3, per_step=1), layer_gathers(other, 3, per_step=2 * MICRO_BATCHES)],
        "kept_casts": [weights, 0],
        "sums": 3 * (MICRO_BATCHES - 1) * weights,
    }
    return worst <= RECOMPUTED and found == expected, {"largest_difference": worst, **found, "expected": expected}


CHECKS: list[Callable[[Trainings], tuple[bool, dict[str, Any]]]] = [
    same_steps, bytes_between_steps, bytes_gathered, sums_in_gemms, one_scale_per_weight, round_trip, resumed
]  # fmt: skip
CHECKS_OF_ONE_SCENARIO = [small_updates, recomputed, kept_whole, casts_kept_whole]


def perform(check: Callable[[Trainings], tuple[bool, dict[str, Any]]], trainings: Trainings) -> bool:
    """Do a check, print its record; whether it holds on every rank."""
    started = time.monotonic()
    try:
        holds, figures = check(trainings)
    except Exception as error:
        traceback.print_exc()
        holds, figures = False, {"error": f"{type(error).__name__}: {error}"[:300]}
    everywhere = torch.tensor(int(holds))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    record = {"check": check.__name__, "scenario": trainings.scenario, "holds": bool(everywhere), **figures}
    if dist.get_rank() == 0:
        report({**record, "check_s": round(time.monotonic() - started, 1)})
    elif not holds:
        print(json.dumps({"rank": dist.get_rank(), **record}), file=sys.stderr, flush=True)
    return bool(everywhere)


def main() -> int:
    """Join the launch, do the checks, and say by the exit code whether all hold."""
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    start_process_group(LaunchRanks.from_environment(os.environ))
    if not dist.is_initialized() or dist.get_world_size() < 2:
        print("start it with torchrun --nproc_per_node=2 or more", file=sys.stderr)
        return 2
    place: list[Any] = [tempfile.mkdtemp(prefix="fp8-params-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, device=torch.device("cpu"))
    folder = Path(place[0])
    try:
        if dist.get_rank() == 0:
            # Not in bf16: values that bf16 holds exactly do not move in bf16 before the updates add up to half a
            # spacing, so that the runs without fp8 parameters, bf16 too, would lag behind by most of a step, 2% of the
            # loss after the first.
            write_family(folder / "model", "llama3_rope_gqa", torch.float32)
        dist.barrier()
        all_hold = True
        for scenario in SCENARIOS:
            trainings = Trainings(scenario, folder / "model", folder)
            checks = CHECKS + (CHECKS_OF_ONE_SCENARIO if scenario == SCENARIOS[-1] else [])
            for check in checks:
                all_hold &= perform(check, trainings)
        if dist.get_rank() == 0:
            write_records(all_hold)
        return 0 if all_hold else 1
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
