"""What is settled before anything is built: the values of `auto`, warnings, and what cannot fit."""

from __future__ import annotations

import dataclasses
import json

import pytest
from llm_fp8.train.prediction import Machine, RunDescription

from llm_fp8.config.parser import parse_config
from llm_fp8.config.recipes import chosen
from llm_fp8.distributed.sharding_mode import default_optimizer
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.observability.metrics import GIB
from llm_fp8.tools.predict.before_run import alternatives, fits, largest_batch_size, settle, workload_of
from llm_fp8.tools.predict.calibration import CALIBRATED_GPU, FITS_RESERVE_GIB, MEASURED_TOKENS, Rates
from llm_fp8.tools.predict.memory import peak_memory
from llm_fp8.tools.predict.prediction import known_gpu, predict
from llm_fp8.tools.predict.step_time import step_time
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import REPOSITORY

H200, H100 = Machine(139.8, has_fp8=True), Machine(79.2, has_fp8=True)


def described(words: str, num_gpus: int = 1, gpu: str = CALIBRATED_GPU) -> RunDescription:
    """The run of a command line, with bundled sizes and the TE decoder."""
    config = parse_config(["--random_init", "--use_te", *words.split()], parallel=True)
    asked, precision = config.parallel.sharding_mode, config.precision
    mode, kind = "single" if asked == "auto" else asked, config.optim.optimizer
    return RunDescription(
        config=config,
        hf_config=load_config(config.model, resolve_source(config.model)),
        recipe=chosen(precision.fp8_scenario, "te") if precision.may_be_fp8 else precision.mixed_precision or "bf16",
        optimizer=default_optimizer(mode) if kind == "auto" else kind,
        mode=mode,
        num_gpus=num_gpus,
        gpu_name=gpu,
    )


def peak_gib(run: RunDescription, batch_size: int) -> float:
    length = run.config.data.max_seq_length
    work = workload_of(run, batch_size * length, length)
    assert work is not None
    return peak_memory(work).total_gib


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ("--mixed_precision bf16", "--mixed_precision fp8", "--mixed_precision fp8 --fp8_scenario block")
)
def test_auto_takes_the_largest_micro_batch_that_fits(recipe):
    """One sequence more would not leave CUDA its reserve; what was chosen does, and the options say so from then on."""
    run = described(f"--model_name Llama-3.1-8B --batch_size auto {recipe}")
    config, [said] = settle(run, H200)
    size = config.data.batch_size
    assert peak_gib(run, size) + FITS_RESERVE_GIB <= H200.memory_gib < peak_gib(run, size + 1) + FITS_RESERVE_GIB
    assert said == (
        f"--batch_size auto: {size} sequences of 1,024 tokens, predicted to take {peak_gib(run, size):.1f} of 139.8 GiB"
    )
    assert dataclasses.replace(config, data=run.config.data) == run.config, "nothing else was changed"


def test_auto_goes_no_further_than_what_was_measured():
    run = described("--model_name Llama-3.2-1B --batch_size auto --max_seq_length 512")
    assert largest_batch_size(run, 10_000.0) == MEASURED_TOKENS[1] // 512
    long = described("--model_name Llama-3.2-1B --batch_size auto --max_seq_length 131072")
    assert largest_batch_size(long, 10_000.0) == 1, "one sequence is tried at any length"


@pytest.mark.parametrize(("scenario", "multiple"), (("delayed", 16), ("block", 128)))
def test_auto_takes_a_multiple_that_the_recipe_can_cast(scenario, multiple):
    run = described(
        f"--model_name Llama-57M --batch_size auto --max_seq_length 264 --mixed_precision fp8 --fp8_scenario {scenario}"
    )
    size = largest_batch_size(run, 139.8)
    assert size * 264 % multiple == 0 and size * 264 > MEASURED_TOKENS[1] - multiple * 264


