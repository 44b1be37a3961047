"""DeepSpeed's stages against one plain process, in two real processes over gloo; and the checks of its
file.

Both processes are started once and go through every case; the tests look at what they left.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.distributed.deepspeed import DeepSpeedStrategy, accelerator_arguments
from llm_fp8.distributed.deepspeed_config import deepspeed_settings, file_of
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.models.build import decoder_layers
from llm_fp8.optim.optimizers import parameter_groups
from llm_fp8.optim.schedule import build_scheduler, learning_rate_factor
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.processes import CONTEXT, free_port
from tests.support.small import tiny_config

NUM_RANKS = 2
NUM_STEPS = 3
NUM_MICRO_BATCHES = 2
SAVED_AFTER = 2
"""Steps behind the checkpoint from which the run is taken up again."""
DEADLINE_S = 300.0
"""Against a hang; a busy machine takes minutes."""
MAX_NORM = 0.3
PEAK = 1e-3
STAGES = (1, 2, 3)
ZERO_SECTION: dict[str, Any] = {
    # Smaller than the embedding, so that gradients go out in several buckets and one is larger than a bucket.
    "reduce_bucket_size": 20_000,
    "allgather_bucket_size": 20_000,
}
ZERO3_SECTION = {
    "stage3_prefetch_bucket_size": 5_000,
    "stage3_max_live_parameters": 40_000,
    "stage3_max_reuse_distance": 5_000,
    # Norms (32 elements) stay unsharded, biases (47, which two ranks cannot share evenly) and matrices do not.
    "stage3_param_persistence_threshold": 40,
}


@dataclass(frozen=True)
class Case:
    """One training."""

    stage: int
    tied: bool = False
    dtype: torch.dtype = torch.float32
    file_entries: tuple[tuple[str, Any], ...] = ()
    overlap: bool = False
    recompute: bool = False

    @property
    def name(self) -> str:
        marks = {"overlap": self.overlap, "recompute": self.recompute, "fp32_gradients": bool(self.file_entries)}
        kind = "tied" if self.tied else "untied"
        return "_".join(
            [f"z{self.stage}", kind, str(self.dtype).removeprefix("torch."), *[m for m, on in marks.items() if on]]
        )

    @property
    def mode(self) -> str:
        return f"deepspeed_{self.stage}"

    def write_file(self, folder: Path) -> None:
        """Its DeepSpeed file."""
        section = {
            "stage": "auto",
            "overlap_comm": self.overlap,
            **ZERO_SECTION,
            **(ZERO3_SECTION if self.stage == 3 else {}),
        }
        (folder / f"{self.name}.json").write_text(json.dumps({"zero_optimization": section, **dict(self.file_entries)}))

    def config(self, folder: Path, *options: str) -> Config:
        """The run's options, whose DeepSpeed file lies in `folder`."""
        return options_of(
            self.mode,
            f"--deepspeed_config={folder / self.name}.json",
            f"--learning_rate={PEAK}",
            "--lr_scheduler=linear",
            "--weight_decay=0.1",
            f"--max_grad_norm={MAX_NORM}",
            f"--gradient_accumulation_steps={NUM_MICRO_BATCHES}",
            f"--mixed_precision={'no' if self.dtype == torch.float32 else 'bf16'}",
            *options,
        )


CASES = [
    *[Case(stage, tied) for stage in STAGES for tied in (False, True)],
    *[Case(stage, overlap=True, recompute=True) for stage in STAGES],
    *[Case(stage, dtype=torch.bfloat16) for stage in STAGES],
    *[
        Case(stage, dtype=torch.bfloat16, file_entries=(("data_types", {"grad_accum_dtype": "fp32"}),))
        for stage in (2, 3)
    ],
]
FP32_CASES = [case for case in CASES if case.dtype == torch.float32]
BF16_CASES = [case for case in CASES if case.dtype == torch.bfloat16]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
fp32_cases = pytest.mark.parametrize("case", FP32_CASES, ids=lambda case: case.name)
bf16_cases = pytest.mark.parametrize("case", BF16_CASES, ids=lambda case: case.name)


