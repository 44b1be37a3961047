"""For every family of models, training, export and packing give the results of plain transformers."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

import te_llama
from llm_fp8.config.options import LoraConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data.collate import Layout
from llm_fp8.mixers import varlen
from llm_fp8.models.build import model_from_config
from llm_fp8.models.lora import add_adapters
from llm_fp8.models.model import text_decoder
from llm_fp8.settle.probe import VOCABULARY, probe, small_model
from llm_fp8.step.loss_model import PackedForm, TrainingModel
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention
from tests.support import hub_families as hub
from tests.support.batches import random_rows
from tests.support.families import MOE_FAMILIES
from tests.support.hub_families import CPU, FAMILIES, check_family, documents, hub_config, write_hub_model
from tests.support.small import LONGROPE, length_config, stored_weights, tiny_config, train
from tests.support.stand_in_te import install_stand_in

QUICK = ("Llama 3", "Gemma 4", "Qwen3.5-MoE", "Mistral 3", "Nemotron-H", "Apertus", "Kimi K2.5", "Qwen4-Exp, text")
"""One family of each kind; the tests of all others are marked slow."""
PACKING = parse_config(["--packing"])


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_family_trains_and_exports_as_in_plain_transformers(tmp_path, name):
    assert check_family(name, tmp_path) == hub.documented_rows()[hub.shown_name(name)]


def test_documented_table_is_the_printed_one_with_the_te_decoders_and_recorded_speeds():
    documented = hub.documented_rows()
    rows = {name: documented[hub.shown_name(name)] for name in FAMILIES}
    assert hub.markdown_table(list(rows.values())) in hub.DOCUMENT.read_text()
    assert all(hub.markdown_table(hub.speed_rows(title)) in hub.DOCUMENT.read_text() for title in hub.SPEED_TABLES)
    assert {FAMILIES[name][0] for name, row in rows.items() if row["TE"] == "yes"} == te_llama.FAMILIES.keys()


def test_speeds_are_a_row_per_model(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "SPEEDS", tmp_path / "speeds.json")
    rows = [{"variant": "bf16", "tokens_per_s": 20123.4}, {"variant": "fp8", "failed": "out of memory"}]
    hub.SPEEDS.write_text(json.dumps({"rows": [{"model": "Qwen3-4B", **row} for row in rows]}))
    title = next(iter(hub.SPEED_TABLES))
    assert hub.speed_rows(title) == [{title: "Qwen3-4B", "bf16": "20,123", "fp8": ""}]


OPTIONS = ("--max_steps=2", "--max_seq_length=256", "--batch_size=2", "--mixed_precision=no")


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("Gemma 3", "--packing"), *((family, "--use_te") for family in ("Gemma 3", "Mistral 3", "Qwen3-VL", "Qwen3.5"))],
)
def test_export_copies_towers_unchanged(tmp_path, rows, capsys, family, decoder, monkeypatch):
    """The source model is stored with its vision tower in bf16 and its language model in fp32."""
    install_stand_in(monkeypatch)
    source, run = write_hub_model(tmp_path / "source", family), tmp_path / "run"
    model = AutoModelForMultimodalLM.from_pretrained(source)
    tower = "visual" if family.startswith("Qwen") else "vision_tower"
    getattr(model.model, tower).bfloat16()
    model.save_pretrained(source)
    train(f"--model_name={source}", f"--dataset_name={rows}", f"--output_dir={run}", decoder, *OPTIONS)
    assert f"model.{tower}" in capsys.readouterr().out
    before, after = stored_weights(source), stored_weights(run / "final")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        unchanged = tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
        assert unchanged != ("language_model" in name or "lm_head" in name), name
    for name in ("config.json", "preprocessor_config.json"):
        before_entries, after_entries = (json.loads((folder / name).read_text()) for folder in (source, run / "final"))
        for entry in ("architectures", "vision_config", "image_processor_type"):
            assert before_entries.get(entry) == after_entries.get(entry)


def test_random_init_of_multimodal_model_needs_no_weights(tmp_path, rows):
    source = write_hub_model(tmp_path / "source", "Gemma 3")
    (source / "model.safetensors").unlink()
    options = (f"--model_name={source}", f"--dataset_name={rows}", f"--output_dir={tmp_path / 'run'}", "--random_init")
    train(*options, *OPTIONS)
    assert all(name.startswith("language_model") for name in stored_weights(tmp_path / "run" / "final"))


def apply_by_document(function: Callable[..., Tensor], dim: int, bounds: list[int], *tensors: Tensor) -> Tensor:
    """Split `tensors` along `dim` at `bounds`, call `function` once per document and concatenate the results."""
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    parts = zip(*(tensor.split(lengths, dim) for tensor in tensors), strict=True)
    return torch.cat([function(*part) for part in parts], dim)


def install_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace causal-conv1d and flash-linear-attention by transformers' functions, called once per document."""
    conv, delta = modeling_qwen3_5.causal_conv1d_fn, modeling_qwen3_5.torch_chunk_gated_delta_rule

    def conv_of_documents(x: Tensor, *others: Any, activation: str, seq_idx: Any = None, **_: Any) -> Tensor:
        if seq_idx is None:
            return conv(x, *others, activation)
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, x.shape[-1])
        bounds = [0, *(torch.nonzero(seq_idx[0].diff())[:, 0] + 1).tolist(), x.shape[-1]]
        return apply_by_document(lambda part: conv(part, *others, activation), -1, bounds, x)

    def delta_of_documents(*qkv: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any = None, **others: Any) -> Any:
        def without_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return delta(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=others["use_qk_l2norm_in_kernel"])[0]

        if cu_seqlens is None:
            return without_state(*qkv, g, beta), None
        assert cu_seqlens.dtype == torch.int32
        return apply_by_document(without_state, 1, cu_seqlens.tolist(), *qkv, g, beta), None

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", conv_of_documents)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_of_documents)


