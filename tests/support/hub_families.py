"""Tiny models of the supported families in the hub's layout, and a check of which features work with a family.

`python -m tests.support.hub_families` prints the table of families in docs/precision.md, and the tables of speeds,
from benchmarks/results/families_4b.json.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.config.options import LoraConfig, ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data.collate import Layout
from llm_fp8.data.tokenise import Document
from llm_fp8.models.build import auto_class, is_multimodal, read_by_kernels
from llm_fp8.models.experts import routed_modules
from llm_fp8.models.export import export_adapter, export_hf
from llm_fp8.models.lora import adapters_of, add_adapters, initialize_adapters_
from llm_fp8.models.source import EMBEDDED_MODEL, load_config, resolve_source
from llm_fp8.precision.coverage import linears_left
from llm_fp8.settle.probe import probe
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import REPOSITORY
from tests.support.batches import random_rows
from tests.support.reference import mean_loss
from tests.support.run_sizes import SPEEDS
from tests.support.small import CARD, built_model, length_config, stored_weights

CPU = torch.device("cpu")
NUM_STEPS, LENGTHS, ROW = 2, (11, 14), 32

_TEXT: dict[str, Any] = dict(
    vocab_size=1040, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    tie_word_embeddings=False,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, norm_topk_prob=True,
)  # fmt: skip
_LINEAR: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_value_heads=8, linear_num_key_heads=2,
    linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
_WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
_GEMMA4 = {**_WINDOWS, "global_head_dim": 32, "num_global_key_value_heads": 2, "final_logit_softcapping": 3.0}
_GEMMA4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 1040, "num_kv_shared_layers": 0}
_MLA = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_group=1)
_MLA |= dict(topk_group=1, first_k_dense_replace=1, num_key_value_heads=4)
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=16)
_VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, depth=1, num_attention_heads=2, num_heads=2,
    out_hidden_size=64, patch_size=8, image_size=32, spatial_merge_size=2, vision_use_head=False,
)  # fmt: skip


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


def _multimodal(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    return {"text_config": _TEXT | text, "vision_config": _VISION | vision}


_LLAMA4_VISION = dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, pixel_shuffle_ratio=0.5)
_LLAMA4 = dict(intermediate_size_mlp=96, interleave_moe_layer_step=2, no_rope_layers=[1, 0], attention_chunk_size=8)
_LLAMA4 |= dict(layer_types=["chunked_attention", "full_attention"])
_GEMMA3N = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=1040, num_kv_shared_layers=0, laurel_rank=8)
_GEMMA3N |= dict(intermediate_size=[96, 96], activation_sparsity_pattern=[0.0, 0.0], pad_token_id=None)
_QWEN4 = dict(layer_types=["linear_attention", "indexed_attention"], hc_count=2, hc_lowrank=8, ple_layer_ids=[1])
_QWEN4 |= dict(ple_embed_dim=64, heads_per_ngram=2, ngram_vocab_size_base=200, split_ngram_parts=2, indexer_n_heads=2)
_QWEN4 |= dict(indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4)
_KIMI_VISION = dict(pos_emb_height=4, pos_emb_width=4, pos_emb_time=2, model_type="kimi_k25_vision")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 8}),
    "Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {}),
    "Gemma 2": ("gemma2", _WINDOWS | {"final_logit_softcapping": 3.0}),
    "Gemma 3, text": ("gemma3_text", _WINDOWS),
    "Phi-3/4": ("phi3", {}),
    "GLM-4": ("glm4", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", _WINDOWS),
    "SmolLM3": ("smollm3", {}),
    "Granite": ("granite", {"logits_scaling": 8.0}),
    "Command R": ("cohere2", _WINDOWS),
    "EXAONE 4": ("exaone4", _WINDOWS),
    "Seed-OSS": ("seed_oss", {}),
    "Apertus": ("apertus", {}),
    "OPT": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "tie_word_embeddings": True}),
    "Qwen3-MoE": ("qwen3_moe", _EXPERTS),
    "OLMoE": ("olmoe", _EXPERTS),
    "Mixtral": ("mixtral", _EXPERTS),
    "MiniMax-M2": ("minimax_m2", _EXPERTS),
    "gpt-oss": ("gpt_oss", _EXPERTS | _WINDOWS),
    "DeepSeek-V3": ("deepseek_v3", _EXPERTS | _MLA),
    "DeepSeek-V4": ("deepseek_v4", _EXPERTS),
    "GLM-4.5": ("glm4_moe", _EXPERTS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "Phi-3.5-MoE": ("phimoe", _EXPERTS),
    "Qwen3-Next": ("qwen3_next", _EXPERTS | _LINEAR),
    "Qwen3.5, text": ("qwen3_5_text", _LINEAR),
    "Qwen3.5": ("qwen3_5", _multimodal(_LINEAR)),
    "Qwen4-Exp, text": ("qwen4_exp_text", _EXPERTS | _LINEAR | _QWEN4),
    "Qwen3.5-MoE": ("qwen3_5_moe", _multimodal(_EXPERTS | _LINEAR)),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "LFM2-MoE": ("lfm2_moe", _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "Granite 4 hybrid": (
        "granitemoehybrid",
        _MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["mamba", "attention"]},
    ),
    "Bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1]}),
    "Falcon-H1": ("falcon_h1", _MAMBA | {"mamba_d_ssm": 128}),
    "Nemotron-H": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
        | {"n_groups": 1, "chunk_size": 16},
    ),
    "Gemma 3": ("gemma3", _multimodal(_WINDOWS) | {"mm_tokens_per_image": 4}),
    "Gemma 3n, text": ("gemma3n_text", _WINDOWS | _GEMMA3N),
    "Gemma 4, text": ("gemma4_text", _GEMMA4),
    "Gemma 4": ("gemma4", _multimodal(_GEMMA4) | {"audio_config": None}),
    "Ministral 3": ("ministral3", {}),
    "Mistral 3": ("mistral3", _multimodal({"model_type": "mistral"}, model_type="pixtral", head_dim=16)),
    "Kimi K2.5": ("kimi_k25", _multimodal({"model_type": "deepseek_v3"} | _EXPERTS | _MLA, **_KIMI_VISION)),
    "Llama 4": ("llama4", _multimodal(_EXPERTS | _LLAMA4, **_LLAMA4_VISION)),
    "Qwen2.5-VL": ("qwen2_5_vl", _multimodal(_rope(4, 2, 2), fullatt_block_indexes=[0], window_size=16)),
    "Qwen3-VL": ("qwen3_vl", _multimodal(_rope(4, 2, 2), deepstack_visual_indexes=[0])),
    "Qwen3-VL-MoE": ("qwen3_vl_moe", _multimodal(_EXPERTS | _rope(4, 2, 2), deepstack_visual_indexes=[0])),
}
"""Name -> model_type and the config entries that it adds to `_TEXT`."""


def hub_config(name: str, **changes: Any) -> PretrainedConfig:
    model_type, entries = FAMILIES[name]
    entries = copy.deepcopy(entries if "text_config" in entries else _TEXT | entries)
    return AutoConfig.for_model(model_type, **entries | changes)


def write_hub_model(folder: Path, name: str) -> Path:
    """Write a tiny model of the family `name` in the hub's layout. Multimodal ones have towers and a processor file."""
    torch.manual_seed(0)
    hf_config = hub_config(name)
    model = auto_class(hf_config).from_config(hf_config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    if is_multimodal(hf_config):
        (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SomeProcessor"}\n')
    return folder


DOCUMENT = REPOSITORY / "docs" / "precision.md"
SPEED_TABLES = {  # title -> variant in benchmarks/families_4b.json -> column
    "tokens/s with `--use_te`": {"bf16": "bf16", "fp8": "fp8"},
    "tokens/s without it": {"hf_eager": "bf16, eager", "hf_compiled": "bf16", "hf_torchao": "fp8"},
}


def speed_rows(title: str) -> list[dict[str, str]]:
    """Return the rows of a table of speeds: a row per model in `SPEEDS`, a column per variant of the table."""
    rows: dict[str, dict[str, str]] = {}
    columns = SPEED_TABLES[title]
    for entry in read_json(SPEEDS)["rows"]:
        if entry["variant"] in columns:
            row = rows.setdefault(entry["model"], {title: entry["model"], **dict.fromkeys(columns.values(), "")})
            row[columns[entry["variant"]]] = f"{entry['tokens_per_s']:,.0f}" if "tokens_per_s" in entry else ""
    return list(rows.values())


def check_family(name: str, folder: Path) -> dict[str, str]:
    """Train a tiny model of the family `name`, and return the cells of the family's table row by the column's title.
    Losses, export and adapter must equal those of plain transformers and PEFT.
    """
    source = write_hub_model(folder / "source", name)
    options = ModelConfig(model_name=str(source))
    hf_config = load_config(resolve_source(options))
    try:
        form = probe(parse_config([f"--model_name={source}", "--packing"]), hf_config, CPU, torch.float32)
        packing = "yes"
    except UserError as error:
        form, packing = None, "with its kernels" if "can't keep" in str(error) else "no"
        assert probe(parse_config([f"--model_name={source}"]), hf_config, CPU, torch.float32) is None

    rows = documents()
    collate = Layout(1 if packing == "yes" else len(rows), ROW, 2, packed=packing == "yes")
    batch = collate([rows] if packing == "yes" else [[document] for document in rows])
    built = built_model(options.model_name)
    model, full_model = built.module, _full_model(source)
    training_model = TrainingModel(model, length_config(ROW), torch.float32, form).eval()
    losses = _train(model, lambda: training_model(batch)[0] / batch.num_supervised_tokens)
    expected = _train(full_model, lambda: _loss(full_model))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)

    tokenizer = AutoTokenizer.from_pretrained(source)
    export_hf(built, tokenizer, folder / "final", dtype=torch.float32, card=CARD)
    torch.testing.assert_close(_loss(_full_model(folder / "final")), _loss(full_model), rtol=1e-5, atol=0)
    before, after = stored_weights(source), stored_weights(folder / "final")
    assert before.keys() == after.keys(), "an export has the source's names"
    if is_multimodal(hf_config):
        towers = [key for key, tensor in before.items() if torch.equal(tensor, after[key])]
        assert len(towers) >= len([key for key in before if "vision" in key or "visual" in key]) > 0
    in_te = hf_config.model_type in te_llama.FAMILIES
    linears, experts = _linears(model), any("grouped" in module.reason for module in routed_modules(model).values())
    assert linears.keys() & linears_left(model, 1).keys() <= read_by_kernels(model).keys()
    assert built.layout  # raises if ranks could not load their shards
    return {
        "family": shown_name(name),
        "TE": "yes" if in_te else "no",
        "fp8 by module swap": _all_but(
            *(["out_proj"] if read_by_kernels(model) else []), *(["routed experts"] if experts else [])
        ),
        "packing": "yes" if in_te else packing,
        "LoRA": _check_adapter(options, folder),
        "sharded": "yes",
    }


def _check_adapter(options: ModelConfig, folder: Path) -> str:
    """Check that our model with an adapter, PEFT's model with the exported adapter and the merged model have the same
    loss. Return the text of the LoRA cell.
    """
    built, lora = built_model(options.model_name), LoraConfig(lora_rank=4)
    model = built.module
    note = add_adapters(built, lora, torch.float32)
    initialize_adapters_(model, 0)
    for adapter in adapters_of(model).values():
        adapter.b.data.normal_(0, 0.1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "source")
    export_adapter(built, tokenizer, folder / "adapter", options=lora, base_model=str(folder / "source"), card=CARD)
    batch = Layout(len(LENGTHS), ROW, 2, packed=False)([[document] for document in documents()])
    training_model = TrainingModel(model, length_config(ROW), torch.float32).eval()
    adapted_loss = training_model(batch)[0] / batch.num_supervised_tokens
    with torch.no_grad():
        peft_loss = _loss(PeftModel.from_pretrained(_full_model(folder / "source"), str(folder / "adapter")))
        with mock.patch("sys.argv", ["", f"--adapter={folder / 'adapter'}", f"--output={folder / 'merged'}"]):
            importlib.import_module("scripts.merge_adapter").main()
        merged_loss = _loss(_full_model(folder / "merged"))
    torch.testing.assert_close((adapted_loss.detach(), merged_loss), (peft_loss, peft_loss), rtol=1e-5, atol=0)
    return _all_but(*(["out_proj"] if "Mamba" in note else []), *(["routed experts"] if "experts" in note else []))


def _all_but(*excluded: str) -> str:
    return f"all but {' and '.join(excluded)}" if excluded else "all"


def documents() -> list[Document]:
    """Return two documents in which every token is supervised."""
    return sum(random_rows([[length] for length in LENGTHS], 1024, seed=3), [])


def _full_model(folder: Path) -> PreTrainedModel:
    """Load the whole model, with vision towers, in transformers and in eval mode: Gemma 3 trains only with images."""
    model, info = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def _loss(model: nn.Module) -> Tensor:
    rows = [(torch.from_numpy(each.input_ids), torch.from_numpy(each.supervised)) for each in documents()]
    return mean_loss(model, rows)


def _train(model: nn.Module, loss_of: Any) -> Tensor:
    """Train `model` for `NUM_STEPS` steps of AdamW on the loss that `loss_of()` returns. Return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for _ in range(NUM_STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the modules whose class is nn.Linear, not a subclass, by name. lm_head and routers are excluded."""
    routed, head = routed_modules(model), model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and module not in routed
    }


def shown_name(name: str) -> str:
    """Return the family's name in the table, where a model and its language model alone are one family."""
    return name.removesuffix(", text")


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table of `rows`. Families whose other cells are equal share a row."""
    families = dict[tuple[str, ...], dict[str, None]]()
    for row in rows:
        family, *cells = row.values()
        families.setdefault(tuple(cells), {})[family] = None
    lines = [list(rows[0]), *(["; ".join(names), *cells] for cells, names in families.items())]
    header, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def documented_rows() -> dict[str, dict[str, str]]:
    """Return the rows of the table in docs/precision.md, by family."""
    table = "| family |" + DOCUMENT.read_text().partition("| family |")[2].partition("\n\n")[0]
    titles, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    cells = {family: [family, *others] for names, *others in rows for family in names.split("; ")}
    return {family: dict(zip(titles, row, strict=True)) for family, row in cells.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            rows.append(check_family(family, Path(place)))
    print(markdown_table(rows), *(markdown_table(speed_rows(title)) for title in SPEED_TABLES), sep="\n\n")