def options_of(mode: str, *options: str) -> Config:
    return parse_config([f"--sharding_mode={mode}", *options], parallel=True)


def make_model(case: Case, seed: int = 1) -> PreTrainedModel:
    """A model with gradients of some size in every weight: its biases and norms are not ones, its matrices not close
    to zero.
    """
    torch.manual_seed(seed)
    config = tiny_config(tie_word_embeddings=case.tied, mlp_bias=True, intermediate_size=47)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(8)
    return model.to(case.dtype)


def make_batch(step: int, micro_batch: int, rank: int) -> Batch:
    """Two sequences of other lengths in every micro-batch, of which a different part is supervised."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    lengths = torch.randint(3, 33, (2,), generator=generator)
    width = 32
    input_ids = torch.randint(3, 1024, (2, width), generator=generator)
    positions = torch.arange(width).expand(2, width)
    real = positions < lengths[:, None]
    labels = torch.randint(3, 1024, (2, width), generator=generator).masked_fill(
        ~real | (positions < rank), IGNORE_INDEX
    )
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=positions,
        attention_mask=real,
        cu_seqlens=None,
        max_seqlen=width,
        num_tokens=2 * width,
        num_real_tokens=int(real.sum()),
        num_supervised_tokens=int((labels != IGNORE_INDEX).sum()),
        sum_squared_lengths=int((lengths**2).sum()),
        row_ids=(0, 1),
    )


def all_batches(step: int) -> list[Batch]:
    return [make_batch(step, micro, rank) for micro in range(NUM_MICRO_BATCHES) for rank in range(NUM_RANKS)]


def num_supervised(step: int) -> int:
    return sum(batch.num_supervised_tokens for batch in all_batches(step))


def learning_rate(step: int) -> float:
    return PEAK * learning_rate_factor(step, NUM_STEPS, 0, "linear")


# --- what runs in the two processes -----------------------------------------------------------------------------------


def run_rank(rank: int, port: int, folder: str) -> None:
    """Go through all cases and save what they came to."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        TORCH_EXTENSIONS_DIR=f"{folder}/compiled-{rank}",
    )
    torch.set_num_threads(1)
    start_process_group(LaunchRanks.from_environment(os.environ))
    for case in CASES:
        torch.save(run_case(case, Path(folder), rank), Path(folder) / f"{case.name}-{rank}.pt")
    torch.distributed.destroy_process_group()


