"""What is settled before anything is built: the values of `auto`, whether fp8 will be slower, and what cannot fit.

Memory is a matter of sizes alone (`memory.py`), so it is known for every GPU. Times need the rates of the GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llm_fp8.config.options import AUTO_BATCH_SIZE, Config, PrecisionConfig
from llm_fp8.config.recipes import FP8_SIZE_MULTIPLE, token_multiple
from llm_fp8.config.validation import MachineFacts, check_machine, check_options, fp8_params_recipes
from llm_fp8.distributed.sharding_mode import state_bytes
from llm_fp8.models.build import count_parameters
from llm_fp8.observability.metrics import GIB
from llm_fp8.tools.predict.calibration import FAST_HOST, FITS_RESERVE_GIB, MAX_GPUS, MEASURED_TOKENS, MODES
from llm_fp8.tools.predict.memory import peak_memory
from llm_fp8.tools.predict.prediction import Gpu, can_predict, gpu_by_name, known_gpu
from llm_fp8.tools.predict.step_time import StepTime, host_seconds, step_time
from llm_fp8.tools.predict.workload import PREDICTED, ModelSize, StepWorkload
from llm_fp8.train.prediction import Machine, RunDescription
from llm_fp8.utils.errors import UserError
from te_llama import UnsupportedArchitecture

NUM_ALTERNATIVES = 3
"""At most so many are told where a run cannot fit."""
OFFLOADED_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Values of --offload_optimizer that are tried."""


def workload_of(run: RunDescription, micro_batch_tokens: int, mean_length: float) -> StepWorkload | None:
    """`run` with micro-batches of so many positions, and documents of this token-averaged length; None where no
    constants are for it: a decoder that is not TE's, adapters, a sharding mode, recipe or option without a record.
    """
    config, options, precision = run.config, run.config.parallel, run.config.precision
    mode = "single" if run.num_gpus == 1 and run.mode == "ddp" else run.mode  # nothing is communicated
    if (
        not config.model.use_te
        or config.lora.lora_rank
        or run.recipe not in PREDICTED
        or precision.fp8_bf16_modules
        or mode not in MODES
        or (mode == "single") != (run.num_gpus == 1)
        or options.context_parallel_size > 1
        or run.num_gpus > MAX_GPUS
    ):
        return None
    try:
        model = ModelSize.from_config(run.hf_config)
    except UnsupportedArchitecture:
        return None
    recomputed = range(
        0,
        model.spec.num_layers if config.model.gradient_checkpointing else 0,
        config.model.gradient_checkpointing or 1,
    )
    return StepWorkload(
        model=model,
        recipe=run.recipe,
        micro_batch_tokens=max(1, micro_batch_tokens),
        micro_batches=config.optim.gradient_accumulation_steps,
        mean_length=max(1.0, mean_length),
        optimizer=run.optimizer,
        mode=mode,
        num_gpus=run.num_gpus,
        sync_every_micro_batch=options.sync_every_micro_batch,
        recomputed_layers=len(recomputed),
        fp8_params=options.fp8_params,
        fp8_recast_weights=precision.fp8_recast_weights,
        cuda_graphs=config.model.cuda_graphs,
        offload_optimizer=config.optim.offload_optimizer,
    )


def has_times(work: StepWorkload, gpu: Gpu) -> bool:
    """Whether there are constants for the time of `work` on this GPU."""
    return can_predict(gpu, work.recipe) and (work.num_gpus == 1 or _knows_communication(work, gpu))


def _knows_communication(work: StepWorkload, gpu: Gpu) -> bool:
    """Whether there are constants for communication: for this GPU, and beside a backward pass that hides it."""
    return gpu.checked and not work.cuda_graphs


