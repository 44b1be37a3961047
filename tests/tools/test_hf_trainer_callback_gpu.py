"""transformers' Trainer under accelerate launch on a GPU: the precision of the kernels is certified, set-ups that lose
fp8 fail, and Transformer Engine uses the documented entries of fp8_config.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.tools.hf_trainer_callback import certify_step
from tests.support.gpu_training import ROOT, certificate_of

pytestmark = pytest.mark.gpu

MICRO_BATCHES = 2


def run_example(
    config: Path | str, model: Path, folder: Path, *options: str, program: list[str] | None = None
) -> subprocess.CompletedProcess:
    """Run `program`, by default the Trainer example, under accelerate launch with the launch file `config`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += program or ["examples/hf_trainer_fp8.py"]
    arguments = f"--model_name {model} --dataset_name {DATASET_DIR} --num_of_samples 256 --max_seq_length 256"
    arguments += f" --per_device_train_batch_size 8 --gradient_accumulation_steps {MICRO_BATCHES} --max_steps 6"
    arguments += f" --learning_rate 1e-3 --logging_steps 1 --save_strategy no --report_to none --output_dir {folder}"
    command += [*arguments.split(), *options]
    variables = {name: value for name, value in os.environ.items() if name != "NVIDIA_TF32_OVERRIDE"}
    # If it saw several GPUs, the Trainer would use nn.DataParallel.
    variables["CUDA_VISIBLE_DEVICES"] = variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [record["loss"] for record in history if "loss" in record]


def write_fp8_launch_file(folder: Path, **fp8_config: object) -> Path:
    """Write to `folder` a copy of configs/accelerate_fp8.yaml in which the given entries of the section fp8_config are
    replaced. Return the path of the copy.
    """
    content = yaml.safe_load((ROOT / "configs" / "accelerate_fp8.yaml").read_text())
    content["fp8_config"].update(fp8_config)
    path = folder / "fp8.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_is_certified_in_fp8_and_its_losses_follow_bf16(dtype, model_folder, tmp_path, record_property):
    options, processes = ("--weights_dtype", dtype, "--seed", "1"), {}
    for precision in ("fp8", "bf16"):
        config, folder = f"configs/accelerate_{precision}.yaml", tmp_path / precision
        processes[precision] = run_example(config, model_folder, folder, *options)
        assert processes[precision].returncode == 0, processes[precision].stdout + processes[precision].stderr
        record_property(precision, certificate_of(folder))
    fp8, bf16 = certificate_of(tmp_path / "fp8"), certificate_of(tmp_path / "bf16")
    assert fp8["verdict"] == bf16["verdict"] == "certified", (fp8["reasons"], bf16["reasons"])
    assert fp8["num_micro_batches"] == MICRO_BATCHES and fp8["num_unknown_gemm_kernels"] == 0
    assert fp8["num_fp8_gemm_kernels"] >= fp8["num_expected_fp8_gemm_kernels"] > 0
    assert fp8["modules"]["num_in_fp8"] == fp8["modules"]["num_modules"]
    assert list(fp8["modules"]["recipes"]) == ["DelayedScaling"]
    assert bf16["num_fp8_gemm_kernels"] == 0 and bf16["gemm_kernels_by_type"]["bf16"] > 0
    assert "certificate: fp8 delayed" in processes["fp8"].stdout
    assert "certificate: bf16, none of" in processes["bf16"].stdout
    in_fp8, in_bf16 = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert len(in_fp8) == 6 and in_fp8[-1] < in_fp8[0]
    assert in_fp8 == pytest.approx(in_bf16, rel=0.05) and in_fp8 != in_bf16


def test_certify_judges_the_third_step_of_a_program_under_accelerate(model_folder, tmp_path):
    path, example = tmp_path / "certificate.json", ["--", "examples/hf_trainer_fp8.py"]
    program = ["-m", "llm_fp8", "certify", "--precision=fp8", "--step=3", f"--output={path}", *example]
    done = run_example("configs/accelerate_fp8.yaml", model_folder, tmp_path / "run", program=program)
    certificate = json.loads(path.read_text())
    assert done.returncode == 0 and certificate["verdict"] == "certified", done.stdout + done.stderr
    assert certificate["num_micro_batches"] == MICRO_BATCHES


# A program that breaks something before it runs the example.
PATCHED_EXAMPLE = """
import os, runpy, sys
import llm_fp8.tools.hf_trainer_callback as callback
{patch}
sys.argv[0] = "examples/hf_trainer_fp8.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
UNSET_LAUNCH_VARIABLES = """
callback.CertificateCallback.__init__.__defaults__ = ("fp8", 5)
for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
    del os.environ[name]