def start(case: Case, folder: Path, *options: str, seed: int = 1) -> Any:
    """DistributedStrategy, prepared model, optimizer, plain model and configuration of a new run."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from llm_fp8.models.loss_model import TrainingModel

    AcceleratorState._reset_state()  # of the run before; a program has one Accelerator in its life
    config = case.config(folder, *options)
    compute_name = "fp32" if case.dtype == torch.float32 else "bf16"
    settings = deepspeed_settings(config, case.mode, compute_name, NUM_RANKS)
    accelerator = Accelerator(mixed_precision="no", **accelerator_arguments(settings))
    assert accelerator.num_processes == NUM_RANKS
    plain = make_model(case, seed)
    if case.recompute:
        enable_gradient_checkpointing(decoder_layers(plain), every=1, uses_te=False)
    training_model = TrainingModel(plain, 32, case.dtype)
    strategy = DeepSpeedStrategy(case.mode, accelerator, config.parallel)
    kind = strategy.resolve_optimizer("auto", case.dtype)
    assert strategy.parameter_dtype(kind, case.dtype) == case.dtype
    optimizer = strategy.build_optimizer(config.optim, kind, training_model.named_parameters())
    model, optimizer = strategy.prepare(training_model, optimizer)
    return strategy, model, optimizer, plain, config


def take_step(
    strategy: Any, model: Any, optimizer: Any, scheduler: Any, step: int, rank: int, gradients: dict | None = None
) -> Any:
    """As the loop does it; returns loss, gradient norm and learning rate."""
    from deepspeed.utils import safe_get_full_grad

    loss_sum = torch.zeros(())
    for micro in range(NUM_MICRO_BATCHES):
        with strategy.micro_batch(model, last=micro == NUM_MICRO_BATCHES - 1):
            loss = model(make_batch(step, micro, rank))[0] / num_supervised(step)
            strategy.backward(loss)
        loss_sum += loss.detach()
    if gradients is not None:
        for name, parameter in model.module.model.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).clone()
    rate = float(optimizer.param_groups[0]["lr"])
    norm = strategy.step(optimizer, list(model.parameters()), MAX_NORM)
    assert norm.dtype == torch.float32 and norm.ndim == 0
    scheduler.step()
    return strategy.accelerator.reduce(loss_sum, reduction="sum").item(), norm.item(), rate


def full_weights(strategy: Any, plain: PreTrainedModel) -> dict[str, Tensor]:
    return {name: strategy.full_tensor(parameter).clone() for name, parameter in plain.named_parameters()}


def run_case(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """Train, save in between, and take it up again from there."""
    strategy, model, optimizer, plain, config = start(case, folder)
    scheduler = build_scheduler(optimizer, config.optim, NUM_STEPS)
    before = full_weights(strategy, plain)
    gradients: dict[str, Tensor] = {}
    checkpoint = folder / f"{case.name}-checkpoint"
    taken = []
    for step in range(NUM_STEPS):
        taken.append(take_step(strategy, model, optimizer, scheduler, step, rank, gradients if step == 0 else None))
        resident = {name: parameter.numel() for name, parameter in plain.named_parameters()}
        # In the middle of training, where it must not disturb what follows.
        model.eval()
        with torch.no_grad():
            evaluation = model(make_batch(0, 0, rank))[0].item()
        model.train()
        if step + 1 == SAVED_AFTER:
            strategy.save_state(checkpoint)
    result = {
        "before": before,
        "after": full_weights(strategy, plain),
        "local": {name: strategy.local_tensor(parameter).clone() for name, parameter in plain.named_parameters()},
        "dtypes": {parameter.dtype for parameter in plain.parameters()},
        "resident": resident,
        "gradients": gradients,
        "taken": taken,
        "evaluation": evaluation,
        "files": strategy.state_files(),
        "state_bytes": strategy.state_bytes(),
    }
    model.destroy()

    other = ["--weight_decay=0.2", "--max_grad_norm=0.25"]
    strategy, model, optimizer, plain, config = start(case, folder, *other, seed=2)
    strategy.load_state(checkpoint)
    result["own_options"] = (
        [group["weight_decay"] for group in optimizer.param_groups],
        strategy._zero.optimizer.clip_grad,
    )
    model.destroy()

    strategy, model, optimizer, plain, config = start(case, folder, seed=2)
    try:
        strategy.load_state(folder / "nothing")
    except UserError as error:
        result["refused"] = str(error)
    strategy.load_state(checkpoint)
    scheduler = build_scheduler(optimizer, config.optim, NUM_STEPS, SAVED_AFTER)
    result["resumed_taken"] = [
        take_step(strategy, model, optimizer, scheduler, step, rank) for step in range(SAVED_AFTER, NUM_STEPS)
    ]
    result["resumed"] = full_weights(strategy, plain)
    with strategy.micro_batch(model, last=True):
        strategy.backward(model(make_batch(0, 0, rank))[0] * (float("nan") if rank == 1 else 1.0))
    result["norm_of_nan"] = strategy.step(optimizer, list(model.parameters()), MAX_NORM).item()
    model.destroy()
    return result


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """The folder that both processes worked in, and by case what each rank saved."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for case in CASES:
        case.write_file(folder)
    port = free_port()
    processes = [
        CONTEXT.Process(target=run_rank, args=(rank, port, str(folder)), daemon=True) for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    # One that failed leaves the other waiting for it.
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    made = {
        case.name: [torch.load(folder / f"{case.name}-{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
        for case in CASES
    }
    return folder, made


# --- one plain process ------------------------------------------------------------------------------------------------


def reference(case: Case) -> dict[str, Any]:
    """The same steps with Hugging Face's model, torch's AdamW and clipping, in fp32, on all batches one after the
    other.
    """
    model = make_model(case).float()
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters(), 0.1), lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    gradients: dict[str, Tensor] = {}
    taken = []
    for step in range(NUM_STEPS):
        total = torch.zeros(())
        for batch in all_batches(step):
            logits = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False
            ).logits
            loss = F.cross_entropy(
                logits.view(-1, 1024), batch.labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
            )
            (loss / num_supervised(step)).backward()
            total += loss.detach() / num_supervised(step)
        if step == 0:
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        taken.append((total.item(), norm.item(), learning_rate(step)))
    return {"after": {n: p.detach() for n, p in model.named_parameters()}, "gradients": gradients, "taken": taken}


@pytest.mark.slow
@fp32_cases
def test_gradients_are_the_sum_over_ranks_and_micro_batches(outcomes, case):
    expected = reference(case)["gradients"]
    for result in outcomes[1][case.name]:
        assert result["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 1e-4, "must have something to compare"
            torch.testing.assert_close(
                result["gradients"][name], gradient, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.slow
@fp32_cases
def test_steps_are_those_of_one_process(outcomes, case):
    expected = reference(case)
    assert all(norm > 1.5 * MAX_NORM for _, norm, _ in expected["taken"]), "clipping must have something to clip"
    for result in outcomes[1][case.name]:
        for have, want in zip(result["taken"], expected["taken"], strict=True):
            assert have == pytest.approx(want, rel=2e-5)
        for name, weight in expected["after"].items():
            assert (weight - result["before"][name]).abs().max() > 2 * PEAK / NUM_STEPS
            # AdamW's update of an element whose gradient nearly cancels turns on the last bits of a sum: a hundredth of
            # an update.
            torch.testing.assert_close(
                result["after"][name], weight, rtol=0, atol=PEAK / 100, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.slow
@cases
def test_a_resumed_run_goes_on_bit_for_bit(outcomes, case):
    folder, made = outcomes
    for result in made[case.name]:
        assert result["resumed_taken"] == result["taken"][SAVED_AFTER:]
        for name, weight in result["after"].items():
            assert torch.equal(result["resumed"][name], weight), name
        assert "deepspeed" in result["refused"] and "resume" in result["refused"]
        assert result["own_options"] == ([0.2, 0.0], 0.25), "a resumed run has its own options"
        written = {path.name: path.stat().st_size for path in (folder / f"{case.name}-checkpoint").iterdir()}
        assert sorted(written) == sorted(result["files"])
        assert sum(written.values()) == pytest.approx(result["state_bytes"], rel=0.3)


@pytest.mark.slow
@cases
def test_ranks_hold_the_same_weights_and_their_share_of_them(outcomes, case):
    first, second = outcomes[1][case.name]
    assert first["dtypes"] == {case.dtype}
    for name, weight in first["after"].items():
        assert weight.dtype == torch.float32 and torch.equal(weight, second["after"][name])
        shares = [first["local"][name], second["local"][name]]
        whole = torch.cat([share.flatten() for share in shares]) if case.stage == 3 else shares[0].flatten()
        assert torch.equal(whole, weight.to(case.dtype).flatten()), name
    num_elements = sum(weight.numel() for weight in first["after"].values())
    if case.stage == 3:
        assert sum(first["resident"].values()) < num_elements / 100, "weights must not stay gathered"
    else:
        assert sum(first["resident"].values()) == num_elements


@pytest.mark.slow
@cases
def test_a_gradient_that_is_not_finite_shows_in_the_norm(outcomes, case):
    for result in outcomes[1][case.name]:
        assert not math.isfinite(result["norm_of_nan"])


@pytest.mark.slow
@fp32_cases
def test_evaluation_sees_the_trained_weights(outcomes, case):
    model = make_model(case)
    model.load_state_dict(outcomes[1][case.name][0]["after"], strict=False)
    for rank, result in enumerate(outcomes[1][case.name]):
        batch = make_batch(0, 0, rank)
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
        expected = F.cross_entropy(
            logits.view(-1, 1024), batch.labels.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        assert result["evaluation"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
@bf16_cases
def test_bf16_weights_have_fp32_master_weights(outcomes, case):
    """The master weights follow fp32's path; what bf16 weights can hold does not."""
    result = outcomes[1][case.name][0]
    expected = reference(case)
    for name, weight in expected["after"].items():
        moved, exact = result["after"][name] - result["before"][name], weight - result["before"][name]
        # The direction of AdamW's early updates is the sign of a gradient, which bf16's rounding turns where it is
        # small.
        assert F.cosine_similarity(moved.flatten(), exact.flatten(), dim=0) > 0.95, name
        assert not torch.equal(result["after"][name], result["after"][name].bfloat16().float()), name
    assert [norm for _, norm, _ in result["taken"]] == pytest.approx(
        [norm for _, norm, _ in expected["taken"]], rel=0.02
    )


@pytest.mark.slow
def test_nothing_was_compiled(outcomes):
    assert not list(outcomes[0].glob("compiled-*"))


@pytest.mark.slow
def test_another_number_of_ranks_is_refused(outcomes):
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"bf16": {"enabled": False}}))
    strategy = DeepSpeedStrategy("deepspeed_1", SimpleNamespace(state=state, num_processes=4), Config().parallel)
    with pytest.raises(UserError, match="saved by 2 processes .* cannot be resumed by 4; use 2 processes"):
        strategy.load_state(outcomes[0] / "z1_untied_float32-checkpoint")


# --- the file ---------------------------------------------------------------------------------------------------------


def settings_of(
    tmp_path: Path, values: Any, mode: str = "deepspeed_1", compute_name: str = "bf16", *options: str
) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return deepspeed_settings(options_of(mode, f"--deepspeed_config={path}", *options), mode, compute_name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("compute_name", ["fp32", "bf16"])
def test_default_files_are_accepted_and_completed(stage, compute_name):
    config = options_of(
        f"deepspeed_{stage}", "--batch_size=3", "--gradient_accumulation_steps=5", "--max_grad_norm=0.7"
    )
    settings = deepspeed_settings(config, f"deepspeed_{stage}", compute_name, 4)
    assert file_of(None, f"deepspeed_{stage}").is_file()
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["bf16"]["enabled"] is (compute_name == "bf16")
    assert (settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]) == (3, 5)
    assert (settings["train_batch_size"], settings["gradient_clipping"]) == (60, 0.7)


def test_the_smallest_file_of_users(tmp_path):
    section = {"stage": 1, "overlap_comm": False, "contiguous_gradients": True}
    assert settings_of(tmp_path, {"zero_optimization": section})["zero_optimization"] == {
        **section,
        "parameter_alignment": True,
    }


def test_auto_is_accepted_everywhere(tmp_path):
    values = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    settings = settings_of(tmp_path, values, "deepspeed_3")
    assert "auto" not in json.dumps(settings)
    assert settings["zero_optimization"] == {"stage": 3}


ZERO = {"zero_optimization": {"stage": 1}}
REFUSED = {
    "fp8": ({**ZERO, "fp8": {"enabled": True}}, '"fp8": fp8 is Transformer Engine\'s'),
    "fp32_communication": ({**ZERO, "communication_data_type": "fp32"}, '"communication_data_type": "fp32".*double'),
    "fp16_communication": ({**ZERO, "communication_data_type": "fp16"}, '"communication_data_type": "fp16"'),
    "fp32_gradients": (
        {**ZERO, "data_types": {"grad_accum_dtype": "fp32"}},
        '"data_types.grad_accum_dtype": "fp32".*deepspeed_2',
    ),
    "param_dtype": ({**ZERO, "data_types": {"param_dtype": "fp32"}}, '"data_types.param_dtype": "fp32"'),
    "batch": ({**ZERO, "train_batch_size": 7}, '"train_batch_size": 7: this run has 32, from --batch_size'),
    "micro_batch": ({**ZERO, "train_micro_batch_size_per_gpu": 7}, "this run has 8, from --batch_size"),
    "accumulation": ({**ZERO, "gradient_accumulation_steps": 7}, "this run has 1, from --gradient_accumulation_steps"),
    "clipping": ({**ZERO, "gradient_clipping": 7}, "this run has 1.0, from --max_grad_norm"),
    "optimizer": ({**ZERO, "optimizer": {"type": "AdamW"}}, '"optimizer": the optimizer is AdamW from --learning_rate'),
    "scheduler": ({**ZERO, "scheduler": {"type": "WarmupLR"}}, '"scheduler": the schedule comes from --lr_scheduler'),
    "stage": ({"zero_optimization": {"stage": 2}}, '"zero_optimization.stage": 2.*use --sharding_mode deepspeed_2'),
    "bf16": ({**ZERO, "bf16": {"enabled": False}}, '"bf16.enabled": false.*--mixed_precision'),
    "fp16": ({**ZERO, "fp16": {"enabled": True}}, '"fp16.enabled": true.*--mixed_precision'),
    "bf16_master_weights": ({**ZERO, "bf16": {"bf16_master_weights_and_grads": True}}, "rounded away"),
    "offload": ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "fsdp_offload"),
    "old_offload": ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, "fsdp_offload"),
    "no_norm": ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "compute_grad_norm"),
    "unknown": ({**ZERO, "gradient_allreduce_op": "sum"}, '"gradient_allreduce_op": it has no effect'),
    "unknown_in_zero": (
        {"zero_optimization": {"stage": 1, "bucket": 5}},
        '"zero_optimization.bucket": DeepSpeed refuses',
    ),
    "type_in_zero": ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}}, "reduce_bucket_size"),
    "no_section": ({"bf16": {"enabled": True}}, "has no section"),
    "a_list": ([1], "is not a JSON object but a list"),
    "no_dict": ({**ZERO, "bf16": True}, '"bf16": it must be a section'),
    "no_json": ("{'zero_optimization': {}}", "not valid JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stand_is_refused_by_file_and_key(tmp_path, name):
    values, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as caught:
        settings_of(tmp_path, values)
    assert str(tmp_path / "ds.json") in str(caught.value) and "\n" not in str(caught.value)


def test_fp32_gradients_are_for_stages_that_split_them(tmp_path):
    values = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert settings_of(tmp_path, values, "deepspeed_2")["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_missing_file(tmp_path):
    config = options_of("deepspeed_1", f"--deepspeed_config={tmp_path / 'none.json'}")
    with pytest.raises(UserError, match="none.json cannot be read: No such file"):
        deepspeed_settings(config, "deepspeed_1", "bf16", 2)


def test_tests_run_the_version_that_users_install():
    pins = [
        [
            line.split()[0]
            for line in (file_of(None, "deepspeed_1").parents[1] / file).read_text().splitlines()
            if line.startswith("deepspeed==")
        ]
        for file in ("requirements-deepspeed.txt", "requirements-dev.txt")
    ]
    assert pins[0] == pins[1] == [f"deepspeed=={metadata.version('deepspeed')}"]


def test_deepspeed_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install -r requirements-deepspeed.txt"):
        deepspeed_settings(options_of("deepspeed_1"), "deepspeed_1", "bf16", 2)


def test_accelerates_variables_do_not_reach_the_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "9")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    config = options_of("deepspeed_3", "--max_grad_norm=0.5")
    settings = deepspeed_settings(config, "deepspeed_3", "bf16", 2)
    plugin = accelerator_arguments(settings)["deepspeed_plugin"]
    expected = {**deepspeed_settings(config, "deepspeed_3", "bf16", 2), "steps_per_print": float("inf")}
    assert plugin.deepspeed_config == expected
    assert not plugin.zero3_init_flag
