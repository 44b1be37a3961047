"""Files of an export other than weights: EOS tokens, files copied from the source, and loading by transformers 4."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_fp8.config.parser import parse_config
from llm_fp8.models.export import export_hf
from llm_fp8.models.model import Model
from llm_fp8.models.side_files import Origin, add_older_keys, save_side_files, source_folder
from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.settle.plan import plan_run
from llm_fp8.tools.exported import load_exported, tokenizer_of
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.hub_families import write_hub_model
from tests.support.small import CARD, stored_weights, tiny_config, train, write_model

IDS = torch.arange(3, 43)[None]
TEXT = "a b<|im_end|>c <|im_start|>\n"
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
BASE = {"rope_type": "default", "rope_theta": 5e5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
PER_LAYER_TYPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}
PER_LAYER_TYPE["sliding_attention"] = {"rope_type": "default", "rope_theta": 1234.0}

ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"rope_parameters": BASE}, {"rope_theta": 5e5, "rope_scaling": None}),
    "llama3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "yarn": (
        {"rope_parameters": {**BASE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "linear": (
        {"rope_parameters": {**BASE, "rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "dynamic": (
        {"rope_parameters": {**BASE, "rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 24},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "rope_parameters": PER_LAYER_TYPE,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
        },
        {"rope_theta": 5e5, "rope_local_base_freq": 1234.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "partial": (
        {"model_type": "glm", "rope_parameters": {**BASE, "partial_rotary_factor": 0.5}},
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    ),
    "qwen3_moe": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {"num_experts": 4},
    ),
}
"""Name -> entries of a config, and the entries that transformers 4 reads instead."""


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def small_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 1030, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = tiny_config(**{**sizes, "initializer_range": 0.2, **copy.deepcopy(changes)})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write_with_transformers_5(folder: Path, **changes: Any) -> Path:
    """Write a model in transformers 5's layout. Its chat template ends turns with the token <|im_end|> (id 1025)."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    small_model(**changes).save_pretrained(folder)
    assert read(folder, "tokenizer_config.json")["tokenizer_class"] == "TokenizersBackend"
    return folder


def write_with_transformers_4(folder: Path) -> Path:
    """Write the model of `write_with_transformers_5` in transformers 4's layout, which most folders on the hub have."""
    write_with_transformers_5(folder, rope_parameters=BASE)
    edit(folder / "config.json", lambda c: c.update(rope_theta=c.pop("rope_parameters")["rope_theta"]))
    edit(folder / "config.json", lambda c: c.update(rope_scaling=None, torch_dtype=c.pop("dtype")))
    tokens = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("extra_special_tokens", "backend", "is_local", "local_files_only"):
        edit(folder / "tokenizer_config.json", lambda t, name=name: t.pop(name, None))
    edit(folder / "tokenizer_config.json", lambda t: t.update(tokens, chat_template=TEMPLATE))
    (folder / "chat_template.jinja").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    (folder / "tokenizer.model").write_bytes(b"a sentencepiece model")
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def export_side_files(source: Path, folder: Path, *eos_ids: int, template: str | None = None) -> Path:
    """Write to `folder` the files that a run on `source` exports besides weights, and return the folder. The run used
    `eos_ids` as EOS tokens and `template`, or else the template of `source`, as chat template.
    """
    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = template or tokenizer.chat_template
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
        model.tie_weights()
    save_side_files(model, tokenizer, folder, torch.bfloat16, Origin(str(source), eos_ids))
    return folder


# --- Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROPE)
def test_config_has_old_and_new_keys_with_the_same_meaning(tmp_path, kind):
    changes, expected = ROPE[kind]
    source = write_with_transformers_5(tmp_path / "source", **changes)
    config = read(export_side_files(source, tmp_path / "out"))
    assert config == config | expected and config["torch_dtype"] == config["dtype"] == "bfloat16"
    ours, theirs = (AutoConfig.from_pretrained(tmp_path / name).rope_parameters for name in ("out", "source"))
    assert ours == theirs


