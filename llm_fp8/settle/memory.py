"""Decisions that depend on the GPU's memory: merged micro-batches, recomputed layers, and --batch_size auto."""

from __future__ import annotations

import itertools
import math
from typing import Any

from llm_fp8.config.options import AUTO_BATCH_SIZE
from llm_fp8.config.recipes import FP8_SIZE_MULTIPLE, row_of
from llm_fp8.config.validation import refusal
from llm_fp8.models.memory import CASTS, MODES_COUNTED, RECIPES_COUNTED, STATE, RunSize, recomputed_layers, state_bytes
from llm_fp8.models.source import text_config
from llm_fp8.observability.metrics import GIB, RESERVE_GIB
from llm_fp8.utils.errors import UserError

ERROR = 0.012  # largest relative error of the estimate in recorded runs
MARGIN = 0.05  # fraction of the GPU's memory that `settle_micro_batches` leaves free: PyTorch is slow on a full GPU
MOST_PADDED_TOKENS = 16384  # limit of a merged padded micro-batch, above which more padding costs more than is gained
MOST_TOKENS = 65536  # limit of a micro-batch with --batch_size auto, the largest in recorded runs

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, recomputed": {"gradient_checkpointing": "auto"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "offload": {"offload_optimizer": 1.0},
    "offload, --fp8_recast_weights": {"offload_optimizer": 1.0, "fp8_recast_weights": True},
    "adamw_8bit, recomputed": {"optimizer": "adamw_8bit", "gradient_checkpointing": "auto"},
    "offload, recomputed": {"offload_optimizer": 1.0, "gradient_checkpointing": "auto"},
    "LoRA": {"lora_rank": 16},
    "LoRA, recomputed": {"lora_rank": 16, "gradient_checkpointing": "auto"},
}
"""Way to train -> the options that lower its memory, sorted by their cost in time and quality, cheapest first."""


def row_multiple(run: RunSize) -> int:
    """Return the number that must divide a micro-batch's number of rows so that fp8 GEMMs support the micro-batch."""
    multiple = max(row_of(run.recipe).token_multiple, FP8_SIZE_MULTIPLE)
    return multiple // math.gcd(run.config.data.max_seq_length, multiple)


def fits(run: RunSize, gpu_gib: float) -> bool:
    """Return True if the run fits in `gpu_gib` GiB and fp8 GEMMs support the number of tokens of a micro-batch."""
    return run.config.data.batch_size % row_multiple(run) == 0 and run.estimate().needed_gib <= gpu_gib


