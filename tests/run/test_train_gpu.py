"""train_fp8.py run as a user runs it on a GPU, with a local model folder and the dataset inside the package."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import gpu_training
from tests.support.gpu_training import PRECISIONS, losses, run_successfully, train, training_options

pytestmark = pytest.mark.gpu

DETERMINISTIC = gpu_training.DETERMINISTIC
RESUMED = [name for name in PRECISIONS if name != "block"]


@pytest.mark.parametrize("precision", RESUMED)
def test_resumed_run_is_bitwise_equal_with_deterministic_attention(precision, model_folder, tmp_path):
    options = [*PRECISIONS[precision], "--lr_scheduler", "constant", "--num_warmup_steps", "0"]
    run_successfully(model_folder, tmp_path / "uninterrupted", *options, "--max_steps", "8", environment=DETERMINISTIC)
    longer = ["--max_steps", "8", "--allow_changed", "total_steps", "--resume_from", "latest"]
    for more in (["--max_steps", "4", "--save_every", "4"], longer):
        run_successfully(model_folder, tmp_path / "parts", *options, *more, environment=DETERMINISTIC)
    assert losses(tmp_path / "parts") == losses(tmp_path / "uninterrupted")
    ours, theirs = (load_file(tmp_path / side / "final" / "model.safetensors") for side in ("parts", "uninterrupted"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("precision", RESUMED)
def test_losses_do_not_depend_on_micro_batch_size(precision, model_folder, tmp_path):
    """Each global batch of 16 rows is divided into two micro-batches of 8 rows, into four of 4, or not at all."""
    losses_by_size = {}
    for batch_size, micro_batches in ((8, 2), (4, 4), (16, 1)):
        folder = tmp_path / f"{batch_size}x{micro_batches}"
        sizes = ["--batch_size", str(batch_size), "--gradient_accumulation_steps", str(micro_batches)]
        run_successfully(
            model_folder, folder, *PRECISIONS[precision], *sizes, "--max_steps", "4", "--learning_rate", "1e-4"
        )
        losses_by_size[batch_size] = losses(folder)
    for values in losses_by_size.values():
        # Delayed scaling gets another amax history from other micro-batches; the others differ by rounding only.
        assert values == pytest.approx(losses_by_size[8], rel=5e-3 if precision == "delayed" else 1e-3)


@pytest.mark.parametrize("optimizer", ["adamw_fp32", "adamw_master"])
def test_losses_of_backward_follow_those_of_bf16(optimizer, model_folder, tmp_path):
    """fp32 weights are cast to bf16 rows, which must be those of the last step. The first loss has bf16's bits. A step
    changes the loss by up to 17%, its gradients' rounding by 0.25%.
    """
    options = [f"--optimizer={optimizer}", "--max_steps=8", "--learning_rate=1e-3", "--num_warmup_steps=0"]
    for precision in ("bf16", "backward"):
        run_successfully(model_folder, tmp_path / precision, *PRECISIONS[precision], *options)
    bf16, backward = losses(tmp_path / "bf16"), losses(tmp_path / "backward")
    assert backward[0] == bf16[0] > bf16[-1] + 0.1 and backward == pytest.approx(bf16, rel=5e-3)


def test_exported_adapter_is_trained_on_in_fp8(model_folder, tmp_path):
    options = (*PRECISIONS["delayed"], "--learning_rate=1e-3", "--num_warmup_steps=0", "--max_steps=6")
    run_successfully(model_folder, tmp_path / "first", *options, "--lora_rank=4")
    run_successfully(tmp_path / "first" / "final", tmp_path / "second", *options)
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert second[0] < first[0] and gpu_training.certificate_of(tmp_path / "second")["verdict"] == "certified"


def test_run_reports_recipe_and_attention_and_exports_a_hugging_face_model(model_folder, tmp_path):
    options = ("--mixed_precision", "fp8", "--fp8_scenario", "mxfp8", "--max_steps", "4")
    output = run_successfully(model_folder, tmp_path / "run", *options)
    assert "parity with Hugging Face: 30 stored tensors loaded bit for bit; 33 tensors of 3 layers" in output
    assert "fused (cuDNN)" in output
    run = json.loads((tmp_path / "run" / "run.json").read_text())["precision"]
    if run["fallback_reason"] is not None:
        assert "FELL BACK to delayed" in output
        assert (run["requested_scenario"], run["effective_scenario"]) == ("mxfp8", "delayed")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    recipe = "DelayedScaling" if run["fallback_reason"] else "MXFP8BlockScaling"
    assert list(summary["certificate"]["modules"]["recipes"]) == [recipe]
    assert summary["gpu_idle"]["work_s"] > 0 and 0 <= summary["gpu_idle"]["share"] < 1
    assert 0 < summary["gpu_idle"]["gemm_share"] < 1
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_transformer_engine_uses_the_cudnn_of_torch(model_folder, tmp_path):
    """No variable points to a cuDNN, so the run must point Transformer Engine to the cuDNN that torch uses."""
    environment = {"CUDNN_HOME": "", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    others = [path for path in environment["LD_LIBRARY_PATH"].split(":") if "cudnn" not in path]
    environment["LD_LIBRARY_PATH"] = ":".join(others)
    options = ("--mixed_precision", "bf16", "--max_steps", "2")
    assert "fused (cuDNN)" in run_successfully(model_folder, tmp_path / "run", *options, environment=environment)


def test_accelerate_launch_file_sets_the_recipe(model_folder, tmp_path):
    config = tmp_path / "fp8.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: fp8\nnum_processes: "
        "1\nfp8_config:\n  backend: TE\n  fp8_format: HYBRID\n  amax_history_len: 32\n  amax_compute_algo: max\n"
        "  override_linear_precision: [false, false, false]\n  use_autocast_during_eval: false\n"
    )
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config))
    process = train(*training_options(model_folder, tmp_path / "run", "--max_steps", "2"), launcher=launcher)
    assert process.returncode == 0, process.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())["precision"]
    assert run["effective"] == "fp8" and "amax_history_len=32" in run["recipe"]
    refused = train(*training_options(model_folder, tmp_path / "other", "--mixed_precision", "bf16"), launcher=launcher)
    assert "contradicts accelerate's launch configuration" in refused.stderr


_ONE_BILLION = ("--model_name", "Llama-3.2-1B", "--random_init", "--use_te", "--packing")


@pytest.mark.exclusive
@pytest.mark.parametrize("decoder, message", [("--use_te", "this run cannot fit"), ("", "the GPU is out of memory")])
def test_run_that_does_not_fit_ends_with_one_line(tmp_path, decoder, message):
    """With the TE decoder, memory is estimated before weights are loaded. The other decoder runs out of memory."""
    model = [word for word in _ONE_BILLION if word != "--use_te"] + ([decoder] if decoder else [])
    more = ("--mixed_precision", "bf16", "--batch_size", "512", "--max_steps", "2")
    process = train(*model, *more, "--output_dir", str(tmp_path / "run"))
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert process.stderr.strip().splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.exclusive
def test_automatic_batch_size_fills_the_gpu(tmp_path):
    folder = tmp_path / "run"
    auto = ("--mixed_precision", "fp8", "--batch_size", "auto")
    process = train(*_ONE_BILLION, *auto, "--max_steps", "3", "--output_dir", str(folder))
    assert process.returncode == 0, process.stderr
    record, summary = (json.loads((folder / name).read_text()) for name in ("run.json", "summary.json"))
    assert record["config"]["data"]["batch_size"] > 8
    assert summary["certificate"]["verdict"] == "certified"
