"""The callback that checks in which precision a transformers Trainer ran, under each kind of launch by Accelerate. The
Trainer and Accelerate are real. A stand-in replaces Transformer Engine, and the kernels that ran are made up.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator
import accelerate.utils.dataclasses
import accelerate.utils.transformer_engine
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import AORecipeKwargs
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import Float8LinearConfig
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments

import llm_fp8.tools.hf_trainer_callback as callback_module
from llm_fp8.tools.hf_trainer_callback import CertificateCallback, certify_step, requested_precision
from llm_fp8.utils.errors import UserError
from tests.support.processes import run_program
from tests.support.small import reset_accelerator, tiny_config
from tests.support.stand_in_te import install_modules

Format = enum.Enum("Format", "E4M3 E5M2 HYBRID")
_ACTIVE_RECIPES: list[Any] = []


def _recipe(name: str, defaults: dict[str, Any]) -> type:
    """Return a recipe class called `name` with the fields `defaults`. The class ignores other keyword arguments."""

    def initialise(self: Any, **values: Any) -> None:
        self.__dict__.update({key: values.get(key, default) for key, default in defaults.items()})

    return type(name, (), {"__init__": initialise})


DelayedScaling = _recipe(
    "DelayedScaling", {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max"}
)
MXFP8BlockScaling = _recipe("MXFP8BlockScaling", {"margin": 0, "fp8_format": Format.E4M3})


class Linear(nn.Linear):
    """Stand in for te.Linear: `fp8` and `fp8_meta` describe the latest forward pass, as in Transformer Engine."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype=params_dtype)
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        recipe = _ACTIVE_RECIPES[-1] if _ACTIVE_RECIPES else None
        self.fp8 = recipe is not None
        if recipe is not None:
            self.fp8_meta = {"recipe": recipe}
        return super().forward(inputs)


@contextlib.contextmanager
def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
    """Stand in for te.fp8_autocast: inside this context, `Linear` uses `fp8_recipe`."""
    _ACTIVE_RECIPES.append(fp8_recipe if enabled else None)
    try:
        yield
    finally:
        _ACTIVE_RECIPES.pop()