def test_qwen3_5_is_packed_only_with_its_kernels(monkeypatch):
    hf_config = hub_config("Qwen3.5")
    with pytest.raises(UserError, match="drop --packing"):
        probe(PACKING, hf_config, CPU, torch.float32)
    install_kernels(monkeypatch)
    form = probe(PACKING, hf_config, CPU, torch.float32)
    assert form == "line"
    torch.manual_seed(0)
    model = model_from_config(hf_config).module
    rows = [documents(), documents()[::-1]]
    packed = Layout(2, 32, 2, packed=True)(rows)
    padded = Layout(4, 32, 2, packed=False)([[document] for row in rows for document in row])
    losses = [TrainingModel(model, length_config(32), torch.float32, form)(batch)[0] for batch in (packed, padded)]
    torch.testing.assert_close(*losses)
    weight = model.get_input_embeddings().weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in losses))


def attention_of_documents(q, k, v, bounds, *_: Any, scale: float, window_size: tuple[int, int], **options: Any):
    """Compute what torch's kernels, which need a GPU, compute for packed [T, heads, d]."""

    def attend(*document: Tensor) -> Tensor:
        distance = torch.arange(len(document[0]))[:, None] - torch.arange(len(document[0]))
        mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        heads_first = [tensor.transpose(0, 1) for tensor in document]
        context = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale, **options)
        return context.transpose(0, 1)

    return apply_by_document(attend, 0, bounds.tolist(), q, k, v)


VARLEN = {  # family -> whether its attention needs nothing but the documents' bounds, a window and a scale
    "Llama 3": True, "Mistral": True, "Gemma 3": True, "Granite": True, "Qwen3-MoE": True, "DeepSeek-V3": True,
    "Gemma 2": False, "Seed-OSS": False, "Llama 4": False,  # soft cap, dropout, chunks
}  # fmt: skip


@pytest.mark.parametrize("name", VARLEN)
def test_varlen_attention_is_used_where_it_computes_the_same(name, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", attention_of_documents)
    dropout = {"attention_dropout": 0.1} if name == "Seed-OSS" else {}
    model = small_model(hub_config(name, **dropout), None, CPU, torch.float32)
    first, second = sum(random_rows([[11], [14]], VOCABULARY, seed=3), [])
    batch = Layout(2, 32, 0, packed=True)([[first, second], [first]])
    training = TrainingModel(model, length_config(32), torch.bfloat16)

    def hidden_in(form: PackedForm) -> Tensor:
        training.packed_form = form
        return training.hidden(batch)[batch.input_ids != 0]

    with torch.no_grad():
        assert varlen.supports_varlen(text_decoder(model), hidden_in, "rows") == VARLEN[name]


def test_losses_and_gradients_of_varlen_attention_are_those_of_sdpa(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", attention_of_documents)
    torch.manual_seed(0)
    model = model_from_config(hub_config("Gemma 3")).module
    batch = Layout(2, 32, 2, packed=True)([documents(), documents()[::-1]])
    losses = [TrainingModel(model, length_config(32), torch.float32, form)(batch)[0] for form in ("rows", "varlen")]
    torch.testing.assert_close(*losses)
    weight = model.get_input_embeddings().weight
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in losses))
    assert chosen_attention(model.config) == varlen.VARLEN


def test_kernels_with_failing_backward_pass_are_refused(monkeypatch):
    """On Hopper, the backward pass of flash-linear-attention raises an error if Triton is too old."""
    delta = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError("Please upgrade Triton")

    def without_gradients(*qkv: Tensor, **others: Any) -> Any:
        outputs = delta(*qkv, **others)
        if outputs[0].requires_grad:
            outputs[0].register_hook(refuse)
        return outputs

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", without_gradients)
    with pytest.raises(UserError, match="--model_name .*upgrade Triton"):
        probe(parse_config(["--no_packing"]), hub_config("Qwen3.5"), CPU, torch.float32)