def test_the_chosen_size_holds_for_recorded_runs():
    """The fullest recorded run of 8B, which peaked at 137.5 of 139.8 GiB, is the most that auto would take."""
    [row] = [
        row
        for row in json.loads((REPOSITORY / "benchmarks/results/speed_table_h200.json").read_text())["rows"]
        if row["row"] == "8b" and row["arm"] == "delayed:fp8head_all"
    ]
    run = described(
        "--model_name Llama-3.1-8B --batch_size auto --mixed_precision fp8 --fp8_lm_head all "
        "--gradient_accumulation_steps 8"
    )
    assert largest_batch_size(run, H200.memory_gib) == row["batch_size"] == 8


@pytest.mark.parametrize(
    "words",
    ("--lora_rank 8", "--use_te=false", "--sharding_mode fsdp_offload", "--mixed_precision fp8 --fp8_scenario mxfp8"),
)
@pytest.mark.parametrize("flag", ("--batch_size", "--mixed_precision"))
def test_auto_needs_a_prediction(words, flag):
    if flag == "--mixed_precision":
        words = words.replace("--mixed_precision fp8", "")
    run = described(f"--model_name Llama-57M {flag} auto {words}", num_gpus=2 if "mode" in words else 1)
    with pytest.raises(UserError, match=f"^{flag} auto needs a prediction, which runs with --use_te, .* have, without"):
        settle(run, H200)


def test_a_micro_batch_that_cannot_fit_is_refused_with_what_can():
    run = described("--model_name Llama-3.1-8B --batch_size auto --max_seq_length 65536 --optimizer adamw_8bit")
    with pytest.raises(UserError) as refused:
        settle(run, H100)
    assert str(refused.value).startswith(
        "--batch_size auto: no micro-batch with --max_seq_length 65536 is predicted to fit the GPU's 79.2 GiB. What "
        "would fit: --gradient_checkpointing (predicted "
    )


def test_state_that_cannot_fit_is_refused_with_what_can():
    run = described("--model_name Llama-3.1-8B --mixed_precision fp8")
    with pytest.raises(UserError) as refused:
        settle(run, H100)
    assert str(refused.value).startswith(
        "this run cannot fit: weights, gradients and optimizer state of 8.03 billion parameters take 89.7 GiB "
        "(--optimizer adamw_master), and the GPU has 79.2. What would fit: --optimizer adamw_8bit (predicted "
    )
    assert str(refused.value).endswith("; 4 such GPUs with train_multi_gpu.py --sharding_mode fsdp_full.")
    assert settle(run, H200) == (run.config, [])


def test_casts_are_not_kept_where_nothing_else_fits():
    """14 billion parameters leave no room for two bytes per weight more."""
    options = "--model_name Qwen2.5-14B --mixed_precision fp8 --gradient_accumulation_steps 16"
    with pytest.raises(UserError, match="--fp8_recast_weights --offload_optimizer 1 --batch_size 2"):
        settle(described(options), H100)
    kept, anew = (
        workload_of(described(f"{options} --offload_optimizer 1 {words}"), 2048, 1024)
        for words in ("", "--fp8_recast_weights")
    )
    saved_gib = peak_memory(kept).total_gib - peak_memory(anew).total_gib
    assert saved_gib == pytest.approx(2 * kept.model.layer_weights / GIB)
    assert not fits(kept, H100.memory_gib) and fits(anew, H100.memory_gib)
    rates = known_gpu(CALIBRATED_GPU).rates
    assert step_time(anew, rates).total_s > step_time(kept, rates).total_s


def test_the_refusal_names_the_optimizer_that_deepspeed_has():
    run = described("--model_name Qwen2.5-14B --mixed_precision fp8 --sharding_mode deepspeed_1", num_gpus=2)
    with pytest.raises(UserError, match=r"2 GPUs with --sharding_mode deepspeed_1 \(--optimizer adamw_fp32\)"):
        settle(run, H100)


def test_without_the_te_decoder_the_state_is_counted_too():
    run = described("--use_te=false --model_name Qwen2.5-14B --mixed_precision bf16")
    with pytest.raises(UserError, match="14.77 billion parameters take 165.1 GiB .* What would fit: 8 such GPUs"):
        settle(run, H100)
    adapters = described("--use_te=false --model_name Qwen2.5-14B --mixed_precision bf16 --lora_rank 8")
    with pytest.raises(UserError, match="the weights of 14.77 billion parameters take 27.5 GiB"):
        settle(adapters, Machine(24.0, has_fp8=True))
    assert settle(adapters, H100) == (adapters.config, [])


