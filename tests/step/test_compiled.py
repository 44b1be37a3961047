"""Compiled decoder layers of transformers' models, with backends of torch.compile that need no code generation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from llm_fp8.models.experts import compute_experts
from llm_fp8.models.model import decoder_layers
from llm_fp8.precision.torchao import TorchaoBackend, build_config
from llm_fp8.step import compiled
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.torch_internals import recompilation_reasons
from tests.support.small import short_run, summary_json, tiny_config, train


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes `nn.Module.compile` use a backend, which is a name or a function."""
    # monkeypatch would delete the entries at the end of the test, and break later tests of this process.
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8):
        compile_module = nn.Module.compile
        yield lambda backend: monkeypatch.setattr(
            nn.Module, "compile", lambda self: compile_module(self, backend=backend)
        )
    torch.compiler.reset()


def test_recompilations_of_a_run_are_counted(tiny_model, rows, compile_with, tmp_path, capsys, monkeypatch):
    compile_with("eager")
    monkeypatch.setattr("llm_fp8.run.records.MOST_RECOMPILATIONS", 0)
    options = "--compile --max_steps=2 --batch_size=2 --no_export --validation_fraction=0.2".split()
    train(*short_run(tiny_model, rows, tmp_path / "run"), *options)
    entry = summary_json(tmp_path / "run")["compile"]
    assert entry["eager_reason"] is None and entry["num_recompilations"] >= 1, "evaluation needs no gradients"
    assert f"compiled again {entry['num_recompilations']} times" in capsys.readouterr().out


@pytest.mark.parametrize("fails_late", [False, True], ids=["compiler", "compiled code"])
def test_failure_of_the_first_step_names_the_flag(fails_late, tiny_model, rows, compile_with, tmp_path):
    def fail(*_: object) -> None:
        raise RuntimeError("gcc: Python.h: no such file")

    compile_with((lambda *_: fail) if fails_late else fail)
    with pytest.raises(UserError, match="--no_compile .*Python.h"):
        train(*short_run(tiny_model, rows, tmp_path / "run", "--compile", "--max_steps=1"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "llama in fp8"])
def test_layers_share_their_compiled_code(kind, compile_with):
    """All decoder layers share one compiled graph, even if recomputed: in bf16, with experts, converted by torchao."""
    torch.manual_seed(0)
    family, _, fp8 = kind.partition(" in ")
    model = AutoModelForCausalLM.from_config(tiny_config(family, num_hidden_layers=3), dtype=torch.bfloat16)
    compute_experts(model, None)
    if fp8:
        TorchaoBackend(build_config("rowwise", emulate=True)).convert(model)
    layers, names = decoder_layers(model), [name for name, _ in model.named_parameters()]
    enable_gradient_checkpointing(layers, 1, uses_te=False)
    ids = torch.randint(0, 1000, (2, 32))

    def loss_and_gradient() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item(), model.model.layers[0].self_attn.o_proj.weight.grad.float().flatten()

    expected_loss, expected_gradient = loss_and_gradient()
    counters.clear()
    compile_with("aot_eager")
    compiled.compile_layers(layers, recomputed=True)
    loss, gradient = loss_and_gradient()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"] and not recompilation_reasons()
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(gradient, expected_gradient, dim=0) > 0.99
    assert [name for name, _ in model.named_parameters()] == names


def test_missing_compiler_is_described(monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert "gcc" in str(compiled.missing_for_compiler())
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    assert "Triton" in str(compiled.missing_for_compiler())
