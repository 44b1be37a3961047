"""prepare_data: the rows that are trained on, held out or unused, several datasets, and streams that resume exactly."""

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

PREPARED_AND_STREAM = pytest.mark.parametrize("streaming", [[], ["--streaming"]], ids=["prepared", "stream"])
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
        arguments = ["--dataset_name", str(name), "--max_seq_length", "128", *options]
        if "--streaming" in options:
            arguments += ["--max_steps", "1000"]
        return prepare_data(parse_config(arguments), **{"tokenizer": tokenizer, **keywords})

    return call


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of `tokenizer` with a chat template."""
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = TEMPLATE
    return with_template


@pytest.fixture
def prepare_chats(prepare: Any, chat: PreTrainedTokenizerBase) -> Any:
    return functools.partial(prepare, tokenizer=chat)


def _row(problem: str, solution: str) -> dict[str, str]:
    return {"problem": problem, "generated_solution": solution}


def _write_repeated_problems(path: Path, num_problems: int = 60, each: int = 5) -> list[dict[str, Any]]:
    """Write and return `each` rows per problem, with different solutions and spellings of the problem."""
    rows = []
    for answer in range(each):
        for i in range(num_problems):
            problem = f"What is {i} + {i}?" if answer % 2 else f"what is  {i} + {i}? "
            rows.append(_row(problem, f"Way {answer}: {i} + {i} = {2 * i}"))
    write_jsonl(path, rows)
    return rows


def _row_ids(steps: Iterable[Iterable[Batch]]) -> list[int]:
    return sorted(row for step in steps for batch in step for row in batch.row_ids)


def test_training_and_held_out_rows_have_no_problem_in_common(prepare: Any, tmp_path: Path) -> None:
    rows = _write_repeated_problems(tmp_path / "train.jsonl")
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


def test_validation_rows_with_training_problems_are_left_out(prepare: Any, tmp_path: Path) -> None:
    rows = _write_repeated_problems(tmp_path / "train.jsonl", num_problems=5)
    others = [_row(f"What is {i} - 1?", f"{i - 1}") for i in range(10)]
    write_jsonl(tmp_path / "validation.jsonl", [*others, _row("WHAT IS 3 + 3?", "6"), _row("?", "")])
    write_jsonl(tmp_path / "test.jsonl", others[:3])
    data = prepare(tmp_path)
    assert data.report.num_eval_rows == 10 and list(data.report.eval_rows_left_out.values()) == [1, 1]
    assert _row_ids([data.eval]) == list(range(10)) and _row_ids(next_steps(data.train)) == list(range(len(rows)))
    few = ["--no_packing", "--batch_size=8", "--eval_batches=3"]
    assert len(_row_ids([prepare(tmp_path, *few, eval_batch_size=2).eval])) == 6, "3 batches of eval_batch_size rows"
    assert prepare(tmp_path, "--validation_split_name", "test").report.num_eval_rows == 3
    assert prepare(tmp_path, "--validation_fraction", "0.2").report.num_rows_held_out > 0
    for split in ("dev", "train"):
        with pytest.raises(UserError, match=f" {split}"):
            prepare(tmp_path, "--validation_split_name", split)
    write_jsonl(tmp_path / "validation.jsonl", rows[:4])
    with pytest.raises(UserError, match="split validation can be evaluated on: 4 of 4 hold a problem that is trained"):
        prepare(tmp_path)


@PREPARED_AND_STREAM
def test_eval_dataset_replaces_held_out_rows(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    """With --eval_dataset_name, no training row is held out, and --columns applies to both datasets."""
    questions = [{"question": f"What is {i}?", "answer": str(i)} for i in range(9)]
    write_jsonl(tmp_path / "a" / "train.jsonl", [{**row, "question": f"{row['question']} Or?"} for row in questions])
    write_jsonl(tmp_path / "b" / "test.jsonl", questions)
    columns = "--columns=problem=question,generated_solution=answer"
    data = prepare(tmp_path / "a", f"--eval_dataset_name={tmp_path / 'b'}", columns, *streaming)
    assert data.report.num_eval_rows == 9 and data.report.num_rows_held_out == 0
    long = write_jsonl(tmp_path / "long.jsonl", [{"question": "x " * 3000, "answer": "y"}] * 3)
    with pytest.raises(UserError, match=r"--eval_dataset_name .*long.jsonl: no row .* can be evaluated on"):
        prepare(tmp_path / "a", f"--eval_dataset_name={long}", columns, *streaming)


def test_columns_that_an_error_suggests_work(prepare: Any, tmp_path: Path) -> None:
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


@PREPARED_AND_STREAM
def test_report_counts_every_row(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    write_jsonl(tmp_path / "train.jsonl", MIXED)
    for overlong, dropped, truncated, used in (("drop", 1, 0, 2), ("truncate", 0, 1, 3)):
        data = prepare(tmp_path, "--validation_fraction", "0", "--overlong", overlong, *streaming)
        next_steps(data.train, 1)
        report = data.report
        # A stream starts again until the batches are full, so its counts are multiples.
        passes = report.num_rows_read // 5
        assert passes == 1 or (passes > 1 and streaming)
        counts = (report.num_rows_used, report.num_overlong_dropped, report.num_overlong_truncated, report.num_empty)
        assert counts == (used * passes, dropped * passes, truncated * passes, 2 * passes)
        assert "WARNING: " in data.description or streaming
    assert "Solution:\n    >>>2<|eos|><<<" in data.description
    write_jsonl(tmp_path / "train.jsonl", MIXED[1:4])
    with pytest.raises(UserError, match=f"--dataset_name {tmp_path}: no row of split train can be trained on"):
        prepare(tmp_path, *streaming)


@PREPARED_AND_STREAM
def test_unusable_dataset_is_refused_with_its_name(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
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


@PREPARED_AND_STREAM
def test_columns_option_maps_other_names(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    """The batches equal those with default column names. With problem=question, a column `problem` is ignored."""
    renamed = [
        {"question": r["problem"], "problem": "no", "answer": r["generated_solution"], "text": "x"} for r in MIXED
    ]
    swapped = [_row(row["generated_solution"], row["problem"]) for row in MIXED]
    expected = next_steps(prepare(write_jsonl(tmp_path / "default.jsonl", MIXED), *streaming).train, 1)
    for rows, columns in (
        (renamed, "problem=question, generated_solution=answer"),
        (swapped, "problem=generated_solution,generated_solution=problem"),
    ):
        data = prepare(write_jsonl(tmp_path / "mapped.jsonl", rows), f"--columns={columns}", *streaming)
        assert_same_steps(expected, next_steps(data.train, 1))
    with pytest.raises(UserError, match="--columns problem=qestion: .* problem, generated_solution"):
        prepare(tmp_path / "default.jsonl", "--columns=problem=qestion", *streaming)


def _write_mix(folder: Path) -> str:
    """Write two datasets: questions "a 0" to "a 29", and conversations "b 0" to "b 89". Return "FILE,FILE"."""
    questions = [{"question": f"a {i}", "answer": f"= {i}"} for i in range(30)]
    turns = ([{"from": "human", "value": f"b {i}"}, {"from": "gpt", "value": f"= {i}"}] for i in range(90))
    chats = [{"id": i, "conversations": conversation} for i, conversation in enumerate(turns)]
    return f"{write_jsonl(folder / 'a.jsonl', questions)},{write_jsonl(folder / 'b.jsonl', chats)}"


MIX_OPTIONS = ("--columns=problem=question,generated_solution=answer", "--validation_fraction=0")


def _problem_counts(steps: list[list[Batch]], tokenizer: PreTrainedTokenizerBase) -> Counter[str]:
    """Count how often each problem of `_write_mix`, such as "a 3", occurs in the batches of `steps`."""
    texts = (tokenizer.decode(batch.input_ids.flatten()) for step in steps for batch in step)
    return Counter(problem for text in texts for problem in re.findall(r"[ab] \d+(?=\n)", text))


def test_several_datasets_are_mixed_whole_or_by_weights(prepare: Any, tmp_path: Path, tokenizer: Any) -> None:
    """With --dataset_weights, rows of one dataset are left out until the numbers of rows have that ratio. --columns
    renames columns only in the first dataset, because the second has none with these names.
    """
    name = _write_mix(tmp_path)
    for weights, num_questions, num_chats in (
        ((), 30, 90),
        (("--dataset_weights=3, 1.0",), 30, 10),
        (("--dataset_weights=1,9",), 10, 90),
    ):
        data = prepare(name, *MIX_OPTIONS, *weights)
        problems = [f"a {i}" for i in range(num_questions)] + [f"b {i}" for i in range(num_chats)]
        assert _problem_counts(next_steps(data.train), tokenizer) == Counter(problems)
        assert f"b.jsonl, split train: {num_chats} of 90 rows" in data.description
    with pytest.raises(UserError, match=r"--dataset_weights has 3 numbers for the 2 datasets of --dataset_name"):
        prepare(name, *MIX_OPTIONS, "--dataset_weights=1,2,3")
    with pytest.raises(UserError, match="--streaming reads the datasets .* add --dataset_weights"):
        prepare(name, *MIX_OPTIONS, "--streaming")


@pytest.mark.slow
@PREPARED_AND_STREAM
def test_mix_resumes_exactly_and_refuses_other_weights(
    prepare: Any, tmp_path: Path, streaming: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STREAM_BUFFER_ROWS", 16)

    def fresh(weights: str) -> PreparedData:
        options = [*MIX_OPTIONS, "--batch_size=2", f"--dataset_weights={weights}", *streaming]
        return prepare(_write_mix(tmp_path), *options)

    for done in (1, 20):  # within the first epoch and after it
        whole, interrupted, resumed = (fresh("0.5,0.5") for _ in range(3))
        expected = next_steps(whole.train, done + 6)
        next_steps(interrupted.train, done)
        resumed.train.load_state_dict(json.loads(json.dumps(interrupted.train.state_dict())))
        assert_same_steps(next_steps(resumed.train, 6), expected[done:])
    with pytest.raises(UserError, match="--resume_from: the checkpoint was made with other training data"):
        fresh("0.4,0.6").train.load_state_dict(fresh("0.5,0.5").train.state_dict())


@pytest.mark.slow
@PACKED_OR_NOT
def test_stream_holds_out_the_same_problems(
    prepare: Any, tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STREAM_BUFFER_ROWS", 64)
    rows = _write_repeated_problems(tmp_path / "train.jsonl")
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
    # Every row was trained on twice. The global batch that ended the second pass may have rows of the third.
    assert set(trained) == set(range(len(rows))) - held_out
    assert set(trained.values()) <= {2, 3} and stream.report.num_rows_read >= 2 * len(rows)


@pytest.mark.slow
@PACKED_OR_NOT
def test_stream_resumes_exactly_and_refuses_other_rows(
    prepare: Any, tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STREAM_BUFFER_ROWS", 64)
    rows = _write_repeated_problems(tmp_path / "train.jsonl")
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
def test_padding_efficiency_is_that_of_the_batches(prepare: Any, tmp_path: Path, packing: str) -> None:
    """A padded batch is as wide as its longest row, rounded up to a multiple of 128 tokens."""
    path = write_jsonl(tmp_path / "rows.jsonl", [_row(f"{i}?", "one two " * (i % 90 + 1)) for i in range(101)])
    options = ("--max_seq_length=512", "--batch_size=4", "--validation_fraction=0", packing)
    data = prepare(path, *options)
    batches = [batch for step in next_steps(data.train, data.train.steps_per_epoch) for batch in step]
    real, positions = (sum(getattr(batch, name) for batch in batches) for name in ("num_real_tokens", "num_tokens"))
    assert data.report.padding_efficiency == real / positions > 0.3


def _ids_and_labels(data: PreparedData) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Read one epoch of padded batches, and return a dict from row id to (token ids, labels)."""
    batches = [batch for step in next_steps(data.train) for batch in step]
    return {row: line for b in batches for row, *line in zip(b.row_ids, b.input_ids, b.labels, strict=False)}


