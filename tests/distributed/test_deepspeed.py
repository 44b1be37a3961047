"""DeepSpeed's stages against one plain process, in two real processes over gloo; and the checks of its file.

Both processes are started once and go through a case of every stage; the tests look at what they left.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
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
from llm_fp8.distributed.deepspeed_config import deepspeed_settings
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
"""Steps before the checkpoint from which the run is taken up again."""
DEADLINE_S = 300.0
"""Against a hang; a busy machine takes minutes."""
MAX_NORM = 0.3
PEAK = 1e-3
# Smaller than the embedding, so that gradients go out in several buckets and one is larger than a bucket.
SECTION = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
# Norms (32 elements) stay unsharded, biases (47, which two ranks cannot share evenly) and matrices do not.
SECTION_3 = {"stage3_prefetch_bucket_size": 5_000, "stage3_param_persistence_threshold": 40}


@dataclass(frozen=True)
class Case:
    """One training."""

    stage: int
    tied: bool = False
    dtype: torch.dtype = torch.float32
    recompute: bool = False

    @property
    def mode(self) -> str:
        return f"deepspeed_{self.stage}"

    def write_file(self, folder: Path) -> None:
        """Its DeepSpeed file."""
        section = {"stage": "auto", "overlap_comm": True, **SECTION, **(SECTION_3 if self.stage == 3 else {})}
        (folder / f"{self.mode}.json").write_text(json.dumps({"zero_optimization": section}))

    def config(self, folder: Path) -> Config:
        """The run's options, whose DeepSpeed file lies in `folder`."""
        return options_of(
            self.mode,
            f"--deepspeed_config={folder / self.mode}.json",
            f"--learning_rate={PEAK}",
            "--lr_scheduler=linear",
            "--weight_decay=0.1",
            f"--max_grad_norm={MAX_NORM}",
            f"--gradient_accumulation_steps={NUM_MICRO_BATCHES}",
            f"--mixed_precision={'no' if self.dtype == torch.float32 else 'bf16'}",
        )


CASES = [Case(1, tied=True), Case(2, dtype=torch.bfloat16), Case(3, recompute=True)]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.mode)
fp32_cases = pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.mode)


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
        torch.save(run_case(case, Path(folder), rank), Path(folder) / f"{case.mode}-{rank}.pt")
    torch.distributed.destroy_process_group()


def start(case: Case, folder: Path, seed: int = 1) -> Any:
    """DistributedStrategy, prepared model, optimizer, plain model and configuration of a new run."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from llm_fp8.models.loss_model import TrainingModel

    AcceleratorState._reset_state()  # of the run before; a program has one Accelerator in its life
    config = case.config(folder)
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


def take_step(strategy: Any, model: Any, optimizer: Any, scheduler: Any, step: int, rank: int) -> Any:
    """As the loop does it; returns loss, gradient norm and learning rate."""
    loss_sum = torch.zeros(())
    for micro in range(NUM_MICRO_BATCHES):
        with strategy.micro_batch(model, last=micro == NUM_MICRO_BATCHES - 1):
            loss = model(make_batch(step, micro, rank))[0] / num_supervised(step)
            strategy.backward(loss)
        loss_sum += loss.detach()
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
    checkpoint = folder / f"{case.mode}-checkpoint"
    taken = []
    for step in range(NUM_STEPS):
        taken.append(take_step(strategy, model, optimizer, scheduler, step, rank))
        resident = {name: parameter.numel() for name, parameter in plain.named_parameters()}
        if step + 1 == SAVED_AFTER:
            strategy.save_state(checkpoint)
    result = {
        "before": before,
        "after": full_weights(strategy, plain),
        "local": {name: strategy.local_tensor(parameter).clone() for name, parameter in plain.named_parameters()},
        "dtypes": {parameter.dtype for parameter in plain.parameters()},
        "resident": resident,
        "taken": taken,
        "files": strategy.state_files(),
    }
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
    """The folder that both processes worked in, and by mode what each rank saved."""
    folder, port = tmp_path_factory.mktemp("deepspeed"), free_port()
    for case in CASES:
        case.write_file(folder)
    processes = [
        CONTEXT.Process(target=run_rank, args=(rank, port, str(folder)), daemon=True) for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0, 0]
    made = {
        case.mode: [torch.load(folder / f"{case.mode}-{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        taken.append((total.item(), norm.item(), learning_rate(step)))
    return {"after": {n: p.detach() for n, p in model.named_parameters()}, "taken": taken}


@pytest.mark.slow
@fp32_cases
def test_steps_are_those_of_one_process(outcomes, case):
    expected = reference(case)
    assert all(norm > 1.5 * MAX_NORM for _, norm, _ in expected["taken"]), "clipping must have something to clip"
    for result in outcomes[1][case.mode]:
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
    for result in made[case.mode]:
        assert result["resumed_taken"] == result["taken"][SAVED_AFTER:]
        for name, weight in result["after"].items():
            assert torch.equal(result["resumed"][name], weight), name
        assert "deepspeed" in result["refused"] and "resume" in result["refused"]
        written = [path.name for path in (folder / f"{case.mode}-checkpoint").iterdir()]
        assert sorted(written) == sorted(result["files"])


@pytest.mark.slow
@cases
def test_ranks_hold_the_same_weights_and_their_share_of_them(outcomes, case):
    first, second = outcomes[1][case.mode]
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
    for result in outcomes[1][case.mode]:
        assert not math.isfinite(result["norm_of_nan"])


@pytest.mark.slow
def test_bf16_weights_have_fp32_master_weights(outcomes):
    """The master weights follow fp32's path; what bf16 weights can hold does not."""
    result, expected = outcomes[1]["deepspeed_2"][0], reference(CASES[1])
    for name, weight in expected["after"].items():
        moved, exact = result["after"][name] - result["before"][name], weight - result["before"][name]
        # The direction of AdamW's early updates is the sign of a gradient, which bf16's rounding turns where it is
        # small.
        assert F.cosine_similarity(moved.flatten(), exact.flatten(), dim=0) > 0.9, name
        assert not torch.equal(result["after"][name], result["after"][name].bfloat16().float()), name


