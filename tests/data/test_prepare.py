"""From options to loaders: what is trained on, held out and not used, mixes, and streams that go on exactly."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from datasets import Dataset, Features, Json, List, Value
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data import loader, tokenise
from llm_fp8.data.collate import Batch
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prepare import PreparedData, held_out_mask, is_held_out, prepare_data
from llm_fp8.data.tokenise import problem_key
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX
from llm_fp8.models.source import load_tokenizer, resolve_source
from llm_fp8.utils.errors import UserError
from tests.support.batches import assert_same_steps, next_steps
from tests.support.small import write_jsonl

BOTH = pytest.mark.parametrize("streaming", [[], ["--streaming"]], ids=["prepared", "stream"])
PACKED_OR_NOT = pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "<|eos|>\n{% endfor %}{% if add_generation_prompt %}[assistant] {% if brief %}Briefly: {% endif %}{% endif %}"
)
CALL = [{"function": {"name": "f", "arguments": {"city": "Paris", "unit": None}}}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def prepare(tokenizer: PreTrainedTokenizerBase) -> Any:
    def call(name: Path | str, *options: str, **keywords: Any) -> PreparedData:
        words = ["--dataset_name", str(name), "--max_seq_length", "128", *options]
        if "--streaming" in options:
            words += ["--max_steps", "1000"]
        return prepare_data(parse_config(words), **{"tokenizer": tokenizer, **keywords})

    return call


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer with a chat template."""
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = TEMPLATE
    return chat


@pytest.fixture
def prepare_chats(prepare: Any, chat: PreTrainedTokenizerBase) -> Any:
    return functools.partial(prepare, tokenizer=chat)


def _row(problem: str, solution: str) -> dict[str, str]:
    return {"problem": problem, "generated_solution": solution}


def _repeated_problems(path: Path, num_problems: int = 60, each: int = 5) -> list[dict[str, Any]]:
    """Each problem several times with other solutions and other spelling, as in OpenMathInstruct-2."""
    rows = []
    for answer in range(each):
        for i in range(num_problems):
            problem = f"What is {i} + {i}?" if answer % 2 else f"what is  {i} + {i}? "
            rows.append(_row(problem, f"Way {answer}: {i} + {i} = {2 * i}"))
    write_jsonl(path, rows)
    return rows


def _row_ids(steps: Iterable[Iterable[Batch]]) -> list[int]:
    return sorted(row for step in steps for batch in step for row in batch.row_ids)