def settle_micro_batches(run: RunSize, gpu_gib: float, resumed_rows: int | None = None) -> RunSize:
    """Merge as many micro-batches of a step as the GPU's memory allows with a margin, and choose a number for
    --gradient_checkpointing auto. Return the changed run. Give micro-batches `resumed_rows` rows if that is possible.

    Recomputing a layer costs a third of its time, more than merging saves. So first choose the fewest recomputed layers
    with which micro-batches of some size fit, then the largest size. If nothing fits, merge none and recompute all.
    """
    size, num_requested = run.config.data.batch_size, run.config.optim.gradient_accumulation_steps
    most = (MOST_TOKENS if run.config.packing else MOST_PADDED_TOKENS) // run.config.data.max_seq_length
    factors = range(num_requested if run.config.optim.merge_micro_batches else 1, 0, -1)
    cuts = {size * factor: num_requested // factor for factor in factors if num_requested % factor == 0}
    cuts = {rows: steps for rows, steps in cuts.items() if rows <= max(most, size)}
    if resumed_rows in cuts:
        cuts = {resumed_rows: cuts[resumed_rows]}
    shares = [run.config.model.gradient_checkpointing]
    if shares == ["auto"]:
        layers = text_config(run.hf_config).num_hidden_layers
        shares = [round(number / layers, 4) for number in range(layers + 1)]
    for share, rows in itertools.product(shares, cuts):
        run = run.changed(batch_size=rows, gradient_accumulation_steps=cuts[rows], gradient_checkpointing=share)
        estimate = run.estimate(upper_bound=True)
        if estimate.is_whole and estimate.needed_gib <= (1 - MARGIN) * gpu_gib:
            return run
    return run


def largest_fitting(run: RunSize, gpu_gib: float) -> RunSize | None:
    """Return `run` with the largest micro-batches that fit and the same rows per step, or None if no size fits."""
    size = run.config.data.batch_size
    in_step = size * run.config.optim.gradient_accumulation_steps
    sizes = (rows for rows in range(size, 0, -1) if in_step % rows == 0)
    tried = (run.changed(batch_size=rows, gradient_accumulation_steps=in_step // rows) for rows in sizes)
    return next((candidate for candidate in tried if fits(candidate, gpu_gib)), None)


def settle_memory(run: RunSize, gpu_gib: float, resumed_rows: int | None = None) -> tuple[RunSize, list[str]]:
    """Return the run with merged micro-batches and with a number for each option that is auto, and notes to print.

    `resumed_rows` is the number of rows per micro-batch in the checkpoint to continue. Raise `UserError` if the
    tensors of known size exceed `gpu_gib`, or if an option is auto, but no number fits or the run's memory is unknown.
    """
    requested, length, notes = run.config, run.config.data.max_seq_length, list[str]()
    automatic = requested.data.batch_size == AUTO_BATCH_SIZE
    recomputes = requested.model.gradient_checkpointing == "auto"
    if recomputes and not run.estimate(upper_bound=True).is_whole:
        problem = "the memory of activations is unknown for this model, precision, optimizer and sharding mode"
        raise UserError(f"--gradient_checkpointing auto: {problem}; give a number.")
    if automatic:
        run, resumed_rows = run.changed(batch_size=row_multiple(run)), row_multiple(run)
    run = settle_micro_batches(run, gpu_gib, resumed_rows)
    if not automatic and (rows := run.config.data.batch_size) != requested.data.batch_size:
        before, after = requested.optim.gradient_accumulation_steps, run.config.optim.gradient_accumulation_steps
        short = f"{requested.data.batch_size * length:,} tokens"
        notes.append(f"{before} micro-batches of {short} run as {after} of {rows * length:,}")
    estimate = run.estimate()
    state_gib = run.num_parameters * state_bytes(run.mode, run.optimizer, run.num_gpus, run.config) / GIB
    if run.adapted and estimate.is_whole:  # some weights may be in fp8
        state_gib = estimate.parts[STATE] + estimate.parts.get(CASTS, 0.0)
    tensors = "weights" if run.adapted else f"weights, gradients and state of --optimizer {run.optimizer}"
    if not automatic and (1 - ERROR) * estimate.total_gib > gpu_gib:
        tensors, state_gib = f"{tensors}, activations and logits", estimate.total_gib
    if state_gib + RESERVE_GIB > gpu_gib:
        problem = f"{tensors} take {state_gib:.1f} GiB under --sharding_mode {run.mode}, and the GPU has {gpu_gib:.1f}"
        raise UserError(f"this run cannot fit: {problem}.{_suggestions(run, gpu_gib)}")
    if automatic:
        if not estimate.is_whole:
            recipes, modes = "|".join(RECIPES_COUNTED), "|".join(MODES_COUNTED[1:])
            needs = f"--use_te, --fp8_scenario {recipes} and --sharding_mode {modes}"
            raise UserError(f"--batch_size auto needs {needs}: the memory of other runs is unknown; give a number.")
        sizes = range(max(row_multiple(run), MOST_TOKENS // length), 0, -1)
        fitting = next((size for size in sizes if fits(run.changed(batch_size=size), gpu_gib)), None)
        if fitting is None:
            reason = f"--batch_size auto: no micro-batch with --max_seq_length {length} fits {gpu_gib:.1f} GiB."
            raise UserError(reason + _suggestions(run, gpu_gib))
        run = run.changed(batch_size=fitting)
        gib = f"{run.estimate().needed_gib:.1f} of {gpu_gib:.1f} GiB"
        notes.append(f"--batch_size auto: {fitting} sequences of {length:,} tokens, estimated to need {gib}")
    elif estimate.needed_gib > gpu_gib:
        needed = f"{estimate.needed_gib:.1f} of the GPU's {gpu_gib:.1f} GiB: it may be slow, or run out of memory."
        notes.append(f"WARNING: a step is estimated to need {needed}{_suggestions(run, gpu_gib)}")
    if recomputes:
        layers = text_config(run.hf_config).num_hidden_layers
        number = len(recomputed_layers(run.config.model.gradient_checkpointing, layers))
        bound = "" if run.spec else "at most "
        gib = f"{bound}{run.estimate(upper_bound=True).needed_gib:.1f} of {gpu_gib:.1f} GiB"
        choice = f"{number} of {layers} layers recomputed, estimated to need {gib}"
        notes.append(f"--gradient_checkpointing auto: {choice}")
    return run, notes


def _suggestions(run: RunSize, gpu_gib: float) -> str:
    """Return the end of an error message: options that would make the run fit, the cheapest change first."""
    unchanged, recomputed, eight_bit, *others = WAYS.values()
    changes = [unchanged, recomputed]
    if run.num_gpus > 1:
        sharded = {"sharding_mode": "fsdp_full", "sync_every_micro_batch": True}
        changes += [{"sharding_mode": "fsdp_full"}, sharded, sharded | recomputed]
        changes += [] if run.adapted else [sharded | eight_bit]
    if not run.sharded and not run.adapted:
        changes += [eight_bit, *others]
    suggestions = []
    for change in changes:
        if "gradient_checkpointing" in change and (run.spec is None or run.config.model.gradient_checkpointing == 1):
            continue  # activations are not estimated, or all layers are already recomputed
        changed = run.changed(**change)
        if refusal(changed.config, changed.mode):
            continue  # these options would be an error
        fitted = largest_fitting(changed, gpu_gib)
        if fitted is not None and (fitted.spec is None) == (run.spec is None):
            flags = [f"--{name}" + (f" {value}" if value is not True else "") for name, value in change.items()]
            if (rows := fitted.config.data.batch_size) < run.config.data.batch_size:
                steps = fitted.config.optim.gradient_accumulation_steps
                flags += [f"--batch_size {rows}", f"--gradient_accumulation_steps {steps}"]
            without = "" if fitted.estimate().is_whole else " without activations"
            suggestions.append(f"{' '.join(flags)} ({fitted.estimate().needed_gib:.1f} GiB{without})")
    suggestions = [*suggestions[:3], "more GPUs with train_multi_gpu.py --sharding_mode fsdp_full"]
    return f" What would fit: {'; '.join(suggestions)}."
