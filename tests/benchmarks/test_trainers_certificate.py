"""The certificate of other trainers' fp8: the variants, a real run of those that are installed here, mistakes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.hf_trainer import write_full_rows
from benchmarks.trainers_certificate import TRAININGS, VARIANTS, axolotl_file, describe, parse
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_jsonl

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_has_a_training_and_a_bf16_variant():
    assert {variant.package for variant in VARIANTS} == set(TRAININGS)
    assert {variant.package for variant in VARIANTS if variant.asked == "bf16"} == set(TRAININGS)
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_axolotls_file_has_the_plugin_and_the_variants_options():
    job = {"model": "m", "rows": "r", "folder": "f", "seq_length": 64, "batch_size": 2, "steps": 9}
    entries = axolotl_file({**job, "options": {"fp8": True}})
    assert entries["fp8"] and entries["plugins"] == ["llm_fp8.tools.axolotl_plugin.CertificatePlugin"]


def test_every_row_is_longer_than_the_sequence(tmp_path):
    """Tokens of the whole text are fewer than those of the solutions that it is made of."""
    rows = tmp_path / "rows.jsonl"
    write_full_rows(rows, 32, 1024)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert min(len(tokenizer(row["generated_solution"])["input_ids"]) for row in read_jsonl(rows)) > 1024


@pytest.mark.slow
def test_trainers_run_and_one_that_cannot_says_why(tmp_path, warm_python):
    """On the CPU: the Trainer and the loop train, and small letters are no backend to Accelerate."""
    output = tmp_path / "found.json"
    command = [warm_python, "benchmarks/trainers_certificate.py", "--output", str(output), "--at_once", "3"]
    command += ["--variants", "trainer_bf16,loop_bf16,trainer_flag_te", "--steps", "9", "--hidden_size", "128"]
    command += ["--num_layers", "1", "--seq_length", "32", "--batch_size", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    entries = {entry["name"]: entry for entry in json.loads(output.read_text())["entries"]}
    for name in ("trainer_bf16", "loop_bf16"):
        assert entries[name]["exit_code"] == 0 and len(entries[name]["losses"]) == 9, done.stdout
        assert len(entries[name]["step_times_s"]) == 8 and entries[name]["tokens_per_s"] is None
        assert entries[name]["losses"][-1] < entries[name]["losses"][0]
    assert entries["trainer_flag_te"]["error"] == "ValueError: 'te' is not a valid FP8BackendType"
    assert "'te' is not a valid FP8BackendType" in describe(entries["trainer_flag_te"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--output"),
        (["--output", "a.json", "--hidden_size", "100"], "--hidden_size 100"),
        (["--output", "a.json", "--steps", "8"], "--steps 8"),
        (["--output", "a.json", "--packages", "trl"], "--packages trl"),
        (["--output", "a.json", "--variants", "keras"], "--variants keras"),
        (["--output", "a.json", "--at_once", "0"], "--at_once 0"),
    ],
)
def test_mistakes_are_one_sentence(options, named):
    with pytest.raises(UserError, match=named):
        parse(options)