def test_no_problem_is_trained_on_and_evaluated_on(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    data = prepare(tmp_path, "--validation_fraction", "0.2", "--packing")
    trained, held_out = _row_ids(next_steps(data.train)), _row_ids([data.eval])
    assert sorted(trained + held_out) == list(range(len(rows)))
    problems = [{problem_key(rows[i]["problem"]) for i in part} for part in (trained, held_out)]
    assert problems[0].isdisjoint(problems[1]) and len(problems[1]) > 3
    # The held-out problems depend on neither order nor seed.
    write_jsonl(tmp_path / "train.jsonl", rows[::-1])
    other = prepare(tmp_path, "--validation_fraction", "0.2", "--seed", "7")
    assert {problem_key(rows[::-1][i]["problem"]) for i in _row_ids([other.eval])} == problems[1]
    assert prepare(tmp_path, "--validation_fraction", "0").eval is None


def test_a_validation_split_without_the_problems_trained_on(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl", num_problems=5)
    others = [_row(f"What is {i} - 1?", f"{i - 1}") for i in range(10)]
    write_jsonl(tmp_path / "validation.jsonl", [*others, _row("WHAT IS 3 + 3?", "6"), _row("?", "")])
    write_jsonl(tmp_path / "test.jsonl", others[:3])
    data = prepare(tmp_path)
    assert data.report.num_eval_rows == 10 and list(data.report.eval_rows_left_out.values()) == [1, 1]
    assert _row_ids([data.eval]) == list(range(10)) and _row_ids(next_steps(data.train)) == list(range(len(rows)))
    few = ["--no_packing", "--batch_size=8", "--eval_batches=3"]
    assert len(_row_ids([prepare(tmp_path, *few, eval_batch_size=2).eval])) == 6, "merged rows are not more of them"
    assert prepare(tmp_path, "--validation_split_name", "test").report.num_eval_rows == 3
    assert prepare(tmp_path, "--validation_fraction", "0.2").report.num_rows_held_out > 0
    for split in ("dev", "train"):
        with pytest.raises(UserError, match=f" {split}"):
            prepare(tmp_path, "--validation_split_name", split)
    write_jsonl(tmp_path / "validation.jsonl", rows[:4])
    with pytest.raises(UserError, match="split validation can be evaluated on: 4 of 4 hold a problem that is trained"):
        prepare(tmp_path)


@BOTH
def test_a_dataset_to_evaluate_on(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    """Nothing is held out of what is trained on, and columns with other names count for both."""
    questions = [{"question": f"What is {i}?", "answer": str(i)} for i in range(9)]
    write_jsonl(tmp_path / "a" / "train.jsonl", [{**row, "question": f"{row['question']} Or?"} for row in questions])
    write_jsonl(tmp_path / "b" / "test.jsonl", questions)
    columns = "--columns=problem=question,generated_solution=answer"
    data = prepare(tmp_path / "a", f"--eval_dataset_name={tmp_path / 'b'}", columns, *streaming)
    assert data.report.num_eval_rows == 9 and data.report.num_rows_held_out == 0
    long = write_jsonl(tmp_path / "long.jsonl", [{"question": "x " * 3000, "answer": "y"}] * 3)
    with pytest.raises(UserError, match=r"--eval_dataset_name .*long.jsonl: no row .* can be evaluated on"):
        prepare(tmp_path / "a", f"--eval_dataset_name={long}", columns, *streaming)


def test_the_columns_that_an_error_advises_work(prepare: Any, tmp_path: Path) -> None:
    good = {"role": "assistant", "content": "good"}
    for row in (
        {"question": "q", "Answer": "good"},
        {"instruction": "i", "response": "good"},
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        {"prompt": "p", "chosen": [good], "rejected": [good]},
        {"prompt": "p", "chosen": [{"role": "user", "content": "p"}, good]},
    ):
        file = write_jsonl(tmp_path / "a.jsonl", [row])
        with pytest.raises(UserError, match=r"se --columns \S+\.$") as error:
            prepare(file)
        columns = str(error.value).split("--columns ")[1].rstrip(".")
        assert ">>>good<|eos|><<<" in prepare(file, "--columns", columns, "--validation_fraction=0").description


MIXED = [
    _row("What is 1 + 1?", "2"),
    _row("What is 1 + 2?", ""),
    _row("What is 1 + 3?", "1 2 3 4 5 6 7 8 9 " * 30),
    _row("", "5"),
    _row("What is 1 + 5?", "6"),
]


@BOTH
def test_every_row_is_counted(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    write_jsonl(tmp_path / "train.jsonl", MIXED)
    for overlong, dropped, truncated, used in (("drop", 1, 0, 2), ("truncate", 0, 1, 3)):
        data = prepare(tmp_path, "--validation_fraction", "0", "--overlong", overlong, *streaming)
        next_steps(data.train, 1)
        report = data.report
        # A stream is read on and on to fill the batches, so its counts are a multiple.
        times = report.num_rows_read // 5
        assert times == 1 or (times > 1 and streaming)
        counts = (report.num_rows_used, report.num_overlong_dropped, report.num_overlong_truncated, report.num_empty)
        assert counts == (used * times, dropped * times, truncated * times, 2 * times)
        assert "WARNING: " in data.description or streaming
    assert "Solution:\n    >>>2<|eos|><<<" in data.description
    write_jsonl(tmp_path / "train.jsonl", MIXED[1:4])
    with pytest.raises(UserError, match=f"--dataset_name {tmp_path}: no row of split train can be trained on"):
        prepare(tmp_path, *streaming)


@BOTH
def test_what_cannot_be_used_is_named(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    files = {"columns": [{"question": "q", "answer": "a"}], "messages": [{"messages": "hello"}]}
    for name, rows in files.items():
        with pytest.raises(UserError, match=f"--dataset_name .*{name}.jsonl"):
            prepare(write_jsonl(tmp_path / f"{name}.jsonl", rows), *streaming)
    (tmp_path / "a-0.csv").write_text("problem,generated_solution\np,s\n")
    (tmp_path / "a-1.csv").write_text("problem,answer\nq,s\n")
    with pytest.raises(UserError, match=r"--dataset_name .*a-\*\.csv: cannot read"):
        next_steps(prepare(tmp_path / "a-*.csv", "--validation_fraction", "0", *streaming).train, 2)
    (tmp_path / "empty.csv").write_text("problem,generated_solution\n")
    with pytest.raises(UserError, match=r"--dataset_name .*empty\.csv"):
        prepare(tmp_path / "empty.csv", *streaming)


@BOTH
def test_columns_under_other_names(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    """The same batches as those of a dataset with our names; a column that stands in the way is not looked at."""
    renamed = [
        {"question": r["problem"], "problem": "no", "answer": r["generated_solution"], "text": "x"} for r in MIXED
    ]
    swapped = [_row(row["generated_solution"], row["problem"]) for row in MIXED]
    ours = next_steps(prepare(write_jsonl(tmp_path / "ours.jsonl", MIXED), *streaming).train, 1)
    for rows, columns in (
        (renamed, "problem=question, generated_solution=answer"),
        (swapped, "problem=generated_solution,generated_solution=problem"),
    ):
        theirs = prepare(write_jsonl(tmp_path / "theirs.jsonl", rows), f"--columns={columns}", *streaming)
        assert_same_steps(ours, next_steps(theirs.train, 1))
    with pytest.raises(UserError, match="--columns problem=qestion: .* problem, generated_solution"):
        prepare(tmp_path / "ours.jsonl", "--columns=problem=qestion", *streaming)


def _mix(folder: Path, num_ours: int = 30, num_chats: int = 90) -> str:
    """Names of two datasets of different columns: problems "a 0", "a 1", ... and conversations "b 0", ..."""
    ours = [{"question": f"a {i}", "answer": f"= {i}"} for i in range(num_ours)]
    chats = [
        {"id": i, "conversations": [{"from": "human", "value": f"b {i}"}, {"from": "gpt", "value": f"= {i}"}]}
        for i in range(num_chats)
    ]
    return f"{write_jsonl(folder / 'a.jsonl', ours)},{write_jsonl(folder / 'b.jsonl', chats)}"


OF_THE_MIX = ("--columns=problem=question,generated_solution=answer", "--validation_fraction=0")


def _counted(steps: list[list[Batch]], tokenizer: PreTrainedTokenizerBase) -> Counter[str]:
    """How many documents of each problem ("a 3") the batches hold."""
    texts = (tokenizer.decode(batch.input_ids.flatten()) for step in steps for batch in step)
    return Counter(problem for text in texts for problem in re.findall(r"[ab] \d+(?=\n)", text))


def test_several_datasets(prepare: Any, tmp_path: Path, tokenizer: Any) -> None:
    """Whole, or in shares of the rows; those of another form are left alone by --columns."""
    name = _mix(tmp_path)
    for weights, num_ours, num_chats in (
        ((), 30, 90),
        (("--dataset_weights=3, 1.0",), 30, 10),
        (("--dataset_weights=1,9",), 10, 90),
    ):
        data = prepare(name, *OF_THE_MIX, *weights)
        wanted = [f"a {i}" for i in range(num_ours)] + [f"b {i}" for i in range(num_chats)]
        assert _counted(next_steps(data.train), tokenizer) == Counter(wanted)
        assert f"b.jsonl, split train: {num_chats} of 90 rows" in data.description
    with pytest.raises(UserError, match=r"--dataset_weights has 3 numbers for the 2 datasets of --dataset_name"):
        prepare(name, *OF_THE_MIX, "--dataset_weights=1,2,3")
    with pytest.raises(UserError, match="--streaming reads the datasets .* add --dataset_weights"):
        prepare(name, *OF_THE_MIX, "--streaming")


@pytest.mark.slow
@BOTH
def test_a_mix_resumes_exactly_and_only_as_itself(
    prepare: Any, tmp_path: Path, streaming: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STREAM_BUFFER_ROWS", 16)

    def fresh(weights: str) -> PreparedData:
        options = [*OF_THE_MIX, "--batch_size=2", f"--dataset_weights={weights}", *streaming]
        return prepare(_mix(tmp_path), *options)

    for done in (1, 20):  # within an epoch and beyond
        whole, begun, resumed = (fresh("0.5,0.5") for _ in range(3))
        wanted = next_steps(whole.train, done + 6)
        next_steps(begun.train, done)
        resumed.train.load_state_dict(json.loads(json.dumps(begun.train.state_dict())))
        assert_same_steps(next_steps(resumed.train, 6), wanted[done:])
    with pytest.raises(UserError, match="--resume_from: the checkpoint was made with other training data"):
        fresh("0.4,0.6").train.load_state_dict(fresh("0.5,0.5").train.state_dict())


@pytest.mark.slow
@PACKED_OR_NOT
def test_a_stream_holds_out_the_same_problems(
    prepare: Any, tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STREAM_BUFFER_ROWS", 64)
    rows = _repeated_problems(tmp_path / "train.jsonl")
    options = (packing, "--validation_fraction", "0.2", "--batch_size", "4")
    whole, stream = prepare(tmp_path, *options), prepare(tmp_path, *options, "--streaming")
    held_out = {i for i, row in enumerate(rows) if is_held_out(problem_key(row["problem"]), 0.2)}
    assert stream.train.steps_per_epoch is None
    assert _row_ids([stream.eval]) == _row_ids([whole.eval]) == sorted(held_out)
    trained: Counter[int] = Counter()
    for step in stream.train:
        trained.update(row for batch in step for row in batch.row_ids)
        if stream.train.epoch >= 2:
            break
    # Two passes at least, and no more than the global batch that went over into the third.
    assert set(trained) == set(range(len(rows))) - held_out
    assert set(trained.values()) <= {2, 3} and stream.report.num_rows_read >= 2 * len(rows)


@pytest.mark.slow
@PACKED_OR_NOT
def test_a_stream_resumes_where_it_was(
    prepare: Any, tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STREAM_BUFFER_ROWS", 64)
    rows = _repeated_problems(tmp_path / "train.jsonl")
    options = (packing, "--validation_fraction", "0.1", "--batch_size", "4", "--streaming", "--num_of_samples", "250")

    def fresh() -> PreparedData:
        return prepare(tmp_path, *options)

    whole = next_steps(fresh().train, 25)
    for done in (1, 19):
        first, second = fresh(), fresh()
        next_steps(first.train, done)
        state = json.loads(json.dumps(first.train.state_dict()))
        second.train.load_state_dict(state)
        assert_same_steps(next_steps(second.train, 25 - done), whole[done:])
    state["rows"]["content"] = "of other rows"
    second.train.load_state_dict(state)
    with pytest.raises(UserError, match="--resume_from: the stream's rows are not those"):
        next_steps(second.train, 1)
    write_jsonl(tmp_path / "train.jsonl", [{**row, "generated_solution": "another answer"} for row in rows])
    with pytest.raises(UserError, match="--resume_from: the checkpoint was made with other training data"):
        fresh().train.load_state_dict(state)


@PACKED_OR_NOT
def test_the_filled_share_is_that_of_the_batches(prepare: Any, tmp_path: Path, packing: str) -> None:
    """Padded batches are as wide as their longest row, in steps of 128 tokens."""
    path = write_jsonl(tmp_path / "rows.jsonl", [_row(f"{i}?", "one two " * (i % 90 + 1)) for i in range(101)])
    options = ("--max_seq_length=512", "--batch_size=4", "--validation_fraction=0", packing)
    data = prepare(path, *options)
    batches = [batch for step in next_steps(data.train, data.train.steps_per_epoch) for batch in step]
    real, positions = (sum(getattr(batch, name) for batch in batches) for name in ("num_real_tokens", "num_tokens"))
    assert data.report.padding_efficiency == real / positions > 0.3


def _lines(data: PreparedData) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels of each row of an epoch of padded batches."""
    batches = [batch for step in next_steps(data.train) for batch in step]
    return {row: line for b in batches for row, *line in zip(b.row_ids, b.input_ids, b.labels, strict=False)}


def _text(data: PreparedData, tokenizer: PreTrainedTokenizerBase, row: int) -> str:
    return str(tokenizer.decode(_lines(data)[row][0]))


def _supervised(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The supervised text of each row, in the order of the rows."""
    labels = [labels for _, (_, labels) in sorted(_lines(data).items())]
    return [str(tokenizer.decode(line[line != IGNORE_INDEX])) for line in labels]


def _chat(number: int, **further: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"q{number}", "id": number}, {"role": "assistant", "content": f"a{number}"}]
    return {"messages": turns, **further}


def test_what_is_not_used_is_named_with_its_count(prepare_chats: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Also by several processes, from the cache, and of a stream, whose rows are read again and again."""
    monkeypatch.setattr(tokenise, "ROWS_PER_WORKER", 10)
    monkeypatch.setattr(tokenise, "cores_of_job", lambda: 2)
    rows = [_chat(i, source="s", **({"late": 1} if i == 11 else {})) for i in range(12)]
    rows[3]["messages"].append({"role": "user", "content": "Thanks"})
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    for name in (others := ("train.jsonl.filepart", "train-1.jsonl~", "train.csv")):
        write_jsonl(tmp_path / name, rows)
    wanted = {"column 'source'": 12, "column 'late'": 1, "entry 'id'": 12, "turn after the last that is supervised": 1}
    for options in ([], [], ["--streaming"]):
        data = prepare_chats(path, "--validation_fraction=0", *options)
        if data.train.steps_per_epoch is None:
            next(iter(data.train))
            times = data.report.num_rows_read // 12
            assert data.report.unused == {what: times * number for what, number in wanted.items()}
        else:
            assert data.report.unused == wanted
            assert all(f"{what} ({number})" in data.description for what, number in wanted.items())
    data = prepare_chats(tmp_path, "--validation_fraction=0")
    assert data.report.num_rows_read == 12 and all(data.report.unused[f"file '{name}'"] == 1 for name in others)


def test_text_and_nulls_stay_as_the_file_has_them(prepare_chats: Any, chat: Any, tmp_path: Path) -> None:
    cells = ['"2024-05-01"', '"02134"', '"None"', "12345678901234567890123", "1.50", "true", '"é\u2028\u00a0"', "NaN"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}: ", "completion": {cell}}}\n' for i, cell in enumerate(cells)))
    data = prepare_chats(path, "--validation_fraction=0")
    assert _supervised(data, chat) == [cell.strip('"') + "<|eos|>" for cell in cells[:-1]]
    assert data.report.num_empty == 1, "NaN is no text"
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": CALL}]}] * 2
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    exact = Features({"messages": List({"role": Value("string"), "content": Value("string"), "tool_calls": Json()})})
    with_content = [{"messages": [{"content": None, "tool_calls": None, **m} for m in row["messages"]]} for row in rows]
    Dataset.from_list(with_content, features=exact).to_parquet(tmp_path / "d.parquet")
    null = ', "unit": null'
    for name, argument in (("b.json", null), ("c.parquet", ""), ("d.parquet", null)):
        data = prepare_chats(tmp_path / name, "--validation_fraction=0")
        first, second = _supervised(data, chat)
        assert first == second and '{"city": "Paris"' + argument + "}" in first, name


def test_a_csv_file_has_a_system_prompt_and_lists_as_json(prepare_chats: Any, chat: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('input,output,system,history\nq,a,Be brief.,"[[""1"",""2""]]"\nr,b,,\n')
    data = prepare_chats(tmp_path / "a.csv", "--validation_fraction=0", "--columns=instruction=input")
    assert "[user] r<|eos|>" in _text(data, chat, 1)
    assert _supervised(data, chat) == ["2<|eos|>a<|eos|>", "b<|eos|>"] and "[system] Be brief." in data.description


def test_a_document_in_the_system_prompt_makes_another_problem(prepare: Any, tmp_path: Path) -> None:
    same = [{"instruction": "Summarise.", "output": f"s{i}"} for i in range(30)]
    apart = [{**row, "system": f"Document {i}"} for i, row in enumerate(same)]
    assert prepare(write_jsonl(tmp_path / "apart.jsonl", apart)).report.num_rows_held_out == 3
    path = write_jsonl(tmp_path / "same.jsonl", same)
    for streaming in ([], ["--streaming"]):
        data = prepare(path, *streaming)
        assert data.eval is None and "WARNING: nothing to evaluate on" in data.description
        with pytest.raises(UserError, match="--validation_fraction"):
            prepare(path, "--validation_fraction=0.00001", *streaming)


def test_the_ends_of_the_documents_are_what_the_export_lists(prepare: Any, chat: Any, tmp_path: Path) -> None:
    """Also where the template refuses the conversation that it is asked for its end."""
    other = copy.deepcopy(chat)
    needed = "{% if messages[0].role != 'system' %}{{ raise_exception('a system prompt') }}{% endif %}"
    other.chat_template = needed + TEMPLATE.replace("<|eos|>", "<|pad|>")
    path = write_jsonl(tmp_path / "a.jsonl", [_chat(i, system="s") for i in range(20)])
    for streaming in ([], ["--streaming"]):
        assert prepare(path, *streaming, tokenizer=other).eos_ids == (other.pad_token_id,)
    as_phi3 = "{% if not add_generation_prompt %}<|eos|>{% endif %}"
    other.chat_template = TEMPLATE.replace("<|eos|>", "<|pad|>") + as_phi3
    assert prepare(path, tokenizer=other).eos_ids == (other.pad_token_id, other.eos_token_id)


def test_the_template_and_its_arguments_are_options(prepare: Any, tmp_path: Path) -> None:
    """A template as text and in a file; a row's arguments come before those of all rows."""
    path = write_jsonl(tmp_path / "a.jsonl", [_chat(0), _chat(1, chat_template_kwargs={"brief": False})])
    template = TEMPLATE.replace("{{ m.content }}", "{% if brief %}Briefly: {% endif %}{{ m.content }}")
    (tmp_path / "t.jinja").write_text(template)
    for text_or_file in (template, str(tmp_path / "t.jinja")):
        options = ModelConfig(chat_template=text_or_file)
        tokenizer, _ = load_tokenizer(options, resolve_source(options))
        how = ("--validation_fraction=0", '--chat_template_kwargs={"brief": true}')
        data = prepare(path, *how, tokenizer=tokenizer)
        assert _supervised(data, tokenizer) == ["a0<|eos|>", "a1<|eos|>"] and "Briefly: q0" in data.description
        assert "Briefly" not in _text(data, tokenizer, 1)
        tokenizer.save_pretrained(tmp_path / "saved")
        assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == template
    for wrong in ("[1]", "{brief}"):
        with pytest.raises(UserError, match="--chat_template_kwargs"):
            prepare(path, f"--chat_template_kwargs={wrong}")
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": "as it stands"}])
    with pytest.raises(UserError, match="--chat_template"):
        prepare(path, f"--chat_template={template}", "--validation_fraction=0")
    options = ModelConfig(chat_template="no/such/file")
    with pytest.raises(UserError, match="--chat_template no/such/file"):
        load_tokenizer(options, resolve_source(options))


def test_spelling_does_not_make_another_problem() -> None:
    assert problem_key("What is  2 + 2?\n") == problem_key("what is 2 + 2?")
    assert problem_key("x² = 4") == problem_key("X2 = 4")
    assert problem_key("What is 2 + 2?") != problem_key("What is 2 + 3?")
    assert problem_key(" A\tb ") == problem_key("a b")


def test_keys_are_fixed_for_good() -> None:
    # A checkpoint's held-out problems must stay held out in the next version.
    assert problem_key("What is 2 + 2?") == 7901968567399691251


def test_the_share_is_about_the_fraction_and_grows_with_it() -> None:
    keys = np.array([problem_key(f"problem {i}") for i in range(20_000)])
    small, large = held_out_mask(keys, 0.01), held_out_mask(keys, 0.1)
    assert 0.008 < small.mean() < 0.012 and 0.09 < large.mean() < 0.11
    assert not (small & ~large).any()
    assert small.tolist() == [is_held_out(key, 0.01) for key in keys.tolist()]
    assert not held_out_mask(keys, 0.0).any()


def test_the_default_share_is_enough_to_evaluate_on() -> None:
    def held_out(num_problems: int, each: int = 1) -> npt.NDArray[np.bool_]:
        keys = np.array([problem_key(f"problem {i}") for i in range(num_problems)] * each)
        mask = held_out_mask(keys, None)
        assert not set(keys[mask]) & set(keys[~mask])
        assert mask.sum() == 0 or keys[mask].max() < keys[~mask].min()
        return mask

    assert held_out(1000).sum() == 100 and held_out(250).sum() == 25 and held_out(5).sum() == 1
    assert held_out(50_000).sum() == 500
    assert 100 <= held_out(700, each=3).sum() < 103
    assert held_out(1).sum() == 0 and held_out(2).sum() == 1