def settle(run: RunDescription, machine: Machine) -> tuple[Config, list[str]]:
    """`run`'s options with a value for each `auto`, and sentences on what that came to. Raises `UserError` where an
    `auto` has no prediction, and for weights, gradients and optimizer state that the GPU's memory cannot hold.
    """
    said: list[str] = []
    asked, memory_gib = run.config, machine.memory_gib
    if asked.precision.mixed_precision == "auto":
        run, sentence = _faster_precision(run, machine)
        said.append(sentence)
    refuse_what_cannot_fit(run, memory_gib)
    if asked.data.batch_size == AUTO_BATCH_SIZE:
        run, sentence = _fill_memory(run, memory_gib)
        said.append(sentence)
    elif (work := _intended(run)) and peak_gib(work) + FITS_RESERVE_GIB > memory_gib:
        # As long as the tensors fit, the allocator takes back, within steps, what it holds for FSDP's other streams.
        tensors_fit = peak_memory(work).total_gib + FITS_RESERVE_GIB <= memory_gib
        outcome = "steps will be slow, or it will run" if tensors_fit else "it will probably run"
        said.append(
            f"WARNING: a step is predicted to take {peak_gib(work):.1f} GiB and the GPU has "
            f"{memory_gib:.1f}, so {outcome} out of memory.{_told(run, memory_gib)}"
        )
    if asked.precision.mixed_precision == "fp8" and (slower := _why_fp8_is_slower(run, known_gpu(run.gpu_name))):
        said.append(f"WARNING: {slower}, or use --mixed_precision bf16.")
    return run.config, said


def peak_gib(work: StepWorkload) -> float:
    """What `work`'s tensors take at the peak, under FSDP what the allocator reserves for them."""
    memory = peak_memory(work)
    return memory.reserved_gib if work.sharded else memory.total_gib


def fits(work: StepWorkload, memory_gib: float) -> bool:
    """Whether `work` fits with a margin: CUDA's own, and what the first GPU of `ddp` sometimes held beyond its
    prediction, two bytes per parameter (docs/results.md).
    """
    at_times = 2 * work.model.num_parameters / GIB if work.mode == "ddp" else 0.0
    return peak_gib(work) + at_times + FITS_RESERVE_GIB <= memory_gib


def _intended(run: RunDescription, batch_size: int | None = None) -> StepWorkload | None:
    """The workload of whole rows: `batch_size` of them, or as many as the options say."""
    data = run.config.data
    size = data.batch_size if batch_size is None else batch_size
    return workload_of(run, size * data.max_seq_length, data.max_seq_length)


def _multiple(run: RunDescription) -> int:
    """What the positions of a micro-batch are a multiple of."""
    return max(token_multiple(run.recipe), FP8_SIZE_MULTIPLE)


def _with_batch_size(run: RunDescription, batch_size: int) -> RunDescription:
    data = dataclasses.replace(run.config.data, batch_size=batch_size)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))


# --- --batch_size auto ---------------------------------------------------------------------------------------


