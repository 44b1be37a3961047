"""--fp8_backend torchao: emulated on the CPU, with the rounding of operands that a GPU's fp8 products have."""

from __future__ import annotations

import pytest
import torch

from tests.processes import exit_code, start_ranks
from tests.small import final_weights, steps, train, write_model, write_rows

FP8 = ["--mixed_precision=fp8", "--fp8_backend=torchao"]
NUM_STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=3)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 12)


def options(model: str, rows: str, folder, *more: object) -> list[object]:
    return [
        f"--model_name={model}", f"--dataset_name={rows}", "--validation_fraction=0", "--max_seq_length=256", "--learning_rate=1e-3",
        "--log_every=1", f"--output_dir={folder}", f"--max_steps={NUM_STEPS}", "--batch_size=2", *more,
    ]  # fmt: skip


def run_ranks(num_ranks: int, folder, *words: object) -> str:
    log = folder.with_name(f"{folder.name}.log")
    codes = [exit_code(process) for process in start_ranks(num_ranks, log, *words)]
    assert codes == [0] * num_ranks, log.read_text()[-5000:]
    return log.read_text()


@pytest.mark.parametrize("gather", [[], ["--fp8_all_gather"]], ids=["bf16-gather", "fp8-gather"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_two_processes(model, rows, tmp_path, mode, gather):
    if mode == "ddp" and gather:
        pytest.skip("nothing is gathered")
    train(*options(model, rows, tmp_path / "one", *FP8, "--gradient_accumulation_steps=2", "--save_every=3"))
    log = run_ranks(
        2, tmp_path / "two", *options(model, rows, tmp_path / "two", *FP8, f"--sharding_mode={mode}", "--save_every=3", *gather)
    )
    a, b = ([s["loss"] for s in steps(tmp_path / n)] for n in ("one", "two"))
    print(a, b, log[-3000:])
    assert b == pytest.approx(a, rel=3e-3)
    run_ranks(
        2,
        tmp_path / "again",
        *options(
            model,
            rows,
            tmp_path / "again",
            *FP8,
            f"--sharding_mode={mode}",
            *gather,
            f"--resume_from={tmp_path}/two/checkpoints/step-00000003",
        ),
    )
    assert [s["loss"] for s in steps(tmp_path / "again")] == b[3:]
    one, other = final_weights(tmp_path / "two"), final_weights(tmp_path / "again")
    assert one.keys() == final_weights(tmp_path / "one").keys()
    assert all(torch.equal(one[n], other[n]) for n in one)