def test_a_step_that_will_run_out_of_memory_is_told():
    run = described("--model_name Llama-3.1-8B --mixed_precision fp8 --batch_size 16")
    config, [said] = settle(run, H200)
    assert config == run.config, "a prediction alone refuses nothing"
    assert said.startswith(
        f"WARNING: a step is predicted to take {peak_gib(run, 16):.1f} GiB and the GPU has 139.8, so"
    )
    assert "; --batch_size 8 --gradient_accumulation_steps 2 (predicted 136.5 GiB, " in said


def test_alternatives_fit_and_come_in_the_order_of_their_speed():
    words = "--model_name Llama-3.1-8B --mixed_precision fp8 --batch_size 16 --gradient_accumulation_steps 2"
    run = described(words)
    found = alternatives(run, H200.memory_gib)
    assert len(found) == 3
    speeds = [each.tokens_per_s for each in found]
    assert speeds == sorted(speeds, reverse=True)
    for each in found:
        changed = described(f"{words} {' '.join(each.words)}")
        data, optim = changed.config.data, changed.config.optim
        assert data.batch_size * optim.gradient_accumulation_steps == 32, "the same sequences in a step"
        work = workload_of(changed, data.batch_size * 1024, 1024)
        assert fits(work, H200.memory_gib) and each.peak_gib == peak_memory(work).total_gib
        assert each.tokens_per_s == predict(work, known_gpu(CALIBRATED_GPU)).tokens_per_s
        assert not any(set(other.words) < set(each.words) for other in found)


def test_an_optimizer_on_the_host_leaves_its_share_of_the_gpu():
    """Eight bytes per parameter, for three buffers of 128 MiB; the least of the shares that fit is told, and its speed
    has the copies in it.
    """
    words = "--model_name Llama-3.1-8B --mixed_precision fp8 --gradient_accumulation_steps 16"
    run, offloaded = described(words), described(f"{words} --offload_optimizer 1")
    saved = 8 * 8_030_261_248 / 2**30 - 3 * 128 / 1024
    assert peak_gib(run, 8) - peak_gib(offloaded, 8) == pytest.approx(saved)
    [told] = [each for each in alternatives(run, 79.2) if each.words == ("--offload_optimizer 1",)]
    work = workload_of(offloaded, 8192, 1024)
    copies_s = step_time(work, Rates()).total_s - step_time(workload_of(run, 8192, 1024), Rates()).total_s
    assert copies_s == pytest.approx(8 * 8_030_261_248 / 47e9)
    assert told.tokens_per_s == predict(work, known_gpu(CALIBRATED_GPU)).tokens_per_s and fits(work, 79.2)
    assert not fits(workload_of(described(f"{words} --offload_optimizer 0.75"), 8192, 1024), 79.2)


@pytest.mark.parametrize(("mode", "num_gpus", "memory_gib"), (("", 1, 110.0), ("--sharding_mode ddp", 2, 139.8)))
def test_what_is_told_goes_with_an_optimizer_on_the_host(mode, num_gpus, memory_gib):
    """Neither 8-bit moments nor a sharded optimizer do: the options that are told pass the checks of a run."""
    words = f"--model_name Llama-3.1-8B --mixed_precision fp8 --batch_size 16 --offload_optimizer 0.25 {mode}"
    found = alternatives(described(words, num_gpus), memory_gib)
    assert found and not any("--offload_optimizer" in word for each in found for word in each.words)
    for each in found:
        assert described(f"{words} {' '.join(each.words)}", num_gpus).config.optim.offload_optimizer > 0


def test_a_sharded_run_is_told_to_drop_8_bit_moments():
    words = "--model_name Qwen2.5-14B --mixed_precision fp8 --batch_size 8 --optimizer adamw_8bit --sharding_mode ddp"
    found = alternatives(described(words, 2), 139.8)
    sharded = [each for each in found if "--sharding_mode fsdp_full" in each.words]
    for each in sharded:
        assert described(f"{words} {' '.join(each.words)}", 2).config.optim.optimizer == "auto"
    assert sharded