def largest_batch_size(run: RunDescription, memory_gib: float) -> int | None:
    """The most sequences of a micro-batch that are predicted to fit, with micro-batches as long as any that was
    recorded, or of one such number; None where not even that fits. Raises `UserError` without a prediction.
    """
    length, multiple = run.config.data.max_seq_length, _multiple(run)
    step = multiple // math.gcd(length, multiple)
    fitting = None
    for size in range(step, max(step, MEASURED_TOKENS[1] // length) + 1, step):
        work = _intended(run, size)
        if work is None:
            raise UserError(_without_prediction("--batch_size", "give a number"))
        if fits(work, memory_gib):
            fitting = size
    return fitting


def _without_prediction(flag: str, instead: str) -> str:
    return (
        f"{flag} auto needs a prediction, which runs with --use_te, --mixed_precision bf16 or an fp8 recipe among "
        f"{', '.join(PREDICTED[1:])}, one GPU or --sharding_mode {', '.join(MODES[1:])} have, without --lora_rank, "
        f"--fp8_bf16_modules and --context_parallel_size; {instead}."
    )


def _fill_memory(run: RunDescription, memory_gib: float) -> tuple[RunDescription, str]:
    size, length = largest_batch_size(run, memory_gib), run.config.data.max_seq_length
    if size is None:
        raise UserError(
            f"--batch_size auto: no micro-batch with --max_seq_length {length} is predicted to fit the GPU's "
            f"{memory_gib:.1f} GiB.{_told(_with_batch_size(run, 1), memory_gib)}"
        )
    work = _intended(run, size)
    assert work is not None
    return _with_batch_size(run, size), (
        f"--batch_size auto: {size} sequences of {length:,} tokens, predicted to take "
        f"{peak_gib(work):.1f} of {memory_gib:.1f} GiB"
    )


# --- --mixed_precision auto ----------------------------------------------------------------------------------


def _in_bf16(run: RunDescription) -> RunDescription:
    """`run` without what belongs to fp8."""
    parallel = dataclasses.replace(run.config.parallel, fp8_params=False)
    config = dataclasses.replace(run.config, precision=PrecisionConfig(mixed_precision="bf16"), parallel=parallel)
    return dataclasses.replace(run, config=config, recipe="bf16")


def _step_time(work: StepWorkload, gpu: Gpu) -> StepTime:
    """Of `work`; without communication where none was measured."""
    if work.num_gpus > 1 and not _knows_communication(work, gpu):
        work = dataclasses.replace(work, mode="single", num_gpus=1, fp8_params=False, sync_every_micro_batch=False)
    return step_time(work, gpu.rates)


def _why_fp8_is_slower(run: RunDescription, gpu: Gpu | None) -> str | None:
    """A sentence, without its end, where a step of `run` is predicted to take longer than one in bf16; None where it is
    not, or not predicted.

    fp8 launches more kernels. Where the host needs longer for them than the GPU for bf16's, the step is as long as the
    launches, and bf16's are fewer.
    """
    work = _intended(run)
    if work is None or gpu is None or run.recipe == "bf16" or not can_predict(gpu, run.recipe):
        return None
    fp8, bf16 = _step_time(work, gpu), _step_time(work.with_recipe("bf16"), gpu)
    launches_s, kernels_s = FAST_HOST * host_seconds(work), bf16.total_s - bf16.gap_s
    if launches_s > kernels_s:
        return (
            f"fp8 will be slower than bf16: launching its kernels takes the fastest recorded host {launches_s:.2g} s a "
            f"step, and the GPU has done bf16's in {kernels_s:.2g} s; give a micro-batch more tokens"
            f"{', or add --cuda_graphs' if _takes_graphs(run) else ''}"
        )
    if fp8.total_s >= bf16.total_s:
        return f"fp8 will be slower than bf16: predicted {fp8.total_s:.2g} s a step, and {bf16.total_s:.2g} s in bf16"
    return None


def _takes_graphs(run: RunDescription) -> bool:
    """Whether --cuda_graphs can be added to `run`."""
    config = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, cuda_graphs=True))
    try:
        check_options(config)
        check_machine(config, MachineFacts(sharding_mode=run.mode))
    except UserError:
        return False
    return True


def _faster_precision(run: RunDescription, machine: Machine) -> tuple[RunDescription, str]:
    """`run` in fp8 or in bf16, and why."""
    flag = "--mixed_precision auto"
    if not machine.has_fp8:
        return _in_bf16(run), f"{flag}: bf16, because this GPU has no fp8"
    trial = run
    if run.config.data.batch_size == AUTO_BATCH_SIZE:
        trial = _with_batch_size(run, largest_batch_size(run, machine.memory_gib) or 1)
    work = _intended(trial)
    gpu = None if work is None else gpu_by_name(run.gpu_name)  # which may measure it
    if work is None or gpu is None or not can_predict(gpu, run.recipe):
        raise UserError(_without_prediction("--mixed_precision", "choose fp8 or bf16"))
    if slower := _why_fp8_is_slower(trial, gpu):
        return _in_bf16(run), f"{flag}: bf16, because {slower}"
    precision = dataclasses.replace(run.config.precision, mixed_precision="fp8")
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, precision=precision))
    fp8_s, bf16_s = _step_time(work, gpu).total_s, _step_time(work.with_recipe("bf16"), gpu).total_s
    return run, f"{flag}: fp8, predicted {fp8_s:.3g} s a step, and {bf16_s:.3g} s in bf16"


