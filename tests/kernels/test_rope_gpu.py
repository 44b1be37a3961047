"""The kernel that splits the fused projection and rotates q and k, compared with torch and with Transformer Engine."""

from __future__ import annotations

import pytest
import torch

import te_llama
from llm_fp8.models.build import fill_weights
from llm_fp8.models.model import Model
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import kernel_class, kernel_times, record_kernels
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.step.loss_model import TrainingModel
from tests.support.batches import BATCHES, S
from tests.support.families import family_config
from tests.support.rope_reference import CASES, GRADIENT_LAYOUTS, Case, assert_same_split, split_rope_reference
from tests.support.small import length_config

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNEL = "_split_rope_kernel"
LARGER = {
    "8,191 tokens in documents of many lengths": Case(32, 8, 128, 128, lengths=(*range(1, 127), 190)),
    "8,191 documents of one token": Case(8, 8, 64, 64, lengths=(1,) * 8191),
    "8 rows of 1,023": Case(12, 2, 128, 128, shape=(8, 1023)),
}


@pytest.fixture
def split_rope():
    from llm_fp8.kernels.rope_triton import split_rope

    return split_rope


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*CASES, *LARGER])
def test_kernel_equals_torch_up_to_rounding(name, dtype, split_rope, device):
    assert_same_split(split_rope, split_rope_reference, (CASES | LARGER)[name], dtype, "contiguous", device)


@pytest.mark.parametrize("layout", [layout for layout in GRADIENT_LAYOUTS if layout != "contiguous"])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "part of a head", "padded", "padded, part of a head"])
def test_gradients_may_have_any_strides(name, layout, split_rope, device):
    assert_same_split(split_rope, split_rope_reference, CASES[name], torch.bfloat16, layout, device)


def test_position_beyond_the_table_gives_nan_for_its_token_only(split_rope, device):
    case = Case(4, 2, 64, 64, lengths=(10, 14))
    fused, cu_seqlens = case.fused(torch.bfloat16, device), case.cu_seqlens(device)
    angles = case.angles(device)
    q, k, v = split_rope(fused, angles[:12], 4, 2, cu_seqlens)
    expected = split_rope_reference(fused, angles, 4, 2, cu_seqlens)
    assert q[22:].isnan().all() and k[22:].isnan().all() and torch.equal(v, expected[2])
    torch.testing.assert_close(q[:22], expected[0][:22])
    torch.testing.assert_close(k[:22], expected[1][:22])


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", BATCHES)
def test_model_has_the_gradients_of_transformer_engines_path(layout, recompute, device, monkeypatch):
    """The test also counts RoPE kernels: a layer runs one forward, one backward and, if recomputed, another forward."""
    config = family_config("llama3_rope_gqa")
    batch = BATCHES[layout](device)
    results, kernels = [], []
    for one_kernel in (True, False):
        model = te_llama.build_te_model(config, torch.bfloat16, device)
        fill_weights(Model(model), device)
        if recompute:
            enable_gradient_checkpointing(model.model.layers, 1, uses_te=True)
        training_model = TrainingModel(model, length_config(S), torch.bfloat16).train()
        with monkeypatch.context() as patch:
            if not one_kernel:
                patch.setattr(te_llama.TEDecoderLayer, "_one_kernel_rotates", lambda self, fused: False)
            with record_kernels() as recorded:
                loss = training_model(batch)[0] / batch.num_supervised_tokens
                loss.backward()
        results.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
        times = kernel_times(recorded)
        kernels.append({name: count for name, (count, _) in times.items() if kernel_class(name) == "rope"})
    passes = 3 if recompute else 2
    assert kernels[0] == {KERNEL: passes * config.num_hidden_layers}
    assert KERNEL not in kernels[1] and sum(kernels[1].values()) == 2 * passes * config.num_hidden_layers
    differences = {name: relative_difference(value, results[1][name]) for name, value in results[0].items()}
    assert max(differences.values()) < 0.02, differences
