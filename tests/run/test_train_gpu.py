"""train_fp8.py as a user runs it, on a GPU: real processes, a local model folder, the embedded dataset."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.gpu_training import certificate_of, losses, metric_values, printed_output, train, training_options

pytestmark = pytest.mark.gpu

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
PRECISIONS = {
    "bf16": ["--mixed_precision", "bf16"],
    "delayed": ["--mixed_precision", "fp8"],
    "current": ["--mixed_precision", "fp8", "--fp8_scenario", "current"],
    "8 bit": ["--mixed_precision", "fp8", "--optimizer", "adamw_8bit"],
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_continues_bit_for_bit_with_deterministic_attention(precision, model_folder, tmp_path):
    options = [*PRECISIONS[precision], "--lr_scheduler", "constant", "--num_warmup_steps", "0"]
    printed_output(model_folder, tmp_path / "whole", *options, "--max_steps", "8", environment=DETERMINISTIC)
    longer = ["--max_steps", "8", "--allow_changed", "total_steps", "--resume_from", "latest"]
    for more in (["--max_steps", "4", "--save_every", "4"], longer):
        printed_output(model_folder, tmp_path / "parts", *options, *more, environment=DETERMINISTIC)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / side / "final" / "model.safetensors") for side in ("parts", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_does_not_depend_on_how_the_batch_is_cut(precision, model_folder, tmp_path):
    """The same global batch as 8 x 2, 4 x 4 and 16 x 1 rows gives the same losses up to rounding, in training and
    evaluation.
    """
    by_cut = {}
    for batch_size, micro_batches in ((8, 2), (4, 4), (16, 1)):
        folder = tmp_path / f"{batch_size}x{micro_batches}"
        cut = ["--batch_size", str(batch_size), "--gradient_accumulation_steps", str(micro_batches)]
        printed_output(
            model_folder, folder, *PRECISIONS[precision], *cut, "--max_steps", "4", "--learning_rate", "1e-4"
        )
        by_cut[batch_size] = losses(folder)
    for values in by_cut.values():
        # Delayed scaling sees another history with another cut; bf16 and current scaling differ by rounding alone.
        assert values == pytest.approx(by_cut[8], rel=5e-3 if precision == "delayed" else 1e-3)


@pytest.mark.parametrize("graphs", [(), ("--cuda_graphs",)], ids=["eager", "graphs"])
@pytest.mark.parametrize("precision", ["delayed", "current"])
def test_the_last_steps_are_bf16s_proven_and_resumed_bit_for_bit(precision, graphs, model_folder, tmp_path):
    options = [*PRECISIONS[precision], *graphs, "--max_steps=16", "--fp8_until=0.5", "--no_export"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saved = ["--save_every=6", "--save_total_limit=9", "--eval_every=4"]
    printed_output(model_folder, whole, *options, *saved, environment=DETERMINISTIC)
    fp8, bf16 = certificate_of(whole), json.loads((whole / "certificate_after_fp8.json").read_text())
    assert fp8["verdict"] == bf16["verdict"] == "certified", (fp8["reasons"], bf16["reasons"])
    assert fp8["num_fp8_gemm_kernels"] > 0 and "fp8" not in bf16["gemm_kernels_by_type"]
    assert bf16["modules"]["num_modules"] > bf16["modules"]["num_in_fp8"] == 0
    for step in (6, 12):
        more = ["--eval_every=4", f"--resume_from={whole / 'checkpoints' / f'step-{step:08}'}"]
        printed_output(model_folder, resumed / str(step), *options, *more, environment=DETERMINISTIC)
        assert losses(resumed / str(step)) == losses(whole)[step:]
        assert metric_values(resumed / str(step), "eval_loss") == metric_values(whole, "eval_loss")[step // 4 :]


def test_the_run_says_what_ran_and_exports_a_hugging_face_model(model_folder, tmp_path):
    options = ("--mixed_precision", "fp8", "--fp8_scenario", "mxfp8", "--max_steps", "4")
    output = printed_output(model_folder, tmp_path / "run", *options)
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
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_system_cudnn_does_not_push_attention_off_the_fused_path(model_folder, tmp_path):
    """With an empty CUDNN_HOME and no library path of the user's, Transformer Engine must still take torch's cuDNN.

    Left to itself it would search the whole file system for one.
    """
    environment = {"CUDNN_HOME": "", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    others = [path for path in environment["LD_LIBRARY_PATH"].split(":") if "cudnn" not in path]
    environment["LD_LIBRARY_PATH"] = ":".join(others)
    options = ("--mixed_precision", "bf16", "--max_steps", "2")
    assert "fused (cuDNN)" in printed_output(model_folder, tmp_path / "run", *options, environment=environment)


def test_accelerate_launch_sets_the_recipe(model_folder, tmp_path):
    config = tmp_path / "fp8.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: fp8\nnum_processes: "
        "1\nfp8_config:\n  backend: TE\n  fp8_format: HYBRID\n  amax_history_len: 32\n  amax_compute_algo: max\n"
        "  override_linear_precision: [false, false, false]\n  use_autocast_during_eval: false\n"
    )
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config))
    done = train(*training_options(model_folder, tmp_path / "run", "--max_steps", "2"), launcher=launcher)
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())["precision"]
    assert run["effective"] == "fp8" and "amax_history_len=32" in run["recipe"]
    refused = train(*training_options(model_folder, tmp_path / "other", "--mixed_precision", "bf16"), launcher=launcher)
    assert "contradicts accelerate's launch configuration" in refused.stderr


_ONE_BILLION = ("--model_name", "Llama-3.2-1B", "--random_init", "--use_te", "--packing")


@pytest.mark.exclusive
@pytest.mark.parametrize(("decoder", "words"), [("--use_te", "this run cannot fit"), ("", "the GPU is out of memory")])
def test_what_does_not_fit_ends_in_a_sentence(tmp_path, decoder, words):
    """Before anything is loaded where activations are counted."""
    model = [word for word in _ONE_BILLION if word != "--use_te"] + ([decoder] if decoder else [])
    more = ("--mixed_precision", "bf16", "--batch_size", "512", "--max_steps", "2")
    done = train(*model, *more, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {words}")


@pytest.mark.exclusive
def test_auto_fills_the_gpu_and_takes_fp8(tmp_path):
    folder = tmp_path / "run"
    auto = ("--mixed_precision", "auto", "--batch_size", "auto")
    done = train(*_ONE_BILLION, *auto, "--max_steps", "3", "--output_dir", str(folder))
    assert done.returncode == 0, done.stderr
    record, summary = (json.loads((folder / name).read_text()) for name in ("run.json", "summary.json"))
    assert record["config"]["data"]["batch_size"] > 8 and record["precision"]["requested"] == "auto"
    measured = record["precision"]["measured_tokens_per_s"]
    assert record["precision"]["effective"] == "fp8" and measured["fp8"] > measured["bf16"] > 0
    assert summary["certificate"]["verdict"] == "certified"


def test_auto_trains_as_the_precision_that_it_chose(model_folder, tmp_path):
    """So small a model is faster in bf16, whose run then holds no fp8 kernel; whichever it is, the bits are its own."""
    printed_output(model_folder, tmp_path / "auto", "--mixed_precision", "auto", environment=DETERMINISTIC)
    chosen = json.loads((tmp_path / "auto" / "run.json").read_text())["precision"]["effective"]
    printed_output(model_folder, tmp_path / "named", "--mixed_precision", chosen, environment=DETERMINISTIC)
    assert losses(tmp_path / "auto") == losses(tmp_path / "named")
    assert certificate_of(tmp_path / "auto")["verdict"] == "certified"