def test_an_unknown_gpu_gets_memory_and_no_speed():
    run = described("--model_name Llama-3.1-8B --mixed_precision fp8 --batch_size 16", gpu="a GPU of 2031")
    _, [said] = settle(run, H200)
    assert "--optimizer adamw_8bit (predicted 109.6 GiB)" in said and "tokens/s" not in said


def test_several_gpus_are_told_to_shard():
    run = described("--model_name Llama-3.1-8B --mixed_precision fp8 --sharding_mode ddp", num_gpus=2)
    with pytest.raises(UserError) as refused:
        settle(run, H100)
    assert "take 89.7 GiB on each of 2 GPUs with --sharding_mode ddp" in str(refused.value)
    assert "--sharding_mode fsdp_full" in str(refused.value).partition("What would fit: ")[2]
    assert str(refused.value).endswith("--sharding_mode fsdp_offload (slow).")


def test_memory_that_the_streams_of_fsdp_fill_makes_steps_slow():
    """Of two H200s a recorded step took 0.84 to 1.42 s, and 0.61 were predicted (multi_gpu_throughput_14b_x2.json)."""
    words = "--model_name Qwen2.5-14B --mixed_precision fp8 --sharding_mode fsdp_grad --fp8_params"
    [full] = settle(described(f"{words} --batch_size 4", 2), H200)[1]
    assert full.startswith("WARNING: a step is predicted to take 147.") and "so steps will be slow, or it" in full
    [more] = settle(described(f"{words} --batch_size 8", 2), H200)[1]
    assert "so it will probably run out of memory" in more


# --- precision -------------------------------------------------------------------------------------------------------

SLOW = "fp8 will be slower than bf16: launching its kernels takes the fastest recorded host "


@pytest.mark.parametrize(
    ("words", "named"),
    (
        ("--model_name Llama-57M --batch_size 16", True),
        ("--model_name Llama-57M --batch_size 16 --no_packing", False),
        ("--model_name Llama-57M --batch_size 16 --gradient_checkpointing", False),
    ),
)
def test_a_run_that_the_host_slows_down_is_told_of_cuda_graphs_where_it_can_have_them(words, named):
    [said] = settle(described(f"{words} --mixed_precision fp8"), H200)[1]
    assert said.startswith(f"WARNING: {SLOW}") and (", or add --cuda_graphs, or use" in said) == named
    if named:
        assert settle(described(f"{words} --mixed_precision fp8 --cuda_graphs"), H200)[1] == []


GRAPHS_1B = "--model_name Llama-3.2-1B --batch_size 1 --max_seq_length 512"
GRAPHS_3B = "--model_name Llama-3.2-3B --batch_size 1 --max_seq_length 512"
GRAPHS_57M = "--model_name Llama-57M --batch_size 16 --max_seq_length 1024"


