"""Documents of a gated delta net, and the arguments of its kernels. test_te_llama.py has the comparison with torch."""

from __future__ import annotations

import inspect
import itertools
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from llm_fp8.mixers import delta_net
from llm_fp8.mixers.delta_net import DeltaNet, DeltaNetSizes, chunks, separate_documents
from tests.support.stand_in_te import install_modules

SIZES, BOUNDS = DeltaNetSizes(2, 8, 16, 16, 4), torch.tensor([0, 17, 30, 130], dtype=torch.int32)


def net_and_inputs():
    net = DeltaNet(SIZES, 1e-6, 0, torch.float32, torch.device("cpu"))
    for parameter in net.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(1, 130, sum(SIZES.projections.values()), generator=torch.Generator().manual_seed(0))
    return net, (0.1 * inputs).requires_grad_()  # outputs of about 1, whose rounding is within the bound of 1e-6


def test_document_does_not_depend_on_its_neighbours():
    net, inputs = net_and_inputs()
    packed = net(inputs, BOUNDS)
    for start, stop in itertools.pairwise(BOUNDS.tolist()):
        alone = net(inputs[:, start:stop], torch.tensor([0, stop - start], dtype=torch.int32))
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=0, atol=1e-6)
        (gradient,) = torch.autograd.grad(packed[:, start:stop].sum(), inputs, retain_graph=True)
        assert gradient[0].any(-1).nonzero()[:, 0].tolist() == list(range(start, stop))


def test_kernels_get_the_documents_of_packed_and_padded_rows(monkeypatch):
    conv = mock.Mock(side_effect=lambda x, *_, **__: (x, None))
    norm = mock.Mock(side_effect=lambda x, *_, **__: x)
    rule = mock.Mock(side_effect=lambda q, k, v, *_, **__: (v, None))
    contents = {name: {} for name in ("fla", "fla.modules", "fla.modules.norm", "fla.ops")}
    contents |= {"fla.modules.causal_conv1d": {"causal_conv1d": conv}}
    contents |= {"fla.modules.norm.fused_norm_gate": {"rms_norm_gated": norm}}
    contents |= {"fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": rule}}
    install_modules(monkeypatch, contents)
    monkeypatch.setattr(delta_net, "problem_of_kernels", lambda *_: None)
    net, inputs = net_and_inputs()
    for rows, bounds, passed in ((inputs, BOUNDS, chunks(BOUNDS, 130)), (inputs.view(2, 65, -1), BOUNDS[:3], {})):
        assert torch.equal(net(rows, bounds), rows[..., 64:192])
        (x, weight), (v, z, *_), (q, k, v, g, beta) = (kernel.call_args.args for kernel in (conv, norm, rule))
        assert torch.equal(x, rows[..., :192]) and torch.equal(z.flatten(2), rows[..., 192:320])
        assert q.shape[2:] == k.shape[2:] == (2, 16) and g.shape == beta.shape == (*rows.shape[:2], 8)
        for name, value in passed.items():
            assert torch.equal(conv.call_args.kwargs[name], value) and torch.equal(rule.call_args.kwargs[name], value)
        assert passed or not {"cu_seqlens", "chunk_indices"} & {*conv.call_args.kwargs, *rule.call_args.kwargs}


def test_hugging_faces_net_computes_documents_by_kernels_as_by_torch_code(monkeypatch):
    torch_rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def rule_of_kernels(*qkv, g, beta, cu_seqlens, **options):
        parts = zip(*(tensor.split(cu_seqlens.diff().tolist(), 1) for tensor in (*qkv, g, beta)), strict=True)
        outputs = [torch_rule(*part[:3], g=part[3], beta=part[4], use_qk_l2norm_in_kernel=True)[0] for part in parts]
        return torch.cat(outputs, 1), None

    sizes = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=8)
    config = Qwen3_5TextConfig(hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    net, hidden = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0), torch.randn(1, 130, 32)
    expected = torch.cat([net(document) for document in hidden.split(BOUNDS.diff().tolist(), 1)], 1)
    separate_documents(net, BOUNDS)
    torch.testing.assert_close(net(hidden), expected)
    monkeypatch.setattr(delta_net, "problem_of_kernels", lambda *_: None)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", rule_of_kernels)
    torch.testing.assert_close(net(hidden), expected)


@pytest.mark.parametrize("lengths", [[17, 13, 100], [130], [64, 64], [128, 1], [1, 1, 1], [63, 65, 64], [130, 0, 0]])
def test_chunks_are_those_of_the_documents_and_the_rest_is_empty(lengths):
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    arguments = chunks(bounds, sum(lengths))
    assert arguments["cu_seqlens"].tolist() == [*bounds.tolist(), sum(lengths)]
    expected = [[document, place] for document, n in enumerate(lengths) for place in range(-(-n // 64))]
    indices = arguments["chunk_indices"]
    assert indices.dtype == torch.int32 and len(indices) == sum(lengths) // 64 + len(lengths)
    assert indices[: len(expected)].tolist() == expected and (indices[len(expected) :, 0] == len(lengths)).all()