def _text(data: PreparedData, tokenizer: PreTrainedTokenizerBase, row: int) -> str:
    return str(tokenizer.decode(_ids_and_labels(data)[row][0]))


def _supervised(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the supervised text of each row, in the order of the rows."""
    labels = [labels for _, (_, labels) in sorted(_ids_and_labels(data).items())]
    return [str(tokenizer.decode(line[line != IGNORE_INDEX])) for line in labels]


def _chat(number: int, **extra: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"q{number}", "id": number}, {"role": "assistant", "content": f"a{number}"}]
    return {"messages": turns, **extra}


def test_unused_columns_and_files_are_counted(prepare_chats: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The counts are the same with several processes and with a cache. A stream counts a row again in every epoch."""
    monkeypatch.setattr(tokenise, "ROWS_PER_WORKER", 10)
    monkeypatch.setattr(tokenise, "cores_of_job", lambda: 2)
    rows = [_chat(i, source="s", **({"late": 1} if i == 11 else {})) for i in range(12)]
    rows[3]["messages"].append({"role": "user", "content": "Thanks"})
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    for name in (others := ("train.jsonl.filepart", "train-1.jsonl~", "train.csv")):
        write_jsonl(tmp_path / name, rows)
    unused = {"column 'source'": 12, "column 'late'": 1, "entry 'id'": 12, "turn after the last that is supervised": 1}
    for options in ([], [], ["--streaming"]):
        data = prepare_chats(path, "--validation_fraction=0", *options)
        if data.train.steps_per_epoch is None:
            next(iter(data.train))
            times = data.report.num_rows_read // 12
            assert data.report.unused == {what: times * number for what, number in unused.items()}
        else:
            assert data.report.unused == unused
            assert all(f"{what} ({number})" in data.description for what, number in unused.items())
    data = prepare_chats(tmp_path, "--validation_fraction=0")
    assert data.report.num_rows_read == 12 and all(data.report.unused[f"file '{name}'"] == 1 for name in others)


def test_text_and_nulls_are_unchanged(prepare_chats: Any, chat: Any, tmp_path: Path) -> None:
    cells = ['"2024-05-01"', '"02134"', '"None"', "12345678901234567890123", "1.50", "true", '"é\u2028\u00a0"', "NaN"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}: ", "completion": {cell}}}\n' for i, cell in enumerate(cells)))
    data = prepare_chats(path, "--validation_fraction=0")
    assert _supervised(data, chat) == [cell.strip('"') + "<|eos|>" for cell in cells[:-1]]
    assert data.report.num_empty == 1, "NaN counts as an empty answer"
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


def test_csv_cells_may_have_system_prompts_and_json_lists(prepare_chats: Any, chat: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('input,output,system,history\nq,a,Be brief.,"[[""1"",""2""]]"\nr,b,,\n')
    data = prepare_chats(tmp_path / "a.csv", "--validation_fraction=0", "--columns=instruction=input")
    assert "[user] r<|eos|>" in _text(data, chat, 1)
    assert _supervised(data, chat) == ["2<|eos|>a<|eos|>", "b<|eos|>"] and "[system] Be brief." in data.description


def test_rows_with_different_system_prompts_are_different_problems(prepare: Any, tmp_path: Path) -> None:
    same = [{"instruction": "Summarise.", "output": f"s{i}"} for i in range(30)]
    apart = [{**row, "system": f"Document {i}"} for i, row in enumerate(same)]
    assert prepare(write_jsonl(tmp_path / "apart.jsonl", apart)).report.num_rows_held_out == 3
    path = write_jsonl(tmp_path / "same.jsonl", same)
    for streaming in ([], ["--streaming"]):
        data = prepare(path, *streaming)
        assert data.eval is None and "WARNING: nothing to evaluate on" in data.description
        with pytest.raises(UserError, match="--validation_fraction"):
            prepare(path, "--validation_fraction=0.00001", *streaming)


def test_eos_ids_are_the_ends_of_documents_and_of_turns(prepare: Any, chat: Any, tmp_path: Path) -> None:
    """The tokens that end documents and turns are found even if the template refuses the sample of `trained_eos`."""
    other = copy.deepcopy(chat)
    needed = "{% if messages[0].role != 'system' %}{{ raise_exception('a system prompt') }}{% endif %}"
    other.chat_template = needed + TEMPLATE.replace("<|eos|>", "<|pad|>")
    path = write_jsonl(tmp_path / "a.jsonl", [_chat(i, system="s") for i in range(20)])
    for streaming in ([], ["--streaming"]):
        assert prepare(path, *streaming, tokenizer=other).eos_ids == (other.pad_token_id,)
    as_phi3 = "{% if not add_generation_prompt %}<|eos|>{% endif %}"
    other.chat_template = TEMPLATE.replace("<|eos|>", "<|pad|>") + as_phi3
    assert prepare(path, tokenizer=other).eos_ids == (other.pad_token_id, other.eos_token_id)


def test_chat_template_and_its_arguments_are_options(prepare: Any, tmp_path: Path) -> None:
    """--chat_template is text or a file. Template arguments in a row override --chat_template_kwargs."""
    path = write_jsonl(tmp_path / "a.jsonl", [_chat(0), _chat(1, chat_template_kwargs={"brief": False})])
    template = TEMPLATE.replace("{{ m.content }}", "{% if brief %}Briefly: {% endif %}{{ m.content }}")
    (tmp_path / "t.jinja").write_text(template)
    for text_or_file in (template, str(tmp_path / "t.jinja")):
        options = ModelConfig(chat_template=text_or_file)
        tokenizer, _ = load_tokenizer(options, resolve_source(options))
        more = ("--validation_fraction=0", '--chat_template_kwargs={"brief": true}')
        data = prepare(path, *more, tokenizer=tokenizer)
        assert _supervised(data, tokenizer) == ["a0<|eos|>", "a1<|eos|>"] and "Briefly: q0" in data.description
        assert "Briefly" not in _text(data, tokenizer, 1)
        tokenizer.save_pretrained(tmp_path / "saved")
        assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == template
    for invalid in ("[1]", "{brief}"):
        with pytest.raises(UserError, match="--chat_template_kwargs"):
            prepare(path, f"--chat_template_kwargs={invalid}")
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": "as it stands"}])
    with pytest.raises(UserError, match="--chat_template"):
        prepare(path, f"--chat_template={template}", "--validation_fraction=0")
    options = ModelConfig(chat_template="no/such/file")
    with pytest.raises(UserError, match="--chat_template no/such/file"):
        load_tokenizer(options, resolve_source(options))


def test_problem_key_ignores_case_spaces_and_unicode_forms() -> None:
    assert problem_key("What is  2 + 2?\n") == problem_key("what is 2 + 2?")
    assert problem_key("x² = 4") == problem_key("X2 = 4")
    assert problem_key("What is 2 + 2?") != problem_key("What is 2 + 3?")
    assert problem_key(" A\tb ") == problem_key("a b")


def test_problem_key_never_changes() -> None:
    # The next version must hold out the same problems when it resumes a checkpoint.
    assert problem_key("What is 2 + 2?") == 7901968567399691251


def test_held_out_share_is_near_the_fraction_and_grows_with_it() -> None:
    keys = np.array([problem_key(f"problem {i}") for i in range(20_000)])
    small, large = held_out_mask(keys, 0.01), held_out_mask(keys, 0.1)
    assert 0.008 < small.mean() < 0.012 and 0.09 < large.mean() < 0.11
    assert not (small & ~large).any()
    assert small.tolist() == [is_held_out(key, 0.01) for key in keys.tolist()]
    assert not held_out_mask(keys, 0.0).any()


def test_default_share_holds_out_a_tenth_or_less_of_many_problems() -> None:
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


def test_tokenised_rows_are_trained_on_as_they_are(prepare: Any, tmp_path: Path) -> None:
    labels, mask = [-100, -100, 7, 8, -100], [1, 1, 1, 1, 0]
    rows = [{"input_ids": [5 + i, 6, 7, 8, 0], "labels": labels, "attention_mask": mask} for i in range(4)]
    options = ("--validation_fraction=0", "--no_packing", "--batch_size=4", "--max_seq_length=128")
    data = prepare(write_jsonl(tmp_path / "a.jsonl", rows), *options)
    (batch,) = next_steps(data.train)[0]
    for row, ids, shifted in zip(batch.row_ids, batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        assert ids[:4] == [5 + row, 6, 7, 8] and shifted[:5] == [-100, 7, 8, -100, -100]
    assert data.report.num_tokens == 16 and 8 not in data.eos_ids
    unknown = {"input_ids": [5, 6, 7, 99_999, 0], "labels": [-100] * 5}
    for wrong, message in (({"labels": [1] * 5}, "'labels'"), ({"labels": [5]}, "'labels'"), (unknown, "99999")):
        with pytest.raises(UserError, match=f"--dataset_name .*a.jsonl: .*{message}"):
            prepare(write_jsonl(tmp_path / "a.jsonl", [{**rows[0], **wrong}]), *options)
