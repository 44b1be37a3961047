"""The whole of a diagnosis on a real model's training steps, with stand-ins for what only a GPU has: its allocator's
counts and its kernels.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

from llm_fp8.config.parser import parse_config
from llm_fp8.observability.metrics import GIB, PeakTflops
from llm_fp8.tools.diagnose import session
from llm_fp8.tools.diagnose.bottlenecks import step_time
from llm_fp8.tools.diagnose.memory import HOW_FOUND
from llm_fp8.tools.gemm_rates import MeasuredRates
from llm_fp8.utils.json_files import write_json_atomic
from tests.support.diagnosed import ATTENTION, BF16_GEMM
from tests.support.recorded_kernels import recorded
from tests.support.small import forget_accelerator
from tests.support.stand_in_te import install_stand_in

CEILINGS = MeasuredRates(800.0, 1400.0, 1300.0, 4.0)
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, "
    "false>(c10::BFloat16*, int)"
)


@pytest.fixture
def diagnosed(tiny_model, monkeypatch):
    """Diagnose the tiny model with these options and this attention kernel; gives the findings and the steps that
    were taken.
    """

    def run(*options: str, attention: str = ATTENTION, trace: Path | None = None):
        forget_accelerator()
        step = recorded((BF16_GEMM, 0, 600), (attention, 600, 800), ("_update_kernel", 900, 1000))
        step.export_chrome_trace = lambda path: Path(path).write_text("{}")
        counts = iter(range(GIB, 2 * GIB, 2**20))

        def meter(device: torch.device):
            return lambda: (next(counts), next(counts))

        monkeypatch.setattr(session, "cuda_meter", meter)
        monkeypatch.setattr(session, "device_peak_tflops", lambda device: PeakTflops(1000.0, 2000.0))
        monkeypatch.setattr(session, "record_kernels", lambda: contextlib.nullcontext(step))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * GIB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * GIB)
        config = parse_config(["--model_name", tiny_model, "--max_seq_length", "64", "--batch_size", "2", *options])
        parts = session._Session(config, torch.device("cpu"))
        return parts.diagnose(CEILINGS, trace), parts.training.loop.step

    return run


def test_a_bf16_run(diagnosed, tmp_path):
    found, steps = diagnosed(
        "--mixed_precision", "bf16", "--gradient_accumulation_steps", "2", trace=tmp_path / "trace.json"
    )
    assert found["exit_code"] == 0 and found["problems"] == []
    unwatched = session.NUM_WARMUP_STEPS + session.NUM_TIMED_STEPS + session.NUM_MEMORY_STEPS
    assert steps == unwatched + 3  # the operands, the memory, the kernels
    assert (tmp_path / "trace.json").exists()
    assert [(group["module"], group["layers"]) for group in found["layers"]][::7] == [
        ("self_attn.q_proj", "0-1"),
        ("lm_head", ""),
    ]
    assert found["attention"] == "sdpa" and found["census"]["outside_fp8"]["lm_head"] == "1 bf16 (lm_head)"
    assert found["time"]["step_time_s"] > 0
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48
    num_weights, num_tokens = 2 * layer + 1024 * 32, 2 * 2 * 64
    assert found["time"]["gemms"]["bf16"]["floor_s"] == pytest.approx(6 * num_weights * num_tokens / 1000e12)
    # 6 FLOPs for each of 32 units of width and the mean length of 64 tokens, in 2 layers
    floor_s = found["time"]["classes"]["attention"]["floor_s"]
    assert floor_s == pytest.approx(6 * 32 * 64 * num_tokens * 2 / 1000e12)
    assert tuple(found["memory"]["kinds_gib"]) == tuple(HOW_FOUND)
    write_json_atomic(tmp_path / "found.json", found)
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["memory"]["peak_gib"] == 2 and written["time"]["gap_s"] == pytest.approx(
        max(0, written["time"]["step_time_s"] - 9e-4)
    )
    assert written["config"]["optim"]["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(("options", "num_added"), [((), None), (("--use_te",), 1024 * 32 * 2 + 5 * 32)])
def test_sums_of_gradients_that_gemms_add_are_not_counted(options, num_added, tiny_model, monkeypatch):
    """Of the TE decoder those of embedding, head and norms are left."""
    install_stand_in(monkeypatch)
    monkeypatch.setattr(session, "device_peak_tflops", lambda device: None)
    config = parse_config(["--model_name", tiny_model, "--max_seq_length", "64", "--batch_size", "2", *options])
    parts = session._Session(config, torch.device("cpu"))
    facts = parts._facts(step_time(recorded((BF16_GEMM, 0, 600)), 1e-3), CEILINGS, None)
    num_trained = sum(parameter.numel() for parameter in parts.training.model.parameters())
    assert facts.gradient_bytes == 4 * num_trained
    assert facts.added_gradient_bytes == 4 * (num_trained if num_added is None else num_added)


def test_attention_without_a_fused_kernel(diagnosed):
    found, _ = diagnosed("--mixed_precision", "bf16", "--attn_implementation", "eager", attention=SOFTMAX)
    assert found["exit_code"] == 1 and found["problems"] == ["attention runs unfused"]
    assert found["time"]["losses"][0]["name"] == "unfused attention"


def test_recomputation_is_seen(diagnosed):
    options = ["--mixed_precision", "bf16", "--gradient_checkpointing", "2"]
    found, _ = diagnosed(*options)
    assert any("50% of the decoder layers" in loss["cause"] for loss in found["time"]["losses"])


@pytest.mark.slow
def test_too_little_memory_is_a_sentence(tiny_model, monkeypatch):
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(session, "own_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(session, "measure_rates", lambda device: CEILINGS)
    monkeypatch.setattr(session, "_Session", fails)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"total_memory": 80 * GIB})
    )
    with pytest.raises(session.UserError, match="2.0 of 80.0 GiB were in use.*--batch_size"):
        session.diagnose(parse_config(["--model_name", tiny_model, "--max_seq_length", "64"]))
