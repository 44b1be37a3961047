"""The checks of a DeepSpeed configuration file. test_multi_process.py tests the losses of every stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.distributed.deepspeed import accelerator_arguments, deepspeed_settings
from llm_fp8.utils.errors import UserError


def options_of(mode: str, *options: str) -> Config:
    return parse_config([f"--sharding_mode={mode}", *options], parallel=True)


def settings_of(tmp_path: Path, values: Any, mode: str = "deepspeed_1", *options: str) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return deepspeed_settings(options_of(mode, f"--deepspeed_config={path}", *options), mode, "bf16", 4)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_default_files_are_accepted(stage):
    settings = deepspeed_settings(options_of(f"deepspeed_{stage}", "--batch_size=3"), f"deepspeed_{stage}", "fp32", 4)
    assert settings["zero_optimization"]["stage"] == stage and settings["train_batch_size"] == 12


def test_auto_values_are_replaced_or_left_out(tmp_path):
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


ZERO_1 = {"zero_optimization": {"stage": 1}}
CONTRADICTIONS = {
    "fp8": ({**ZERO_1, "fp8": {"enabled": True}}, '"fp8".*--mixed_precision'),
    "communication": ({**ZERO_1, "communication_data_type": "fp32"}, '"communication_data_type"'),
    "clipping": ({**ZERO_1, "gradient_clipping": 7}, '"gradient_clipping": 7: this run has 1.0'),
    "optimizer": ({**ZERO_1, "optimizer": {"type": "AdamW"}}, '"optimizer".*--learning_rate'),
    "stage": ({"zero_optimization": {"stage": 2}}, '"zero_optimization", "stage": 2'),
    "no_json": ("{'zero_optimization': {}}", "ds.json"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_entry_is_refused_with_its_file_and_key(tmp_path, name):
    values, pattern = CONTRADICTIONS[name]
    with pytest.raises(UserError, match=pattern) as error:
        settings_of(tmp_path, values)
    assert str(tmp_path / "ds.json") in str(error.value) and "\n" not in str(error.value)


def test_variables_of_accelerate_do_not_change_the_deepspeed_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "9")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    run = options_of("deepspeed_3", "--max_grad_norm=0.5"), "deepspeed_3", "bf16", 2
    plugin = accelerator_arguments(*run)["deepspeed_plugin"]
    assert plugin.deepspeed_config == {**deepspeed_settings(*run), "steps_per_print": float("inf")}
    assert not plugin.zero3_init_flag
