"""Models that are sharded over gloo ranks on the CPU load and export the same bits as unsharded models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import llm_fp8.models.export
import te_llama
from llm_fp8.models.build import fill_weights, filled_layers, local_shard
from llm_fp8.models.export import export_hf
from llm_fp8.models.model import Model
from llm_fp8.models.parity import check_weights
from llm_fp8.models.source import EMBEDDED_MODEL, ModelSource, checkpoint_of, load_config
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.torch_internals import free_memory_, materialize_
from tests.support.families import FAMILIES, MOE_FAMILIES, family_config
from tests.support.fp8_files import write_fp8_model
from tests.support.ranks import fsdp_strategy, full_parameters, run_on_ranks, sharded_model
from tests.support.small import CARD, assert_same_bits, built_model, model_structure, stored_weights, write_model
from tests.support.stand_in_te import install_stand_in

CPU = torch.device("cpu")
IDS = torch.arange(3, 43)[None]


def folder_contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- Loading and export, Hugging Face's models ------------------------------------------------------------------------


def export(model: Model, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_fp8.models.export, "MAX_FILE_SIZE", "40KB")
        export_hf(model, tokenizer, folder, dtype=dtype, card=CARD, **more)


def load_and_export(rank: int, name: str, out: str, dtype: torch.dtype) -> tuple[bool, torch.Tensor, int]:
    """Load a sharded model and export it to the folder `out`. Return True if lm_head is tied, the logits, and how many
    rows of the first key projection this rank holds.
    """
    model = sharded_model(name)
    # The other ranks get a path that cannot be written, because only the main rank may write.
    folder = Path(out) if rank == 0 else Path("/proc/nowhere")
    export(model, folder, dtype, is_main=rank == 0)
    module = model.module
    tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    with torch.no_grad():
        logits = module(IDS).logits
    return tied, logits, len(local_shard(module.get_parameter("model.layers.0.self_attn.k_proj.weight")).data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "num_ranks", "tied"), [(torch.float32, 2, False), (torch.bfloat16, 3, True)], ids=str
)
def test_sharded_model_equals_unsharded_model_and_exports_the_same_bits(tmp_path, num_ranks, tied, stored):
    # q, k and v have 4 rows each, of which the last of 3 ranks has none.
    heads = {"head_dim": 2, "num_key_value_heads": 2, "num_attention_heads": 2}
    source = write_model(tmp_path / "source", stored, "40KB", tie_word_embeddings=tied, **heads)
    assert (Path(source) / "model.safetensors.index.json").exists()
    results = run_on_ranks(num_ranks, tmp_path / "run", load_and_export, source, str(tmp_path / "out"), stored)
    assert_same_bits(stored_weights(tmp_path / "out"), stored_weights(source))

    unsharded = built_model(source)
    with torch.no_grad():
        logits = unsharded.module(IDS).logits
    for is_tied, rank_logits, _ in results:
        assert is_tied == tied
        torch.testing.assert_close(rank_logits, logits, rtol=0, atol=1e-6)
    assert [rows for *_, rows in results] == ([2, 2] if num_ranks == 2 else [2, 2, 0])

    export(unsharded, tmp_path / "unsharded", stored)
    assert folder_contents(tmp_path / "out") == folder_contents(tmp_path / "unsharded")


@pytest.mark.parametrize("max_file_size", ["1GB", "40KB"], ids=["one file", "several"])
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_qk_norm_head_dim", "mixtral", "gpt_neox"])
def test_exported_files_equal_those_of_save_pretrained(tmp_path, family, max_file_size, monkeypatch):
    if family in FAMILIES:
        config = family_config(family)
    else:
        sizes = dict(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
        more = dict(num_local_experts=4, num_key_value_heads=1) if family == "mixtral" else {}
        config = AutoConfig.for_model(family, **sizes, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    monkeypatch.setattr(llm_fp8.models.export, "MAX_FILE_SIZE", max_file_size)
    export_hf(Model(model), tokenizer, tmp_path / "ours", dtype=torch.bfloat16, card=CARD)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_file_size)
    ours, theirs = folder_contents(tmp_path / "ours"), folder_contents(tmp_path / "theirs")
    assert_same_bits(stored_weights(tmp_path / "ours"), stored_weights(tmp_path / "theirs"))
    assert ("model.safetensors.index.json" in ours) == (max_file_size == "40KB")
    # save_pretrained writes views of one tensor to one file.
    if family != "mixtral" or max_file_size != "40KB":
        assert {name: ours[name] for name in theirs} | {"config.json": theirs["config.json"]} == theirs
    entries = json.loads(ours["config.json"])
    assert entries == entries | json.loads(theirs["config.json"])  # ours has further keys for transformers 4


def failed_export_message(rank: int, name: str, file: str) -> str:
    model = sharded_model(name)
    message = ""
    try:
        export(model, Path(file) / "final", is_main=rank == 0)
    except UserError as error:
        message = str(error)
    torch.distributed.barrier()
    return message


@pytest.mark.slow
def test_failed_write_on_main_rank_ends_all_ranks(tmp_path, tiny_model):
    (tmp_path / "file").touch()
    file = str(tmp_path / "file")
    main, other = run_on_ranks(2, tmp_path / "run", failed_export_message, tiny_model, file)
    assert "could not be written" in main and other == ""


# --- Random weights ---------------------------------------------------------------------------------------------------


def random_parameters(rank: int, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return full_parameters(sharded_model(name, dtype, random_init=True))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float32), (3, torch.bfloat16)], ids=str)
def test_random_weights_do_not_depend_on_the_number_of_ranks(tmp_path, tiny_model, num_ranks, dtype):
    unsharded = built_model(tiny_model, dtype, random_init=True)
    expected = {name: parameter.detach() for name, parameter in unsharded.module.named_parameters()}
    for weights in run_on_ranks(num_ranks, tmp_path / "run", random_parameters, tiny_model, dtype):
        assert_same_bits(weights, expected)


# --- TE models --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    install_stand_in(monkeypatch)


def te_structure(name: str, is_stored: bool = True) -> Model:
    """Return a TE decoder of stand-in modules on the meta device. If not `is_stored`, it has no checkpoint to load."""
    source = ModelSource(name, name, is_random=not is_stored)
    config = load_config(source)
    model = te_llama.build_te_model(config, torch.float32, "meta", table_device=CPU)
    return Model(model, checkpoint_of(source, config))


def load_and_export_te(rank: int, name: str, out: str) -> dict[str, torch.Tensor]:
    install_stand_in(pytest.MonkeyPatch())
    strategy = fsdp_strategy()
    model = replace(te_structure(name), full_tensor=strategy.full_tensor)
    strategy.shard(model.module, model.layers)
    fill_weights(model)
    folder = Path(out) if rank == 0 else Path("/proc/nowhere")
    export(model, folder, torch.bfloat16, is_main=rank == 0)
    return full_parameters(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_qkv_bias_tied", "gemma3_text", "qwen3_5_text"])
def test_sharded_fused_parameters_are_filled_from_several_tensors(tmp_path, family):
    torch.manual_seed(0)
    hf_config = family_config(family, hidden_size=128, intermediate_size=256)
    hf_model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.normal_()
    hf_model.save_pretrained(tmp_path / "source", max_shard_size="200KB")
    results = run_on_ranks(3, tmp_path / "run", load_and_export_te, str(tmp_path / "source"), str(tmp_path / "out"))

    unsharded = te_structure(str(tmp_path / "source"))
    unsharded.module.to_empty(device=CPU).tie_weights()
    fill_weights(unsharded)
    expected = {name: parameter.detach() for name, parameter in unsharded.module.named_parameters()}
    for weights in results:
        assert_same_bits(weights, expected)
    assert_same_bits(stored_weights(tmp_path / "out"), stored_weights(tmp_path / "source"))
    ours, source = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "source"))
    assert ours == ours | source  # ours has further keys for transformers 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_stored", [True, False])
def test_filled_layers_allocates_one_layer_at_a_time(is_stored, tied, tmp_path, stand_in):
    source = write_model(tmp_path, tie_word_embeddings=tied)
    unsharded, model = te_structure(source, is_stored), te_structure(source, is_stored)
    unsharded.module.to_empty(device=CPU).tie_weights()
    fill_weights(unsharded, CPU, seed=3)
    materialize_(model.module, CPU, CPU, later=model.layers.modules())
    model.module.tie_weights()
    layers = list(model.layers)
    for _ in range(2):
        for layer in filled_layers(model, layers, CPU, 3):
            sizes = [sum(p.untyped_storage().nbytes() for p in each.parameters()) for each in layers]
            assert [each for each, size in zip(layers, sizes, strict=True) if size] == [layer]
            expected = unsharded.layers[layers.index(layer)].state_dict()
            assert_same_bits({name: value.clone() for name, value in layer.state_dict().items()}, expected)
            for parameter in layer.parameters():
                free_memory_(parameter)
    outside, expected = (
        {name: value for name, value in each.module.state_dict().items() if ".layers." not in name}
        for each in (model, unsharded)
    )
    assert_same_bits(outside, expected)


# --- Mismatched files -------------------------------------------------------------------------------------------------


def filled_model(name: str, use_te: bool) -> Model:
    """Build an unsharded model, load its weights, check that every parameter was overwritten, and return the model."""
    model = te_structure(name) if use_te else model_structure(name)
    module = model.module
    rotary = {name: buffer for name, buffer in module.named_buffers()}
    materialize_(module, CPU, CPU)
    assert all(torch.equal(buffer, rotary[name]) for name, buffer in module.named_buffers())
    module.tie_weights()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    fill_weights(model)
    assert not any(parameter.isnan().any() for parameter in module.parameters())
    return model


def write_changed_model(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **entries: Any) -> str:
    """Write a tiny model with `entries` in its config and weights that `change` has edited. Return its folder."""
    source = write_model(folder, **entries)
    tensors = load_file(f"{source}/model.safetensors")
    change(tensors)
    save_file(tensors, f"{source}/model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("use_te", [False, True], ids=["HF", "TE"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "lacks model.layers.1.self_attn.k_proj.weight"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(2)}), "'model.layers.0.extra.weight'"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(17)}), r"'model.norm.weight'.*\[17\].*\[32\]"),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_mismatched_tensor_is_refused_by_name(tmp_path, change, message, use_te):
    with pytest.raises(UserError, match=message):
        filled_model(write_changed_model(tmp_path / "model", change), use_te=use_te)


@pytest.mark.parametrize("use_te", [False, True], ids=["HF", "TE"])
def test_tied_matrix_loads_under_either_name_or_both(tmp_path, use_te):
    tied = {"tie_word_embeddings": True}
    expected = stored_weights(write_model(tmp_path / "plain", **tied))["model.embed_tokens.weight"]

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    for change in (renamed, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})):
        model = filled_model(write_changed_model(tmp_path / "changed", change, **tied), use_te=use_te)
        module = model.module
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert torch.equal(module.lm_head.weight, expected)
        if use_te:
            check_weights(model, te_llama.parameter_map(module))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_load_from_and_export_to_the_hub_layout(tmp_path, family):
    source = write_model(tmp_path / "source", max_shard_size="40KB", **MOE_FAMILIES[family])
    expected, model = AutoModelForCausalLM.from_pretrained(source), built_model(source)
    assert_same_bits(dict(model.module.state_dict()), dict(expected.state_dict()))
    export(model, tmp_path / "out")
    assert_same_bits(stored_weights(tmp_path / "out"), stored_weights(source))


def test_experts_stored_as_one_tensor_are_exported_as_one(tmp_path):
    source = write_model(tmp_path / "source", **MOE_FAMILIES["qwen3_5_moe_text"])
    expected = AutoModelForCausalLM.from_pretrained(source)
    tensors = {name: tensor.contiguous() for name, tensor in expected.state_dict().items()}
    save_file(tensors, f"{source}/model.safetensors", metadata={"format": "pt"})
    model = built_model(source)
    assert_same_bits(dict(model.module.state_dict()), tensors)
    export(model, tmp_path / "out")
    assert_same_bits(stored_weights(tmp_path / "out"), tensors)


@pytest.mark.parametrize("kind", ["uneven block", "channel"])
def test_experts_stored_in_fp8_are_dequantised(tmp_path, kind):
    fp8, plain = write_fp8_model(tmp_path, kind, **MOE_FAMILIES["qwen3_moe"])
    assert_same_bits(dict(built_model(fp8).module.state_dict()), dict(built_model(plain).module.state_dict()))