def test_old_keys_that_transformers_5_would_misread_are_omitted(tmp_path):
    source = write_hub_model(tmp_path / "source", "Gemma 4, text")
    config = read(export_side_files(source, tmp_path / "out"))
    assert "rope_scaling" not in config and config["rope_parameters"] == read(source)["rope_parameters"]


def test_contradicting_old_keys_are_corrected(tmp_path):
    source = write_with_transformers_5(tmp_path / "source", rope_parameters=BASE)
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}  # no export contains the code
    edit(source / "config.json", lambda c: c.update(rope_theta=1e4, torch_dtype="float16", **code))
    config = read(export_side_files(source, tmp_path / "out"))
    assert config["rope_theta"] == 5e5 and config["torch_dtype"] == "bfloat16" and "auto_map" not in config


def test_files_of_transformers_4_are_copied_unchanged(tmp_path):
    source, out = write_with_transformers_4(tmp_path / "source"), tmp_path / "out"
    edit(source / "config.json", lambda c: c.update(torch_dtype="bfloat16", a_key_of_the_model=[1]))
    export_side_files(source, out)
    same = {path.name for path in source.iterdir()} - {"trainer_state.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == same | {"chat_template.jinja"}
    assert {name: (out / name).read_bytes() for name in same} == {name: (source / name).read_bytes() for name in same}


def test_tokenizer_of_transformers_5_is_written_for_transformers_4(tmp_path):
    out = export_side_files(write_with_transformers_5(tmp_path / "source"), tmp_path / "out")
    entries = read(out, "tokenizer_config.json")
    assert entries["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in entries
    assert entries["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert entries["chat_template"] == TEMPLATE
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, tmp_path / "source"))
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"] and ours.all_special_ids == theirs.all_special_ids


@pytest.mark.parametrize(("declared", "family"), [("Qwen2", "mistral"), ("Llama", "llama"), ("GPT2", "qwen2")])
def test_adapter_folder_tokenises_as_the_run_did(tmp_path, declared, family):
    """Depending on family and declared class, transformers 5 uses or replaces the pre-tokenizer of tokenizer.json."""
    source, letter = write_with_transformers_4(tmp_path / "source"), {"type": "Split", "pattern": {"Regex": r"\p{L}"}}
    both = [letter | {"behavior": "Isolated", "invert": False}, read(source, "tokenizer.json")["pre_tokenizer"]]
    edit(source / "tokenizer.json", lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": both}))
    edit(source / "tokenizer_config.json", lambda t: t.update(tokenizer_class=f"{declared}Tokenizer"))
    edit(source / "config.json", lambda c: c.update(model_type=family))
    run, adapter = AutoTokenizer.from_pretrained(source), tmp_path / "adapter"
    adapter.mkdir()
    save_side_files(small_model(), run, adapter, None, Origin(str(source)))
    text = "12 is the number" + TEXT
    for folder in (adapter, export_side_files(source, tmp_path / "full")):
        assert AutoTokenizer.from_pretrained(folder)(text).data == run(text).data


def test_several_chat_templates_are_copied_unless_the_run_replaced_them(tmp_path):
    source = write_with_transformers_4(tmp_path / "source")
    several = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    edit(source / "tokenizer_config.json", lambda t: t.update(chat_template=several))
    assert read(export_side_files(source, tmp_path / "out"), "tokenizer_config.json")["chat_template"] == several
    by_name = {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == by_name
    other = export_side_files(source, tmp_path / "other", template="{{ messages }}")
    assert read(other, "tokenizer_config.json")["chat_template"] == "{{ messages }}"
    assert AutoTokenizer.from_pretrained(other).chat_template == "{{ messages }}"


def test_source_folder_of_hub_id_is_in_the_cache(tmp_path, monkeypatch):
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    write_with_transformers_4(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert source_folder("a/b") == snapshot

    def incomplete(*_: object, **__: object) -> None:
        raise LocalEntryNotFoundError("a file is missing")

    monkeypatch.setattr("llm_fp8.models.side_files.snapshot_download", incomplete)
    source_folder.cache_clear()
    assert source_folder("a/b") == snapshot


# --- EOS --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "trained_ids", "expected"),
    [(1, (1,), 1), (1, (1025,), [1025, 1]), ([1, 5], (1025,), [1025, 1, 5]), (None, (1025,), [1025, 1])],
)
def test_trained_eos_is_listed_first(tmp_path, stored, trained_ids, expected):
    source = write_with_transformers_4(tmp_path / "source")
    for name in ("config.json", "generation_config.json"):
        edit(source / name, lambda values: values.update(eos_token_id=stored, temperature=0.6))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": stored, "temperature": 0.6}))
    out = export_side_files(source, tmp_path / "out", *trained_ids)
    assert read(out)["eos_token_id"] == read(out, "generation_config.json")["eos_token_id"] == expected
    assert read(out, "generation_config.json")["temperature"] == 0.6
    eos = "<|im_end|>" if trained_ids == (1025,) else "<|eos|>"
    assert read(out, "tokenizer_config.json")["eos_token"] == read(out, "special_tokens_map.json")["eos_token"] == eos
    assert AutoTokenizer.from_pretrained(out).eos_token == eos


def test_template_with_eos_keeps_tokenizer_eos_and_missing_generation_config_is_written(tmp_path):
    source = write_with_transformers_4(tmp_path / "source")
    (source / "generation_config.json").unlink()
    out = export_side_files(source, tmp_path / "out", 1025, template=TEMPLATE + "{{ eos_token }}")
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|eos|>"
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1025, 1]


# --- Runs -------------------------------------------------------------------------------------------------------------

CHAT = [{"messages": [{"role": r, "content": f"{r} {i}"} for r in ("user", "assistant")]} for i in range(8)]


def run_export(source: Path, folder: Path, *more: str) -> Path:
    (rows := folder.with_suffix(".jsonl")).write_text("".join(json.dumps(row) + "\n" for row in CHAT))
    options = (f"--model_name={source}", f"--dataset_name={rows}", f"--output_dir={folder}")
    options += ("--max_steps=1", "--max_seq_length=64", "--batch_size=2", "--validation_fraction=0")
    assert train(*options, "--mixed_precision=no", *more) == 0
    return folder / "final"


@pytest.mark.parametrize(("before", "after"), [(1, [1025, 1]), (1025, 1025)])
def test_adapter_and_merged_model_list_the_trained_eos(tmp_path, monkeypatch, before, after):
    source = write_with_transformers_4(tmp_path / "source")
    edit(source / "config.json", lambda values: values.update(eos_token_id=before))
    edit(source / "generation_config.json", lambda values: values.update(eos_token_id=[before, 1]))
    final = run_export(source, tmp_path / "run", "--lora_rank=2", "--chat_template=" + TEMPLATE + "{# new #}")
    assert read(final, "generation_config.json")["eos_token_id"] == [1025, 1]
    assert load_exported(final, str(source), torch.float32).generation_config.eos_token_id == [1025, 1]
    assert tokenizer_of(final, str(source)).chat_template == TEMPLATE + "{# new #}"
    arguments = ["merge_adapter.py", "--adapter", str(final), "--output", str(tmp_path / "merged")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert importlib.import_module("scripts.merge_adapter").main() == 0
    merged, tokens = read(tmp_path / "merged"), read(tmp_path / "merged", "tokenizer_config.json")
    assert merged["eos_token_id"] == after and merged["rope_theta"] == 5e5
    assert read(tmp_path / "merged", "generation_config.json")["eos_token_id"] == [1025, 1]
    assert tokens["eos_token"] == "<|im_end|>" and tokens["chat_template"] == TEMPLATE + "{# new #}"


def test_longrope_of_phi3_has_the_three_keys_that_transformers_4_allows():
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4}
    config = {"model_type": "phi3", "rope_parameters": rope | {"original_max_position_embeddings": 4096}}
    add_older_keys(config)
    assert config["rope_scaling"] == {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def test_other_names_of_a_stored_lm_head_are_known(tmp_path):
    shape = dict(model_type="gpt_neox", num_hidden_layers=2, tie_word_embeddings=False)
    source = Path(write_model(tmp_path / "source", **shape))
    edit(source / "config.json", lambda c: c.update(tie_word_embeddings=True))
    plan = plan_run(parse_config([f"--model_name={source}", "--mixed_precision=no"]), LaunchRanks())
    assert any("embed_out.weight" in note for note in plan.notes)


def test_tied_model_with_stored_lm_head_is_untied_as_in_transformers(tmp_path, capsys):
    source = write_with_transformers_5(tmp_path / "source", tie_word_embeddings=False)
    edit(source / "config.json", lambda c: c.update(tie_word_embeddings=True))
    final = run_export(source, tmp_path / "run", "--learning_rate=1e-30")
    assert "lm_head.weight" in capsys.readouterr().out and not read(final)["tie_word_embeddings"]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (final, source))
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-6)
    weights = stored_weights(final)
    plan = plan_run(parse_config([f"--model_name={source}", "--mixed_precision=no"]), LaunchRanks())
    assert "lm_head.weight" in weights and plan.size.num_parameters == sum(w.numel() for w in weights.values())


# --- transformers 4 ---------------------------------------------------------------------------------------------------

OLDER = Path(os.environ.get("LLM_FP8_OLDER_TRANSFORMERS", Path.home() / ".cache/llm-fp8/transformers-4.57.6"))
READER = """
import gc, json, sys
gc.disable()  # imports take longer otherwise
import torch
sys.modules["torchao"] = None  # saves an unneeded import
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4."), transformers.__version__
for folder in sys.argv[1:]:
    contents = {}
    if not folder.endswith("adapter"):
        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
        contents["eos"] = model.generation_config.eos_token_id
        contents["logits"] = model(torch.arange(3, 43)[None]).logits[0].tolist()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    contents["ids"] = tokenizer(IDS_TEXT)["input_ids"]
    contents["tokenizer"] = [tokenizer.chat_template, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]
    print(json.dumps(contents))
""".replace("IDS_TEXT", repr(TEXT))


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir(), reason=f"no transformers 4 in {OLDER}, where scripts/test.sh installs it")
def test_transformers_4_loads_the_same_model_and_tokenizer(tmp_path):
    for kind, (changes, _) in ROPE.items():
        source, out = write_with_transformers_5(tmp_path / "source" / kind, **changes), tmp_path / "final" / kind
        model, tokenizer = small_model(**changes), AutoTokenizer.from_pretrained(source)
        export_hf(Model(model), tokenizer, out, dtype=torch.float32, card=CARD, origin=Origin(str(source), (1025,)))
    shutil.copytree(write_with_transformers_4(tmp_path / "four"), tmp_path / "source" / "four")
    run_export(tmp_path / "source" / "four", tmp_path / "run").rename(tmp_path / "final" / "four")
    run_export(tmp_path / "source" / "four", tmp_path / "lora", "--lora_rank=2").rename(tmp_path / "final" / "adapter")
    folders = sorted((tmp_path / "final").iterdir())
    environment = {**os.environ, "PYTHONPATH": str(OLDER)}
    command = [sys.executable, "-c", READER, *map(str, folders)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
    for folder, line in zip(folders, process.stdout.splitlines()[-len(folders) :], strict=True):
        contents, tokenizer = json.loads(line), AutoTokenizer.from_pretrained(folder)
        assert contents["tokenizer"] == [TEMPLATE, 1025, sorted(tokenizer.all_special_ids)], folder
        assert contents["ids"] == tokenizer(TEXT)["input_ids"], folder
        if folder.name != "adapter":
            with torch.no_grad():
                logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits[0]
            torch.testing.assert_close(torch.tensor(contents["logits"]), logits, rtol=0, atol=1e-4, msg=str(folder))
            assert contents["eos"] == [1025, 1], folder