"""
REMOVE_AUTOCAST = """
import accelerate.accelerator
accelerate.accelerator.apply_fp8_autowrap = lambda model, handler: model
"""


@pytest.mark.parametrize(
    "patch", [UNSET_LAUNCH_VARIABLES, REMOVE_AUTOCAST], ids=["the launcher's variables", "Accelerate's autocast"]
)
def test_trainer_that_lost_fp8_ends_with_code_1(patch, model_folder, tmp_path, record_property):
    program = tmp_path / "broken.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + PATCHED_EXAMPLE.format(patch=patch))
    done = run_example("configs/accelerate_fp8.yaml", model_folder, tmp_path / "run", program=[str(program)])
    assert done.returncode == 1, done.stdout + done.stderr
    errors = re.findall("^error: the certificate failed.*", done.stderr, re.M)
    record_property("error", errors)
    assert len(errors) == 1 and "but 0 ran" in errors[0], done.stderr
    assert certificate_of(tmp_path / "run")["verdict"] == "failed"
    assert not (tmp_path / "run" / "trainer_state.json").exists(), "the run ends right after the step that was recorded"


def test_gradient_checkpointing_ends_the_run(model_folder, tmp_path, record_property):
    """Layers are recomputed outside the fp8 autocast. Either torch or the check of the kernels must end the run."""
    done = run_example("configs/accelerate_fp8.yaml", model_folder, tmp_path, "--gradient_checkpointing", "true")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ") or "Error: " in line]
    record_property("last_errors", [line for line in errors if not line.startswith("subprocess.")][-3:])
    assert done.returncode == 1, done.stdout + done.stderr
    assert not (tmp_path / "certificate.json").exists() or certificate_of(tmp_path)["verdict"] == "failed"


def test_bf16_flag_keeps_fp8_but_drops_the_recipe_of_the_file(model_folder, tmp_path, record_property):
    """With --bf16, TE uses its default fp8 recipe. The run must fail if the launch file has another recipe."""
    default = run_example("configs/accelerate_fp8.yaml", model_folder, tmp_path / "default", "--bf16", "true")
    assert default.returncode == 0, default.stderr
    assert certificate_of(tmp_path / "default")["verdict"] == "certified"
    custom = write_fp8_launch_file(tmp_path, amax_history_len=16)
    followed = run_example(custom, model_folder, tmp_path / "followed")
    assert followed.returncode == 0, followed.stderr
    dropped = run_example(custom, model_folder, tmp_path / "dropped", "--bf16", "true")
    record_property("certificate", certificate_of(tmp_path / "dropped"))
    assert dropped.returncode == 1
    assert "fp8_config has amax_history_len 16, and the recipe in force has 1024" in dropped.stderr


def test_certify_step_accepts_only_the_precision_of_the_step(device):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    model = torch.nn.Sequential(*(te.Linear(256, 256, params_dtype=torch.bfloat16, device=device) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    # The inputs need no gradient, so only the second layer computes an input gradient.
    inputs = torch.randn(256, 256, device=device, dtype=torch.bfloat16)

    def step() -> None:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    certificate = certify_step(step, model, "fp8", recipe="current", optimizer=optimizer)
    assert (certificate.verdict, certificate.num_expected_fp8_gemm_kernels) == ("certified", 5), certificate.reasons
    assert list(certificate.modules.recipes) == ["Float8CurrentScaling"]
    assert certify_step(step, model, "bf16").verdict == certify_step(step, model, "fp8", "delayed").verdict == "failed"


def test_transformer_engine_uses_the_documented_entries_of_fp8_config(monkeypatch):
    """The recipe that Accelerate creates shows the effect of each entry. Some, such as `interval`, have no effect."""
    from accelerate.utils import TERecipeKwargs
    from accelerate.utils.transformer_engine import apply_fp8_autowrap
    from transformer_engine.common import recipe as recipes

    created = []
    original = recipes.DelayedScaling
    monkeypatch.setattr(recipes, "DelayedScaling", lambda **fields: created.append(original(**fields)) or created[-1])

    def values(**fp8_config: object) -> dict:
        apply_fp8_autowrap(torch.nn.Linear(16, 16), TERecipeKwargs(**fp8_config))
        return vars(created[-1])

    default = values()
    assert (default["amax_compute_algo"], default["amax_history_len"], default["margin"]) == ("max", 1024, 0)
    assert values(amax_compute_algo="most_recent")["amax_compute_algo"] == "max"
    assert values(interval=3) == values(override_linear_precision=(True, True, True)) == default
    changed = values(amax_history_len=16, margin=2, fp8_format="E4M3")
    assert (changed["amax_history_len"], changed["margin"], changed["fp8_format"].name) == (16, 2, "E4M3")