def install_stand_in_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for Transformer Engine where Accelerate looks for it."""
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            "Format": Format,
            "DelayedScaling": DelayedScaling,
            "MXFP8BlockScaling": MXFP8BlockScaling,
        },
        "transformer_engine.pytorch": {
            "Linear": Linear,
            "LayerNorm": nn.LayerNorm,
            "TransformerLayer": type("TransformerLayer", (nn.Module,), {}),
            "fp8_autocast": fp8_autocast,
        },
        "transformer_engine.pytorch.fp8": {"check_mxfp8_support": lambda: (True, "")},
    }
    install_modules(monkeypatch, contents)
    for module in (accelerate.accelerator, accelerate.utils.dataclasses, accelerate.utils.transformer_engine):
        monkeypatch.setattr(module, "is_transformer_engine_available", lambda: True)


pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FP8_KERNEL = "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT"
BF16_KERNEL = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
FP8_LAUNCH = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
    "ACCELERATE_FP8_MARGIN": "0",
}
"""The variables that `accelerate launch` sets for `configs/accelerate_fp8.yaml`."""
BF16_LAUNCH = {"ACCELERATE_MIXED_PRECISION": "bf16"}
NUM_LINEARS = 15
"""Linear layers of the tiny model: seven in each of two layers, and the output head."""
MICRO_BATCHES = 2
EXPECTED = NUM_LINEARS * 3 * MICRO_BATCHES


@pytest.fixture
def fake_kernels(monkeypatch):
    """Return a function that takes a dict {kernel name: count} and makes the recorded step report these counts."""

    def report(kernels: dict[str, int]) -> None:
        times = {name: (count, count * 1e-5) for name, count in kernels.items()}
        monkeypatch.setattr(callback_module, "can_record", lambda: True)
        monkeypatch.setattr(callback_module, "record_kernels", contextlib.nullcontext)
        monkeypatch.setattr(callback_module, "kernel_times", lambda _: times)

    return report


@pytest.fixture
def train(monkeypatch, tmp_path, fake_kernels):
    """Return a function that trains a tiny model for three steps and returns the Trainer. The function sets the
    environment variables `launch`, and unsets those in `missing` before training. The recorded step reports `kernels`.
    """
    install_stand_in_te(monkeypatch)

    def run(launch: dict[str, str], kernels: dict[str, int], missing=(), model=None, **arguments) -> Trainer:
        reset_accelerator()
        fake_kernels(kernels)
        for name, value in launch.items():
            monkeypatch.setenv(name, value)
        callback = CertificateCallback(step=arguments.pop("step", 2))
        for name in missing:
            monkeypatch.delenv(name)
        torch.manual_seed(0)
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(tiny_config(**(model or {}))),
            args=TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=3,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=MICRO_BATCHES,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                use_cpu=True,
                **arguments,
            ),
            train_dataset=[{"input_ids": list(range(32)), "labels": list(range(32))}] * 16,
            callbacks=[callback],
        )
        trainer.certificate_callback = callback
        run.latest = trainer  # for tests in which train() raises SystemExit
        trainer.train()
        return trainer

    return run


def certificate_of(folder: Path) -> dict:
    return json.loads((folder / "certificate.json").read_text())


def test_trainer_launched_in_fp8_is_certified(train, tmp_path, capsys):
    trainer = train(FP8_LAUNCH, {FP8_KERNEL: EXPECTED, BF16_KERNEL: 4})
    assert trainer.state.global_step == 3 and trainer.accelerator.mixed_precision == "fp8"
    stored = certificate_of(tmp_path)
    assert (stored["verdict"], stored["remarks"]) == ("certified", [])
    assert stored["num_expected_fp8_gemm_kernels"] == stored["num_fp8_gemm_kernels"] == EXPECTED
    assert stored["modules"]["num_in_fp8"] == NUM_LINEARS and list(stored["modules"]["recipes"]) == ["DelayedScaling"]
    assert stored["fp8_linear_flop_share"] == 1 and stored["num_micro_batches"] == MICRO_BATCHES
    line = f"certificate: fp8 delayed, {EXPECTED} of {EXPECTED + 4} GEMM kernels in fp8"
    assert capsys.readouterr().out.count(line) == 1


def test_invalid_callback_arguments_are_refused():
    for precision in ("foo", "FP8", "float8"):
        with pytest.raises(ValueError, match=f"^precision '{precision}': give fp8, bf16, fp16, no, or None$"):
            CertificateCallback(precision)
    with pytest.raises(ValueError, match="^step 0: the first optimizer step is 1$"):
        CertificateCallback("fp8", step=0)


def test_certify_step_judges_a_step_without_a_trainer(fake_kernels):
    model = nn.Linear(16, 16)

    def step() -> None:
        model(torch.ones(2, 16)).sum().backward()

    with pytest.raises(UserError, match="NVIDIA GPU"):
        certify_step(step, model, "bf16")
    fake_kernels({BF16_KERNEL: 3})
    assert certify_step(step, model, "bf16").verdict == "certified" and model.weight.grad is not None
    (reason,) = certify_step(step, model, "bf16", optimizer=torch.optim.SGD([model.weight])).reasons
    assert "bias" in reason
    bf16_step = certify_step(step, model, "fp8", recipe="current", num_micro_batches=2)
    expected = ("failed", "fp8 current", 6)
    assert (bf16_step.verdict, bf16_step.precision, bf16_step.num_expected_fp8_gemm_kernels) == expected
    with pytest.raises(ValueError, match="recipe 'curent'"):
        certify_step(step, model, "fp8", recipe="curent")


@pytest.mark.parametrize("is_trained", [True, False])
def test_expected_kernels_count_the_input_gradients_that_autograd_computes(fake_kernels, is_trained):
    fake_kernels({})
    embedding = nn.Embedding(4, 16).requires_grad_(is_trained)
    model = nn.Sequential(embedding, *(Linear(16, 16, bias=False) for _ in range(2)))
    with FlopCounterMode(display=False) as flop_counter:
        certificate = certify_step(lambda: model(torch.arange(4)).sum().backward(), model, "fp8")
    assert flop_counter.get_total_flops() == 2 * 4 * 16 * 16 * certificate.num_expected_fp8_gemm_kernels


def test_trainer_launched_in_bf16_fails_with_an_fp8_kernel(train, tmp_path, capsys):
    train(BF16_LAUNCH, {BF16_KERNEL: EXPECTED})
    assert certificate_of(tmp_path)["verdict"] == "certified" and certificate_of(tmp_path)["precision"] == "bf16"
    with pytest.raises(SystemExit) as stopped:
        train(BF16_LAUNCH, {BF16_KERNEL: EXPECTED, FP8_KERNEL: 1})
    assert stopped.value.code == 1 and "expected no fp8 GEMM kernel, but 1 ran" in capsys.readouterr().err


def test_one_missing_fp8_kernel_ends_the_run_after_the_step(train, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        train(FP8_LAUNCH, {FP8_KERNEL: EXPECTED - 1})
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: the certificate failed (fp8 delayed)")
    assert f"at least {EXPECTED}" in line
    assert line.endswith("without CertificateCallback it trains all the same.")
    assert certificate_of(tmp_path)["verdict"] == "failed"


def test_unknown_kernel_names_are_a_warning(train, capsys):
    train(FP8_LAUNCH, {"some_new_gemm": EXPECTED})
    assert "WARNING: this run could not be certified" in capsys.readouterr().out


def test_last_step_is_recorded_if_training_is_shorter_than_the_chosen_step(train):
    assert train(BF16_LAUNCH, {BF16_KERNEL: 1}, step=5).certificate_callback.certificate.verdict == "certified"


# Accelerate and the Trainer silently change the precision in these cases. The callback must notice.


def test_training_without_the_launchers_variables_fails(train, capsys):
    """If a program clears its environment, the Trainer silently computes in fp32. The certificate must fail."""
    with pytest.raises(SystemExit):
        train(FP8_LAUNCH, {BF16_KERNEL: EXPECTED}, missing=tuple(FP8_LAUNCH))
    # Nothing was converted, so the certificate expects every layer whose sizes fp8 supports, except the lm_head.
    assert f"expected at least {(NUM_LINEARS - 1) * 3 * MICRO_BATCHES} fp8 GEMM kernels" in capsys.readouterr().err


def test_bf16_flag_keeps_fp8_kernels_but_drops_the_recipe(train, capsys):
    """With ACCELERATE_FP8_BACKEND, Accelerate converts the model even if bf16=True. TE then uses a default recipe."""
    trainer = train(FP8_LAUNCH, {FP8_KERNEL: EXPECTED}, bf16=True)
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.certificate_callback.certificate.verdict == "certified"
    custom_recipe_launch = {**FP8_LAUNCH, "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16", "ACCELERATE_FP8_FORMAT": "E4M3"}
    train(custom_recipe_launch, {FP8_KERNEL: EXPECTED})
    with pytest.raises(SystemExit):
        train(custom_recipe_launch, {FP8_KERNEL: EXPECTED}, bf16=True)
    error = capsys.readouterr().err
    assert "fp8_config has amax_history_len 16, and the recipe in force has 1024" in error
    assert "fp8_config has fp8_format E4M3, and the recipe in force has HYBRID" in error


def test_several_gpus_in_one_process_are_an_error_after_a_warning(train, monkeypatch, capsys):
    """With several GPUs the Trainer wraps the model in nn.DataParallel and prepares the optimizer without the model."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="must pass a model and an optimizer together"):
        train(FP8_LAUNCH, {BF16_KERNEL: EXPECTED})
    assert "WARNING: one process sees 2 GPUs, and nn.DataParallel has no fp8" in capsys.readouterr().out