def test_probe_runs_a_layer_of_each_kind():
    """The models differ only in their last layer: a convolution mixes packed documents, and attention does not."""
    kinds = ["full_attention"] * 4
    attention_only = hub_config("LFM2", layer_types=kinds, num_hidden_layers=4)
    assert probe(PACKING, attention_only, CPU, torch.float32) == "rows"
    with_convolution = hub_config("LFM2", layer_types=[*kinds[1:], "conv"], num_hidden_layers=4)
    with pytest.raises(UserError, match="drop --packing"):
        probe(PACKING, with_convolution, CPU, torch.float32)


YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.5)
LONG = dict(rope_parameters=LONGROPE, original_max_position_embeddings=64, head_dim=16)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
WINDOWS |= LONG | dict(rope_parameters={"full_attention": LONGROPE, "sliding_attention": YARN})
ROUTERS = MOE_FAMILIES["mixtral"] | dict(output_router_logits=True, router_aux_loss_coef=0.1)
VARIANTS = dict(llama=LONG, phi3=LONG, phimoe=LONG | MOE_FAMILIES["phimoe"], mixtral=ROUTERS, gemma3_text=WINDOWS)
VARIANTS |= dict(ministral3=LONG | dict(rope_parameters=YARN))


@pytest.mark.parametrize("kind", VARIANTS)
def test_loss_of_a_document_does_not_depend_on_its_batch(kind, monkeypatch):
    """Some documents exceed 64 tokens, beyond which LongRoPE uses other angles. Router losses are part of the loss."""
    hf_config = tiny_config(**{"model_type": kind, **VARIANTS[kind]})
    torch.manual_seed(0)
    plain = model_from_config(copy.deepcopy(hf_config)).module.eval()
    for parameter in plain.parameters():
        parameter.data.mul_(1 if parameter.ndim == 1 else 10)  # small weights would give nearly uniform attention
    model = TrainingModel(copy.deepcopy(plain), length_config(0), torch.float32).train(kind == "mixtral")
    for batch_documents in random_rows([[9, 17, 30, 12, 60, 25, 40, 33], [64, 65, 9, 100, 17, 127]], 1024, seed=0):
        ids = [torch.from_numpy(document.input_ids)[None] for document in batch_documents]
        expected = sum(plain(input_ids=each, labels=each).loss * (each.numel() - 1) for each in ids)
        for size, length, packed in ((1, 256, False), (4, 256, False), (8, 256, False), (2, 128, True), (2, 512, True)):
            layout, model.max_seq_length, total = Layout(size, length, 2, packed), length, torch.zeros(())
            plan = layout.plan(np.array([each.numel() for each in ids]), np.arange(len(ids)))
            rows = [[batch_documents[number] for number in plan[row]] for row in range(len(plan))]
            for start in range(0, len(rows), size):
                loss, auxiliary = model(layout(rows[start : start + size]))
                total = total + loss + sum(auxiliary.values())
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert probe(PACKING, hf_config, CPU, torch.float32) == "rows"
    monkeypatch.setattr("llm_fp8.step.loss_model.wrap_forward", lambda *_: None)
    for option in ("--packing", "--no_packing") if "longrope" in str(hf_config) else ():
        with pytest.raises(UserError, match="--model_name .*apart"):
            probe(parse_config([option]), hf_config, CPU, torch.float32)


def test_model_that_mixes_documents_of_a_row_or_batch_is_refused():
    """Llama 4 scales attention by the position in a row, from 8,192 on. Doge's routers compare a batch's tokens."""
    llama, doge = hub_config("Llama 4"), tiny_config("doge", is_moe=True, num_experts=16, num_experts_per_tok=2)
    assert probe(parse_config(["--packing", "--max_seq_length=4096"]), llama, CPU, torch.float32) == "rows"
    assert probe(parse_config(["--no_packing", "--max_seq_length=8192"]), llama, CPU, torch.float32) is None
    for options, hf_config in ((["--packing", "--max_seq_length=8192"], llama), (["--no_packing"], doge)):
        with pytest.raises(UserError, match="--model_name .*apart"):
            probe(parse_config(options), hf_config, CPU, torch.float32)


def test_module_without_weights_on_the_logits_is_not_a_tower():
    text = hub._EXPERTS | dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, d_rel=4)
    entries = hub._multimodal(text | {"unpadded_vocab_size": 64}, text_hidden_size=64)
    hf_config = AutoConfig.for_model("inkling2", **entries)
    assert probe(parse_config(["--no_packing"]), hf_config, CPU, torch.float32) is None


def test_adapter_that_peft_cannot_load_is_refused_before_training():
    """PEFT cannot load an adapter of Laguna's shared experts, because transformers renames their weights twice."""
    with pytest.raises(UserError, match="--lora_targets.*shared_experts"):
        laguna = model_from_config(AutoConfig.for_model("laguna", **hub._TEXT | hub._EXPERTS))
        add_adapters(laguna, LoraConfig(lora_rank=2), torch.float32)
