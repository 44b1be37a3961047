"""What is not used is named, whatever the file's format, workers and cache; and what keeps a problem apart."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json, List, Value
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data import tokenise
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prepare import PreparedData, prepare_data
from llm_fp8.data.tokenise import Document
from llm_fp8.models.source import load_tokenizer, resolve_source
from llm_fp8.utils.errors import UserError
from tests.support.small import write_jsonl

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "<|eos|>\n{% endfor %}{% if add_generation_prompt %}[assistant] {% if brief %}Briefly: {% endif %}{% endif %}"
)
CALL = [{"function": {"name": "f", "arguments": {"city": "Paris", "unit": None}}}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _prepare(path: Path, tokenizer: PreTrainedTokenizerBase, *options: str) -> PreparedData:
    return prepare_data(parse_config(["--dataset_name", str(path), "--max_seq_length=256", *options]), tokenizer)


def _texts(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The supervised text of each sequence of an epoch, in the order of the rows."""
    plan: Any = data.train._sequences
    documents: list[Document] = plan.read(list(range(data.report.num_rows_read)))
    return [str(tokenizer.decode(each.input_ids[each.supervised])) for each in documents]


def _chat(number: int, **further: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"q{number}", "id": number}, {"role": "assistant", "content": f"a{number}"}]
    return {"messages": turns, **further}


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 64), ("350000 100000", 4)])
def test_the_cores_of_a_job(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(tokenise, "CPU_QUOTA", tmp_path / "cpu.max")
    assert tokenise.cores_of_job() == 64
    (tmp_path / "cpu.max").write_text(quota)
    assert tokenise.cores_of_job() == cores


def test_what_is_not_used_is_named_with_its_count(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Also by several processes, from the cache, and of a stream, whose rows are read again and again."""
    monkeypatch.setattr(tokenise, "ROWS_PER_WORKER", 10)
    monkeypatch.setattr(tokenise, "cores_of_job", lambda: 2)
    rows = [_chat(i, source="s", **({"late": 1} if i == 11 else {})) for i in range(12)]
    rows[3]["messages"].append({"role": "user", "content": "Thanks"})
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    for name in (others := ("train.jsonl.filepart", "train-1.jsonl~", "train.csv")):
        write_jsonl(tmp_path / name, rows)
    wanted = {"column 'source'": 12, "column 'late'": 1, "entry 'id'": 12, "turn after the last that is supervised": 1}
    for options in ([], [], ["--streaming", "--max_steps=1"]):
        data = _prepare(path, tokenizer, "--validation_fraction=0", *options)
        if data.train.steps_per_epoch is None:
            next(iter(data.train))
            times = data.report.num_rows_read // 12
            assert data.report.unused == {what: times * number for what, number in wanted.items()}
        else:
            assert data.report.unused == wanted
            assert all(f"{what} ({number})" in data.description for what, number in wanted.items())
    data = _prepare(tmp_path, tokenizer, "--validation_fraction=0")
    assert data.report.num_rows_read == 12 and all(data.report.unused[f"file '{name}'"] == 1 for name in others)


def test_text_and_nulls_stay_as_the_file_has_them(tokenizer: Any, tmp_path: Path) -> None:
    cells = ['"2024-05-01"', '"02134"', '"None"', "12345678901234567890123", "1.50", "true", '"é\u2028\u00a0"', "NaN"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}: ", "completion": {cell}}}\n' for i, cell in enumerate(cells)))
    read = [text.removesuffix("<|eos|>") for text in _texts(_prepare(path, tokenizer), tokenizer)]
    assert read == [*(cell.strip('"') for cell in cells[:-1]), ""]
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": CALL}]}] * 2
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    exact = Features({"messages": List({"role": Value("string"), "content": Value("string"), "tool_calls": Json()})})
    with_content = [{"messages": [{"content": None, "tool_calls": None, **m} for m in row["messages"]]} for row in rows]
    Dataset.from_list(with_content, features=exact).to_parquet(tmp_path / "d.parquet")
    kept = ', "unit": null'
    for name, argument in (("b.json", kept), ("c.parquet", ""), ("d.parquet", kept)):
        data = _prepare(tmp_path / name, tokenizer, "--validation_fraction=0")
        assert all('{"city": "Paris"' + argument + "}" in text for text in _texts(data, tokenizer)), name


def test_a_csv_file_has_a_system_prompt_and_lists_as_json(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('input,output,system,history\nq,a,Be brief.,"[[""1"",""2""]]"\nr,b,,\n')
    data = _prepare(tmp_path / "a.csv", tokenizer, "--validation_fraction=0", "--columns=instruction=input")
    assert "[user] r<|eos|>" in str(tokenizer.decode(data.train._sequences.read([1])[0].input_ids))  # type: ignore
    assert _texts(data, tokenizer) == ["2<|eos|>a<|eos|>", "b<|eos|>"] and "[system] Be brief." in data.description


def test_a_document_in_the_system_prompt_makes_another_problem(tokenizer: Any, tmp_path: Path) -> None:
    same = [{"instruction": "Summarise.", "output": f"s{i}"} for i in range(30)]
    apart = [{**row, "system": f"Document {i}"} for i, row in enumerate(same)]
    assert _prepare(write_jsonl(tmp_path / "apart.jsonl", apart), tokenizer).report.num_rows_held_out == 3
    path = write_jsonl(tmp_path / "same.jsonl", same)
    for streaming in ([], ["--streaming", "--max_steps=1"]):
        data = _prepare(path, tokenizer, *streaming)
        assert data.eval is None and "WARNING: nothing to evaluate on" in data.description
        with pytest.raises(UserError, match="--validation_fraction"):
            _prepare(path, tokenizer, "--validation_fraction=0.00001", *streaming)


def test_the_ends_of_the_documents_are_what_the_export_lists(tokenizer: Any, tmp_path: Path) -> None:
    """Also where the template refuses the conversation that it is asked for its end."""
    other = copy.deepcopy(tokenizer)
    needed = "{% if messages[0].role != 'system' %}{{ raise_exception('a system prompt') }}{% endif %}"
    other.chat_template = needed + TEMPLATE.replace("<|eos|>", "<|pad|>")
    path = write_jsonl(tmp_path / "a.jsonl", [_chat(i, system="s") for i in range(20)])
    for streaming in ([], ["--streaming", "--max_steps=1"]):
        assert _prepare(path, other, *streaming).eos_ids == (other.pad_token_id,)
    as_phi3 = "{% if not add_generation_prompt %}<|eos|>{% endif %}"
    other.chat_template = TEMPLATE.replace("<|eos|>", "<|pad|>") + as_phi3
    assert _prepare(path, other).eos_ids == (other.pad_token_id, other.eos_token_id)


def test_the_template_and_its_arguments_are_options(tmp_path: Path) -> None:
    """A template as text and in a file; a row's arguments come before those of all rows."""
    path = write_jsonl(tmp_path / "a.jsonl", [_chat(0), _chat(1, chat_template_kwargs={"brief": False})])
    template = TEMPLATE.replace("{{ m.content }}", "{% if brief %}Briefly: {% endif %}{{ m.content }}")
    (tmp_path / "t.jinja").write_text(template)
    for given in (template, str(tmp_path / "t.jinja")):
        options = ModelConfig(chat_template=given)
        tokenizer, _ = load_tokenizer(options, resolve_source(options))
        data = _prepare(path, tokenizer, "--validation_fraction=0", '--chat_template_kwargs={"brief": true}')
        assert _texts(data, tokenizer) == ["a0<|eos|>", "a1<|eos|>"] and "Briefly: q0" in data.description
        assert "Briefly" not in str(tokenizer.decode(data.train._sequences.read([1])[0].input_ids))  # type: ignore
        tokenizer.save_pretrained(tmp_path / "saved")
        assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == template
    for wrong in ("[1]", "{brief}"):
        with pytest.raises(UserError, match="--chat_template_kwargs"):
            _prepare(path, tokenizer, f"--chat_template_kwargs={wrong}")
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": "as it stands"}])
    with pytest.raises(UserError, match="--chat_template"):
        _prepare(path, tokenizer, f"--chat_template={template}", "--validation_fraction=0")
    options = ModelConfig(chat_template="no/such/file")
    with pytest.raises(UserError, match="--chat_template no/such/file"):
        load_tokenizer(options, resolve_source(options))
