"""Kernels of gated delta nets on a GPU: how Triton compiles them."""

from __future__ import annotations

import pytest
import torch

from llm_fp8.mixers.delta_net import compile_variants_in_threads

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu
SIZES = (32, 64, 128)


@triton.autotune([triton.Config({"BLOCK": size}) for size in SIZES], key=[])
@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, 2 * tl.load(source + index, index < count), index < count)


def test_variants_are_compiled_in_threads_before_they_are_timed(device, monkeypatch):
    submitted, submit = [], triton.AsyncCompileMode.submit

    def recorded_submit(mode, key, *functions):
        submitted.append(key)
        return submit(mode, key, *functions)

    monkeypatch.setattr(triton.AsyncCompileMode, "submit", recorded_submit)
    autotuner = triton.runtime.autotuner.Autotuner
    monkeypatch.setattr(autotuner, "prune_configs", autotuner.prune_configs)  # restored after the test
    compile_variants_in_threads.__wrapped__()
    source, target = torch.arange(100.0, device=device), torch.empty(100, device=device)
    for _ in range(2):  # the second time they are known
        double[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](source, target, 100)
    assert torch.equal(target, 2 * source)
    assert len(submitted) == len(SIZES)