# --- what cannot fit -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """Options under which a run is predicted to fit."""

    words: tuple[str, ...]
    """Each an option with its value."""
    peak_gib: float
    tokens_per_s: float | None
    """None for a GPU whose rates are not known."""

    def describe(self) -> str:
        """In words, the options first."""
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{' '.join(self.words)} (predicted {self.peak_gib:.1f} GiB{speed})"

    def holds_more_than(self, other: Alternative) -> bool:
        """Whether it has all of the other one's changes, and further ones."""
        return set(other.words) < set(self.words)


def _num_parameters(run: RunDescription) -> int:
    """Without building the model where its sizes are known."""
    work = _intended(run)
    return count_parameters(run.hf_config) if work is None else work.model.num_parameters


def refuse_what_cannot_fit(run: RunDescription, memory_gib: float) -> None:
    """Raise `UserError` where weights, gradients and optimizer state alone take more than a GPU has, with what would
    fit.
    """
    num_parameters = _num_parameters(run)
    state_gib = num_parameters * state_bytes(run.mode, run.optimizer, run.num_gpus, run.config) / GIB
    if state_gib + FITS_RESERVE_GIB <= memory_gib:
        return
    what = "the weights" if run.config.lora.lora_rank else "weights, gradients and optimizer state"
    where = "" if run.num_gpus == 1 else f" on each of {run.num_gpus} GPUs with --sharding_mode {run.mode}"
    raise UserError(
        f"this run cannot fit: {what} of {num_parameters / 1e9:.2f} billion parameters take {state_gib:.1f} GiB{where} "
        f"(--optimizer {run.optimizer}), and the GPU has {memory_gib:.1f}.{_told(run, memory_gib)}"
    )


def _told(run: RunDescription, memory_gib: float) -> str:
    """What would fit, for the end of a message."""
    found = [each.describe() for each in alternatives(run, memory_gib)]
    if (num_gpus := _enough_gpus(run, memory_gib)) is not None:
        found.append(f"{num_gpus} such GPUs with train_multi_gpu.py --sharding_mode fsdp_full")
    if run.num_gpus > 1 and run.mode != "fsdp_offload":
        found.append("--sharding_mode fsdp_offload (slow)")
    return f" What would fit: {'; '.join(found or ['a smaller model, or GPUs with more memory'])}."


def _enough_gpus(run: RunDescription, memory_gib: float) -> int | None:
    """The fewest GPUs of a host, more than the run has, on which the state under fsdp_full takes half of the memory."""
    config, num_parameters = run.config, _num_parameters(run)
    for num_gpus in (2, 4, 8):
        state = state_bytes("fsdp_full", "adamw_fp32", num_gpus, config) * num_parameters / GIB
        if num_gpus > run.num_gpus and state <= memory_gib / 2:
            return num_gpus
    return None


def alternatives(run: RunDescription, memory_gib: float) -> list[Alternative]:
    """Changes of options under which `run` is predicted to fit, the fastest first, `NUM_ALTERNATIVES` at most: none
    that holds another one's changes and more.
    """
    gpu = known_gpu(run.gpu_name)
    found: list[Alternative] = []
    for words, changed, shares in _variations(run):
        for sized, words_of_size in _sizes(changed, shares):
            work = _intended(sized)
            if work is None or not fits(work, memory_gib):
                continue
            speed = None
            if gpu is not None and has_times(work, gpu):
                speed = work.tokens_per_step / step_time(work, gpu.rates).total_s
            found.append(Alternative((*words, *words_of_size), peak_gib(work), speed))
            break
    found.sort(key=lambda each: (-(each.tokens_per_s or 0.0), len(each.words)))
    simplest = [each for each in found if not any(each.holds_more_than(other) for other in found)]
    return simplest[:NUM_ALTERNATIVES]