def test_amax_algorithm_most_recent_is_only_a_remark(train):
    trainer = train({**FP8_LAUNCH, "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent"}, {FP8_KERNEL: EXPECTED})
    certificate = trainer.certificate_callback.certificate
    assert certificate.verdict == "certified"
    assert certificate.remarks == ["fp8_config has amax_compute_algo most_recent, and the recipe in force has max"]


def test_gradient_checkpointing_fails_the_certificate(train, capsys):
    """The backward pass recomputes the layers outside Accelerate's autocast, and therefore not in fp8."""
    with pytest.raises(SystemExit):
        train(FP8_LAUNCH, {FP8_KERNEL: EXPECTED}, gradient_checkpointing=True)
    error = capsys.readouterr().err
    assert f"expected at least {EXPECTED + 14 * MICRO_BATCHES} fp8 GEMM kernels" in error
    assert f"1 of {NUM_LINEARS} modules of Transformer Engine report that they ran in fp8" in error


def test_tied_lm_head_missing_from_the_optimizer_ends_the_run(train, capsys):
    """Accelerate's conversion unties the lm_head and so creates a new weight, which no optimizer updates."""
    with pytest.raises(SystemExit):
        train(FP8_LAUNCH, {FP8_KERNEL: EXPECTED}, model={"tie_word_embeddings": True})
    reason = "the optimizer does not hold 1 of the parameters that require a gradient, such as lm_head.weight"
    assert reason in capsys.readouterr().err