# --- the file ---------------------------------------------------------------------------------------------------------


def settings_of(tmp_path: Path, values: Any, mode: str = "deepspeed_1", *options: str) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return deepspeed_settings(options_of(mode, f"--deepspeed_config={path}", *options), mode, "bf16", 4)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_default_files_are_accepted(stage):
    settings = deepspeed_settings(options_of(f"deepspeed_{stage}", "--batch_size=3"), f"deepspeed_{stage}", "fp32", 4)
    assert settings["zero_optimization"]["stage"] == stage and settings["train_batch_size"] == 12


def test_auto_is_accepted_everywhere(tmp_path):
    values = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "communication_data_type": "auto",
    }
    settings = settings_of(tmp_path, values, "deepspeed_3")
    assert "auto" not in json.dumps(settings) and settings["zero_optimization"] == {"stage": 3}


ZERO = {"zero_optimization": {"stage": 1}}
REFUSED = {
    "fp8": ({**ZERO, "fp8": {"enabled": True}}, '"fp8".*--mixed_precision'),
    "communication": ({**ZERO, "communication_data_type": "fp32"}, '"communication_data_type"'),
    "batch": ({**ZERO, "train_batch_size": 7}, '"train_batch_size": 7: this run has 32, from --batch_size'),
    "clipping": ({**ZERO, "gradient_clipping": 7}, "this run has 1.0, from --max_grad_norm"),
    "optimizer": ({**ZERO, "optimizer": {"type": "AdamW"}}, '"optimizer".*--learning_rate'),
    "scheduler": ({**ZERO, "scheduler": {"type": "WarmupLR"}}, '"scheduler".*--lr_scheduler'),
    "stage": ({"zero_optimization": {"stage": 2}}, '"zero_optimization.stage": 2.*--sharding_mode'),
    "bf16": ({**ZERO, "bf16": {"enabled": False}}, '"bf16.enabled": false.*--mixed_precision'),
    "unknown_in_zero": ({"zero_optimization": {"stage": 1, "bucket": 5}}, "bucket"),
    "type_in_zero": ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}}, "reduce_bucket_size"),
    "no_dict": ({**ZERO, "bf16": True}, "AttributeError"),
    "no_json": ("{'zero_optimization': {}}", "ds.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stand_is_refused_by_file_and_key(tmp_path, name):
    values, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as caught:
        settings_of(tmp_path, values)
    assert str(tmp_path / "ds.json") in str(caught.value) and "\n" not in str(caught.value)


def test_accelerates_variables_do_not_reach_the_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "9")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    config = options_of("deepspeed_3", "--max_grad_norm=0.5")
    settings = deepspeed_settings(config, "deepspeed_3", "bf16", 2)
    plugin = accelerator_arguments(settings)["deepspeed_plugin"]
    expected = {**deepspeed_settings(config, "deepspeed_3", "bf16", 2), "steps_per_print": float("inf")}
    assert plugin.deepspeed_config == expected
    assert not plugin.zero3_init_flag