def _sizes(run: RunDescription, shares: Sequence[float]) -> Iterator[tuple[RunDescription, tuple[str, ...]]]:
    """`run` with micro-batches from its own size down, as many sequences in a step, and each of `shares` of the
    optimizer on the host, if there are any; with the options of each.
    """
    data, optim, multiple = run.config.data, run.config.optim, _multiple(run)
    asked = max(1, data.batch_size)
    in_step = asked * optim.gradient_accumulation_steps
    for size in range(asked, 0, -1):
        if in_step % size or size * data.max_seq_length % multiple:
            continue
        words = () if size == asked else (f"--batch_size {size}", f"--gradient_accumulation_steps {in_step // size}")
        for share in shares or (optim.offload_optimizer,):
            changed = dataclasses.replace(optim, gradient_accumulation_steps=in_step // size, offload_optimizer=share)
            config = dataclasses.replace(run.config, data=dataclasses.replace(data, batch_size=size), optim=changed)
            on_host = (f"--offload_optimizer {share:g}",) if shares else ()
            yield dataclasses.replace(run, config=config), (*on_host, *words)


def _variations(run: RunDescription) -> Iterator[tuple[list[str], RunDescription, Sequence[float]]]:
    """`run` with every combination of what lowers its memory, the options of each, and the shares of the optimizer to
    try on the host.
    """
    config, several, sharded = run.config, run.num_gpus > 1, run.mode.startswith("fsdp")
    accumulates, parallel = config.optim.gradient_accumulation_steps > 1, config.parallel
    offloads = config.optim.offload_optimizer > 0
    both, no = (False, True), (False,)
    for mode, eight_bit, on_host, recast, recompute, sync, in_fp8 in itertools.product(
        [run.mode, *(mode for mode in ("fsdp_grad", "fsdp_full") if several and mode != run.mode)],
        both if not sharded and run.optimizer != "adamw_8bit" else no,
        both if not sharded and run.optimizer == "adamw_master" and not offloads else no,
        both if run.recipe != "bf16" and not sharded and not config.precision.fp8_recast_weights else no,
        both if not config.model.gradient_checkpointing else no,
        both if several and accumulates and not parallel.sync_every_micro_batch else no,
        both if several and run.recipe in fp8_params_recipes() and not parallel.fp8_params else no,
    ):
        to_fsdp = mode.startswith("fsdp")
        if eight_bit + (on_host or offloads) + to_fsdp > 1 or (in_fp8 and not to_fsdp) or (recast and to_fsdp):
            continue
        changes = {
            f"--sharding_mode {mode}": mode != run.mode,
            "--optimizer adamw_8bit": eight_bit,
            "--optimizer auto": to_fsdp and run.optimizer == "adamw_8bit",  # which no fsdp mode takes
            "--fp8_recast_weights": recast,
            "--gradient_checkpointing": recompute,
            "--sync_every_micro_batch": sync,
            "--fp8_params": in_fp8,
        }
        changed = dataclasses.replace(
            config,
            model=dataclasses.replace(
                config.model, gradient_checkpointing=int(recompute) or config.model.gradient_checkpointing
            ),
            precision=dataclasses.replace(
                config.precision, fp8_recast_weights=recast or config.precision.fp8_recast_weights
            ),
            parallel=dataclasses.replace(
                parallel,
                sync_every_micro_batch=sync or parallel.sync_every_micro_batch,
                fp8_params=in_fp8 or parallel.fp8_params,
            ),
        )
        kind = "adamw_8bit" if eight_bit else "adamw_fp32" if to_fsdp and not sharded else run.optimizer
        yield (
            [words for words, made in changes.items() if made],
            dataclasses.replace(run, config=changed, mode=mode, optimizer=kind),
            OFFLOADED_SHARES if on_host else (),
        )