def test_layers_that_the_conversion_skipped_are_a_remark(train):
    """Accelerate converts the projections of an attention module in order, up to the first whose size fp8 does not
    support: here the key projection, with 8 rows. It skips the later output projection, although fp8 supports that.
    """
    expected = 9 * 3 * MICRO_BATCHES
    certificate = train(FP8_LAUNCH, {FP8_KERNEL: expected}, model={"head_dim": 8}).certificate_callback.certificate
    assert certificate.verdict == "certified" and certificate.num_expected_fp8_gemm_kernels == expected
    assert certificate.remarks == [
        "2 linear layers that fp8 could compute were not converted, such as model.layers.0.self_attn.o_proj"
    ]


TORCHAO_LAUNCH = {"ACCELERATE_MIXED_PRECISION": "fp8"}
"""The variables of `accelerate launch --mixed_precision fp8` without a backend. Accelerate then prefers torchao."""
NUM_IN_TORCHAO = NUM_LINEARS - 2
"""Accelerate does not convert the first and the last linear layer."""


def test_torchao_weights_missing_from_the_optimizer_fail_the_certificate(train):
    """Even without FSDP, Accelerate enables torchao's fp8 all-gather, and then each weight becomes a new parameter."""
    with pytest.raises(SystemExit):
        train(TORCHAO_LAUNCH, {FP8_KERNEL: NUM_IN_TORCHAO * 3 * MICRO_BATCHES}, learning_rate=1e-2)
    trainer = train.latest
    certificate = trainer.certificate_callback.certificate
    assert trainer.accelerator.fp8_backend == "AO" and certificate.verdict == "failed"
    assert certificate.precision == "fp8 tensorwise"
    assert certificate.modules.recipes == {"tensorwise": NUM_IN_TORCHAO}
    assert certificate.num_expected_fp8_gemm_kernels == NUM_IN_TORCHAO * 3 * MICRO_BATCHES
    (remark,), (reason,) = certificate.remarks, certificate.reasons
    assert remark.startswith("1 linear layers that fp8 could compute were not converted, such as model.layers.0.self")
    assert f"the optimizer does not hold {NUM_IN_TORCHAO} of the parameters" in reason
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(tiny_config())
    before, after = (model.model.layers[0].self_attn for model in (untrained, trainer.model))
    assert torch.equal(after.k_proj.weight._tensor, before.k_proj.weight)
    assert not torch.equal(after.q_proj.weight, before.q_proj.weight)