@pytest.mark.parametrize(
    ("words", "num_gpus", "file"),
    (
        (GRAPHS_3B, 1, "levers_small_steps_h100"),
        (GRAPHS_1B, 1, "levers_small_steps_57m_h100"),
        (GRAPHS_57M, 1, "levers_small_steps_57m_h100"),
        (f"{GRAPHS_3B} --sharding_mode ddp", 2, "levers_3b_x2_graphs"),
    ),
)
def test_with_cuda_graphs_auto_takes_fp8_where_it_was_faster_and_steps_are_as_long_as_predicted(words, num_gpus, file):
    name = "NVIDIA H100 80GB HBM3"
    run = described(f"{words} --cuda_graphs --gradient_accumulation_steps 4 --mixed_precision auto", num_gpus, name)
    config, [said] = settle(run, H100)
    assert config.precision.mixed_precision == "fp8" and said.startswith("--mixed_precision auto: fp8, predicted")
    rows = json.loads((REPOSITORY / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]
    model, length = run.config.model.model_name, run.config.data.max_seq_length
    measured = {row["arm"]: row for row in rows if row["model"] == model and row["arm"].endswith(":graphs")}
    assert len(measured) == 2
    for arm, row in measured.items():
        work = workload_of(run, row["batch_size"] * length, length)
        assert work is not None
        work = work.with_recipe(arm.removeprefix("ddp:").removesuffix(":graphs"))
        memory = peak_memory(work)
        eager = (memory.activations_gib + memory.head_gib) / 2  # none of these runs took one behind the first graph
        assert row["peak_memory_gib"] <= memory.total_gib < row["peak_memory_gib"] + eager
        if num_gpus == 1:
            measured_s = work.tokens_per_step / row["tokens_per_s"]
            assert step_time(work, known_gpu(name).rates).total_s == pytest.approx(measured_s, rel=0.06)


@pytest.mark.parametrize(
    ("words", "num_gpus", "is_fp8"),
    (
        ("--model_name Llama-3.1-8B", 1, True),
        ("--model_name Llama-3.1-8B --batch_size 2", 1, True),  # comparison_8b_pair.json: 1.45 times as fast
        ("--model_name Llama-3.2-1B", 1, True),  # comparison_1b_pair.json: 1.29
        ("--model_name Llama-57M --batch_size 16", 1, False),  # comparison_57m.json: 0.75 to 0.79
        (  # documented_3b_x2.json, documented_3b_x2_again.json, levers_3b_x2_sums_let_go.json: 0.72 to 0.88
            "--model_name Llama-3.2-3B --batch_size 1 --sharding_mode fsdp_full --gradient_checkpointing "
            "--max_seq_length 512 --gradient_accumulation_steps 4",
            2,
            False,
        ),
    ),
)
def test_auto_takes_the_precision_that_was_faster_where_it_was_measured(words, num_gpus, is_fp8):
    run = described(f"{words} --mixed_precision auto", num_gpus)
    config, [said] = settle(run, H200)
    assert config.precision.mixed_precision == ("fp8" if is_fp8 else "bf16")
    assert said.startswith(f"--mixed_precision auto: {'fp8, predicted ' if is_fp8 else f'bf16, because {SLOW}'}")
    asked = described(f"{words} --mixed_precision fp8", num_gpus)
    assert [note.startswith(f"WARNING: {SLOW}") for note in settle(asked, H200)[1]] == ([] if is_fp8 else [True])


def test_auto_drops_what_belongs_to_fp8_with_it():
    words = (
        "--model_name Llama-57M --mixed_precision auto --fp8_scenario current --fp8_lm_head all --sharding_mode "
        "fsdp_full --fp8_params"
    )
    config, _ = settle(described(words, num_gpus=2), H200)
    bf16 = parse_config(
        "--random_init --use_te --model_name Llama-57M --mixed_precision bf16 --sharding_mode fsdp_full".split(),
        parallel=True,
    )
    assert config == bf16
    kept, _ = settle(described(words.replace("57M", "3.1-8B"), num_gpus=2), H200)
    assert kept.precision == dataclasses.replace(described(words).config.precision, mixed_precision="fp8")
    assert kept.parallel.fp8_params


def test_a_gpu_without_fp8_runs_bf16():
    run = described("--model_name Llama-3.1-8B --mixed_precision auto")
    config, [said] = settle(run, Machine(139.8, has_fp8=False))
    assert config.precision.mixed_precision == "bf16" and said.endswith("bf16, because this GPU has no fp8")


def test_both_at_once_judge_the_filled_gpu():
    """57M in micro-batches of 65,536 tokens keeps the GPU busy longer than the host launches."""
    config, said = settle(described("--model_name Llama-57M --mixed_precision auto --batch_size auto"), H200)
    assert config.precision.mixed_precision == "fp8" and config.data.batch_size == 64 and len(said) == 2


# --- the word ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "why"), (("0", "at least 1, or auto, not 0"), ("-3", "at least 1, or auto, not -3")))
def test_a_size_is_a_number_or_auto(word, why):
    with pytest.raises(UserError, match=f"--batch_size must be {why}"):
        parse_config([f"--batch_size={word}"])


def test_another_word_is_refused(capsys):
    with pytest.raises(SystemExit) as exited:
        parse_config(["--batch_size=many"])
    assert exited.value.code == 2
    assert "invalid value: 'many' is neither a number nor auto" in capsys.readouterr().err