def test_torchao_without_fp8_all_gather_is_certified_unless_a_kernel_is_missing(train, monkeypatch, capsys):
    """The test gives Accelerate a torchao recipe without fp8 all-gather, as LLaMA-Factory and axolotl try to do."""
    original = Accelerator.__init__
    handlers = [AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise"))]
    monkeypatch.setattr(
        Accelerator, "__init__", lambda self, **options: original(self, **{**options, "kwargs_handlers": handlers})
    )
    expected = NUM_IN_TORCHAO * 3 * MICRO_BATCHES
    certificate = train(TORCHAO_LAUNCH, {FP8_KERNEL: expected}).certificate_callback.certificate
    assert (certificate.verdict, certificate.precision) == ("certified", "fp8 rowwise")
    assert not any("optimizer" in remark for remark in certificate.remarks)
    with pytest.raises(SystemExit):
        train(TORCHAO_LAUNCH, {FP8_KERNEL: expected - 1, BF16_KERNEL: 99})
    error = capsys.readouterr().err
    assert f"expected at least {expected} fp8 GEMM kernels" in error
    assert f"{NUM_IN_TORCHAO} of {NUM_IN_TORCHAO} modules of torchao are set up for fp8" in error


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["one process", "wrapped as by DDP"])
def test_callback_in_a_loop_without_a_trainer_writes_a_certificate(monkeypatch, tmp_path, fake_kernels, is_wrapped):
    monkeypatch.chdir(tmp_path)
    fake_kernels({BF16_KERNEL: 1})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = TrainingArguments("run")  # before Accelerator(), because it resets Accelerate's state
    callback, state = CertificateCallback(), TrainerState(max_steps=6)
    model = AutoModelForCausalLM.from_config(tiny_config()).train()
    model, optimizer = Accelerator().prepare(model, torch.optim.AdamW(model.parameters()))
    model = nn.DataParallel(model) if is_wrapped else model
    ids = torch.zeros(1, 8, dtype=torch.long)
    callback.on_train_begin(args, state, None)
    for state.global_step in range(6):
        callback.on_step_begin(args, state, None, model=model)
        model(input_ids=ids, labels=ids).loss.backward()
        callback.on_step_end(args, state, None, model=model, optimizer=optimizer)
    certificate = certificate_of(tmp_path / "run")
    assert certificate["verdict"] == "certified" and certificate["attention"].startswith("sdpa")


def test_requested_precision_prefers_the_argument_then_the_launcher(tmp_path):
    plain, arguments = (TrainingArguments(str(tmp_path), use_cpu=True, bf16=bf16) for bf16 in (False, True))
    assert requested_precision(None, {"ACCELERATE_MIXED_PRECISION": "no"}, plain) == "no"
    assert requested_precision(None, {}, arguments) == "bf16"
    assert requested_precision("fp8", BF16_LAUNCH, arguments) == "fp8"
    assert requested_precision(None, FP8_LAUNCH, arguments) == "fp8"
    # Variables left over from an fp8 launch must not turn a bf16 launch into an fp8 launch.
    assert requested_precision(None, {**FP8_LAUNCH, **BF16_LAUNCH}, arguments) == "bf16"


def test_example_trains_the_bundled_model_under_accelerate_launch(tmp_path, monkeypatch):
    """The test runs the command that `accelerate launch` would run, with the same environment variables."""
    options = "--max_steps 3 --num_of_samples 64 --max_seq_length 64 --logging_steps 1 --learning_rate 1e-3".split()
    example = ["examples/hf_trainer_fp8.py", *options, "--report_to=none", f"--output_dir={tmp_path}"]
    launch = ["--config_file=configs/accelerate_bf16.yaml", *example]
    monkeypatch.chdir(ROOT)
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(launch))
    command, environment = prepare_simple_launcher_cmd_env(arguments)
    done = run_program(command, log=tmp_path / "log", environ=environment)
    assert done.exit_code == 0 and "certificate: none, because there is no NVIDIA GPU" in done.output, done.output
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    logged = [record["loss"] for record in history if "loss" in record]
    assert len(logged) == 3 and logged[2] < logged[0] and (tmp_path / "model.safetensors").exists()
