"""`prepare_data` from a configuration to batches: splits, leaks, counts, and the same through a stream."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_fp8.config.parser import parse_config
from llm_fp8.data import PreparedData, prepare_data
from llm_fp8.data.collate import Batch
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.sequences import StreamSequences
from llm_fp8.data.split import is_held_out, normalise_problem, problem_key
from llm_fp8.utils.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def prepare(tokenizer: PreTrainedTokenizerBase, cache: Path) -> Any:
    def call(name: Path | str, *options: str, **keywords: Any) -> PreparedData:
        words = ["--dataset_name", str(name), "--max_seq_length", "128", *options]
        if "--streaming" in options:
            words += ["--max_steps", "1000"]
        return prepare_data(parse_config(words), tokenizer, **keywords)

    return call


def _row(problem: str, solution: str) -> dict[str, str]:
    return {"problem": problem, "generated_solution": solution}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _repeated_problems(path: Path, num_problems: int = 60, each: int = 5) -> list[dict[str, Any]]:
    """Each problem several times with other solutions and other spelling, as in OpenMathInstruct-2."""
    rows = []
    for answer in range(each):
        for i in range(num_problems):
            problem = f"What is {i} + {i}?" if answer % 2 else f"what is  {i} + {i}? "
            rows.append(_row(problem, f"Way {answer}: {i} + {i} = {2 * i}"))
    _write(path, rows)
    return rows


def _epoch(data: PreparedData) -> list[Batch]:
    assert data.train.steps_per_epoch is not None
    return [batch for step in islice(iter(data.train), data.train.steps_per_epoch) for batch in step]


def _row_ids(batches: Any) -> list[int]:
    return sorted(row for batch in batches for row in batch.row_ids)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
def test_embedded(prepare: Any, packing: str) -> None:
    data = prepare("embedded", packing, "--num_of_samples", "500")
    assert data.report.num_rows_read == 500
    assert data.report.num_eval_rows_seen_in_training == 0
    assert len(_row_ids(data.eval)) == data.report.num_eval_rows > 200
    batches = _epoch(data)
    assert len(_row_ids(batches)) == data.report.num_rows_used == len(set(_row_ids(batches)))
    assert sum(batch.num_real_tokens for batch in batches) == data.report.num_tokens
    assert sum(batch.num_supervised_tokens for batch in batches) == data.report.num_supervised_tokens
    assert sum(int((batch.labels != -100).sum()) for batch in batches) == data.report.num_supervised_tokens
    assert data.report.padding_efficiency == data.report.num_tokens / (data.report.num_rows_of_batches * 128)
    assert (packing == "--packing") == all(batch.cu_seqlens is not None for batch in batches)
    json.dumps(data.report.to_dict())


@pytest.mark.slow
def test_packing_wastes_less(prepare: Any) -> None:
    packed, padded = (prepare("embedded", flag, "--max_seq_length", "1024") for flag in ("--packing", "--no_packing"))
    assert packed.report.num_tokens == padded.report.num_tokens
    assert packed.report.padding_efficiency > 0.97 and padded.report.padding_efficiency < 0.2


@pytest.mark.slow
def test_no_problem_is_trained_on_and_evaluated_on(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    data = prepare(tmp_path, "--validation_fraction", "0.2", "--packing")
    trained, held_out = _row_ids(_epoch(data)), _row_ids(data.eval)
    assert sorted(trained + held_out) == list(range(len(rows)))
    problems = [{normalise_problem(rows[i]["problem"]) for i in part} for part in (trained, held_out)]
    assert problems[0].isdisjoint(problems[1]) and len(problems[1]) > 3
    assert data.report.num_rows_held_out == len(held_out) == 5 * len(problems[1])


def test_the_held_out_problems_depend_on_neither_order_nor_seed(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "a" / "train.jsonl")
    _write(tmp_path / "b" / "train.jsonl", rows[::-1])
    first = prepare(tmp_path / "a", "--validation_fraction", "0.2")
    second = prepare(tmp_path / "b", "--validation_fraction", "0.2", "--seed", "7")
    backwards = [len(rows) - 1 - i for i in _row_ids(second.eval)]
    assert sorted(backwards) == _row_ids(first.eval)


def test_nothing_held_out(prepare: Any, tmp_path: Path) -> None:
    _repeated_problems(tmp_path / "train.jsonl")
    data = prepare(tmp_path, "--validation_fraction", "0")
    assert data.eval is None and data.report.num_eval_rows == 0


@pytest.mark.parametrize("fraction", [0.2, 0])
def test_a_share_that_is_asked_for_replaces_the_validation_split(prepare: Any, tmp_path: Path, fraction: float) -> None:
    _repeated_problems(tmp_path / "train.jsonl")
    _write(tmp_path / "validation.jsonl", [_row("What is 7 - 1?", "6")])
    data = prepare(tmp_path, "--validation_fraction", str(fraction))
    assert data.report.num_eval_rows == data.report.num_rows_held_out
    assert (data.report.num_eval_rows > 5) == (fraction > 0)
    with pytest.raises(UserError, match="has no effect with --validation_split_name validation; drop one"):
        prepare(tmp_path, "--validation_fraction", str(fraction), "--validation_split_name", "validation")


def test_rows_held_out_of_a_stream_are_found_without_streaming(tmp_path: Path) -> None:
    """By default a stream holds out fewer problems than prepared data of that size."""
    _repeated_problems(tmp_path / "train.jsonl", num_problems=400, each=1)
    options = ["--dataset_name", str(tmp_path), "--max_seq_length", "128", "--batch_size", "1"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    streamed = prepare_data(parse_config([*options, "--streaming", "--max_steps", "1"]), tokenizer)
    found = prepare_data(parse_config(options), tokenizer, of_a_stream=True)
    assert 0 < found.report.num_eval_rows < prepare_data(parse_config(options), tokenizer).report.num_eval_rows == 40
    contents = [[batch.input_ids.tolist() for batch in data.eval] for data in (streamed, found)]
    assert sorted(contents[0]) == sorted(contents[1])


@pytest.mark.slow
def test_a_validation_split_without_the_problems_trained_on(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl", num_problems=5)
    others = [_row(f"What is {i} - 1?", f"{i - 1}") for i in range(10)]
    _write(tmp_path / "validation.jsonl", [*others, _row("WHAT IS 3 + 3?", "6")])
    _write(tmp_path / "test.jsonl", others[:3])
    data = prepare(tmp_path)
    assert data.report.num_eval_rows == 10 and data.report.num_eval_rows_seen_in_training == 1
    assert "1 left out because their problem is trained on" in data.describe()
    assert _row_ids(data.eval) == list(range(10)) and _row_ids(_epoch(data)) == list(range(len(rows)))
    assert prepare(tmp_path, "--validation_split_name", "test").report.num_eval_rows == 3
    assert prepare(tmp_path, "--split_name", "test").report.num_rows_used == 3
    with pytest.raises(UserError, match="--validation_split_name dev: .* it has: "):
        prepare(tmp_path, "--validation_split_name", "dev")
    with pytest.raises(UserError, match="--validation_split_name train is the split that is trained on"):
        prepare(tmp_path, "--validation_split_name", "train")


def test_a_validation_split_that_is_all_trained_on(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl", num_problems=5)
    _write(tmp_path / "validation.jsonl", rows[:4])
    with pytest.raises(
        UserError, match="none of its 4 rows can be evaluated on: 4 hold a problem that split train trains on"
    ):
        prepare(tmp_path)


MIXED = [
    _row("What is 1 + 1?", "2"),
    _row("What is 1 + 2?", ""),
    _row("What is 1 + 3?", "1 2 3 4 5 6 7 8 9 " * 30),
    _row("", "5"),
    _row("What is 1 + 5?", "6"),
]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_every_row_is_counted(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    _write(tmp_path / "train.jsonl", MIXED)
    for overlong, dropped, truncated, used in (("drop", 1, 0, 2), ("truncate", 0, 1, 3)):
        data = prepare(tmp_path, "--validation_fraction", "0", "--overlong", overlong, *streaming)
        first = next(iter(data.train))
        report = data.report
        # A stream is read on and on to fill the batches, so its counts are a multiple.
        times = report.num_rows_read // 5
        assert times == 1 or (times > 1 and streaming)
        counts = (
            report.num_rows_read,
            report.num_rows_used,
            report.num_overlong_dropped,
            report.num_overlong_truncated,
        )
        assert counts == (5 * times, used * times, dropped * times, truncated * times) and report.num_empty == 2 * times
        assert first[0].num_real_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_nothing_left(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    _write(tmp_path / "train.jsonl", MIXED[1:4])
    counted = (
        "all that were read"
        if streaming
        else "3 rows read, 0 used, 0 held out, 1 dropped .*, 2 empty; empty rows have nothing"
    )
    with pytest.raises(UserError, match=f"can be trained on: {counted}"):
        next(iter(prepare(tmp_path, *streaming).train))


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_columns_that_are_not_understood(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    _write(tmp_path / "train.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(UserError, match=f"^--dataset_name {tmp_path} has the columns question, answer; understood are"):
        prepare(tmp_path, *streaming)


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_conversations_that_are_no_lists(prepare: Any, tmp_path: Path, column: str, streaming: list[str]) -> None:
    good = _write(tmp_path / "good.jsonl", MIXED)
    for value in (5, "user: hello", {"role": "user"}):
        _write(tmp_path / "bad" / "train.jsonl", [{column: value}] * 5)
        said = f"{tmp_path / 'bad'}: '{column}' must be a list of messages .*; a row has {re.escape(repr(value))}"
        with pytest.raises(UserError, match=f"^--dataset_name {said}"):
            prepare(tmp_path / "bad", *streaming)
        with pytest.raises(UserError, match=f"^--eval_dataset_name {said}"):
            prepare(good, f"--eval_dataset_name={tmp_path / 'bad'}", *streaming)


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_a_message_without_content_is_an_empty_one(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    turns = [[{"role": "user"}, {"role": "assistant", "content": f"= {i}"}] for i in range(20)]
    path = _write(tmp_path / "train.jsonl", [{"messages": each} for each in turns])
    assert ">>>= " in prepare(path, *streaming).sample


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [[], ["--streaming", "--max_steps=1"]])
def test_columns_under_other_names(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    """The same batches as those of a dataset with our names; a column that stands in the way is not looked at."""
    renamed = [
        {"question": r["problem"], "problem": "no", "answer": r["generated_solution"], "text": "x"} for r in MIXED
    ]
    _write(tmp_path / "ours" / "train.jsonl", MIXED)
    Dataset.from_list(renamed).to_parquet(tmp_path / "theirs" / "train.parquet")
    columns = "--columns=problem=question, generated_solution=answer"
    ours, theirs = prepare(tmp_path / "ours", *streaming), prepare(tmp_path / "theirs", columns, *streaming)
    assert _same(_take(ours, 1), _take(theirs, 1))
    assert ours.sample == theirs.sample
    with pytest.raises(
        UserError,
        match=r"--columns problem=qestion: .*theirs has no column 'qestion'; it has: question, problem, answer, text",
    ):
        prepare(tmp_path / "theirs", "--columns=problem=qestion", *streaming)


@pytest.mark.slow
def test_columns_that_change_places(prepare: Any, tmp_path: Path) -> None:
    _write(tmp_path / "a" / "train.jsonl", MIXED)
    swapped = [{"problem": row["generated_solution"], "generated_solution": row["problem"]} for row in MIXED]
    _write(tmp_path / "b" / "train.jsonl", swapped)
    columns = "--columns=problem=generated_solution,generated_solution=problem"
    assert _same(_take(prepare(tmp_path / "a"), 1), _take(prepare(tmp_path / "b", columns), 1))


@pytest.mark.parametrize("streaming", [[], ["--streaming", "--max_steps=1"]])
def test_alpaca_and_sharegpt_files(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    files = {
        "alpaca": [{"instruction": "Add.", "input": f"{i} and 1", "output": f"= {i + 1}"} for i in range(20)],
        "sharegpt": [
            {"id": i, "conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": f"= {i + 1}"}]}
            for i in range(20)
        ],
    }
    for name, rows in files.items():
        data = prepare(_write(tmp_path / f"{name}.jsonl", rows), *streaming)
        assert re.search(r">>>=\s*\d+", data.sample), data.sample
        assert data.report.num_empty == 0


def _mix(folder: Path, num_ours: int = 30, num_chats: int = 90) -> str:
    """Names of two datasets of different columns: problems "a 0", "a 1", ... and conversations "b 0", ..."""
    ours = [_row(f"a {i}", f"= {i}") for i in range(num_ours)]
    chats = [
        {"id": i, "conversations": [{"from": "human", "value": f"b {i}"}, {"from": "gpt", "value": f"= {i}"}]}
        for i in range(num_chats)
    ]
    return f"{_write(folder / 'a.jsonl', ours)},{_write(folder / 'b.jsonl', chats)}"


def _counted(data: PreparedData, tokenizer: PreTrainedTokenizerBase, steps: list[list[Batch]]) -> Counter[str]:
    """How many documents of each problem ("a 3") the batches hold."""
    texts = (tokenizer.decode(batch.input_ids.flatten()) for step in steps for batch in step)
    return Counter(found for text in texts for found in re.findall(r"[ab] \d+(?=\n)", text))


@pytest.mark.slow
def test_several_datasets_are_trained_on_whole(prepare: Any, tmp_path: Path, tokenizer: Any) -> None:
    data = prepare(_mix(tmp_path), "--validation_fraction=0")
    assert _counted(data, tokenizer, [[batch] for batch in _epoch(data)]) == Counter(
        [f"a {i}" for i in range(30)] + [f"b {i}" for i in range(90)]
    )
    assert "a.jsonl, split train: 30 of 30 rows\n" in data.describe()


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [[], ["--streaming", "--dataset_weights=1,1", "--max_steps=1"]])
def test_columns_of_one_dataset_leave_one_of_another_form_alone(
    prepare: Any, tmp_path: Path, tokenizer: Any, streaming: list[str]
) -> None:
    """A dataset with other names beside conversations."""
    _, chats = _mix(tmp_path).split(",")
    theirs = _write(tmp_path / "q.jsonl", [{"question": f"a {i}", "answer": f"= {i}"} for i in range(30)])
    name, columns = f"{theirs},{chats}", "--columns=problem=question,generated_solution=answer"
    data = prepare(name, columns, "--validation_fraction=0", *streaming)
    found = _counted(data, tokenizer, [[batch] for batch in _epoch(data)] if not streaming else _take(data, 4))
    assert {problem[0] for problem in found} == {"a", "b"}
    with pytest.raises(UserError, match=r"--columns problem=qestion: .*q\.jsonl has no column 'qestion'"):
        prepare(name, "--columns=problem=qestion,generated_solution=answer", *streaming)
    with pytest.raises(UserError, match=r"--columns problem=qestion: none of the datasets .* has a column 'qestion'"):
        prepare(f"{chats},{shutil.copy(chats, tmp_path / 'more.jsonl')}", "--columns=problem=qestion", *streaming)


@pytest.mark.slow
def test_weights_are_shares_of_the_rows(prepare: Any, tmp_path: Path, tokenizer: Any) -> None:
    name = _mix(tmp_path)
    for weights, num_ours, num_chats in (("0.75,0.25", 30, 10), ("1,9", 10, 90), ("3, 1.0", 30, 10)):
        data = prepare(name, f"--dataset_weights={weights}", "--validation_fraction=0")
        assert _counted(data, tokenizer, [[batch] for batch in _epoch(data)]) == Counter(
            [f"a {i}" for i in range(num_ours)] + [f"b {i}" for i in range(num_chats)]
        )
        assert f"b.jsonl, split train: {num_chats} of 90 rows" in data.describe()
    for names, weights in ((name, "1,2,3"), (str(tmp_path / "a.jsonl"), "1")):
        with pytest.raises(UserError, match=r"--dataset_weights has \d numbers for the \d datasets of --dataset_name"):
            prepare(names, f"--dataset_weights={weights}")


@pytest.mark.slow
def test_a_mix_in_a_stream_is_drawn_by_weight(prepare: Any, tmp_path: Path, tokenizer: Any) -> None:
    name = _mix(tmp_path, 2000, 2000)
    options = ["--streaming", "--validation_fraction=0", "--batch_size=32"]
    data = prepare(name, "--dataset_weights=0.8,0.2", *options)
    counted = _counted(data, tokenizer, _take(data, 25))
    share = sum(count for found, count in counted.items() if found[0] == "a") / counted.total()
    assert counted.total() == 800 and abs(share - 0.8) < 0.06
    assert max(counted.values()) == 1, "no row twice"
    with pytest.raises(UserError, match="--streaming reads the datasets .* add --dataset_weights"):
        prepare(name, *options)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_a_mix_resumes_exactly_and_only_as_itself(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    name, options = _mix(tmp_path), ["--batch_size=2", *streaming]

    def fresh(*more: str) -> PreparedData:
        return _small_buffer(prepare(name, *options, *more), 16) if streaming else prepare(name, *options, *more)

    for done in (1, 3, 7, 20):  # beyond an epoch
        whole, begun, resumed = (fresh("--dataset_weights=0.5,0.5") for _ in range(3))
        wanted = _take(whole, done + 6)
        _take(begun, done)
        resumed.train.load_state_dict(json.loads(json.dumps(begun.train.state_dict())))
        assert _same(_take(resumed, 6), wanted[done:])
    state = fresh("--dataset_weights=0.5,0.5").train.state_dict()
    with pytest.raises(UserError, match="--resume_from: the checkpoint was made with other training data"):
        fresh("--dataset_weights=0.4,0.6").train.load_state_dict(state)
    if not streaming:  # what a stream holds is known only once it is read
        _mix(tmp_path, num_ours=31)
        with pytest.raises(UserError, match="--resume_from: the checkpoint was made with other training data"):
            fresh("--dataset_weights=0.5,0.5").train.load_state_dict(state)


@pytest.mark.slow
def test_a_mix_in_a_stream_that_changed_is_not_continued(prepare: Any, tmp_path: Path) -> None:
    options = ("--dataset_weights=1,1", "--streaming", "--batch_size=2")
    begun = prepare(_mix(tmp_path), *options)
    _take(begun, 2)
    name = _mix(tmp_path)
    file = tmp_path / "b.jsonl"
    file.write_text(file.read_text().replace('"= 3"', '"= 4"'))
    resumed = prepare(name, *options)
    resumed.train.load_state_dict(begun.train.state_dict())
    with pytest.raises(UserError, match="of the stream are not those that the checkpoint's run read"):
        _take(resumed, 1)


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_a_dataset_to_evaluate_on(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    """Nothing is held out of what is trained on, and columns with other names count for both."""
    _repeated_problems(tmp_path / "a" / "train.jsonl")
    questions = [{"question": f"What is {i}?", "answer": str(i)} for i in range(9)]
    _write(tmp_path / "b" / "test.jsonl", questions)
    columns = "--columns=problem=question,generated_solution=answer"
    data = prepare(tmp_path / "a", f"--eval_dataset_name={tmp_path / 'b'}", columns, *streaming)
    assert data.report.num_eval_rows == 9 and data.report.num_rows_held_out == 0
    assert (
        f"evaluated on {'the first 9 rows of ' if streaming else ''}split test of {tmp_path / 'b'}" in data.describe()
    )
    if not streaming:
        assert data.report.num_rows_used == 300
        _repeated_problems(copied := tmp_path / "c.jsonl")
        with pytest.raises(
            UserError, match=r"--eval_dataset_name .*c.jsonl: none of its 300 rows .* evaluated on: 300"
        ):
            prepare(tmp_path / "a", f"--eval_dataset_name={copied}")
    for same in (tmp_path / "a", tmp_path / "b" / ".." / "a"):
        with pytest.raises(UserError, match=f"--eval_dataset_name {same} has files that --dataset_name .* trains on"):
            prepare(tmp_path / "a", f"--eval_dataset_name={same}", *streaming)
    with pytest.raises(UserError, match="--eval_dataset_name nothing.jsonl: no such file"):
        prepare(tmp_path / "a", "--eval_dataset_name=nothing.jsonl", *streaming)


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_nothing_to_evaluate_on(prepare: Any, tmp_path: Path, streaming: list[str]) -> None:
    name = _write(tmp_path / "a.jsonl", MIXED)
    long = _write(tmp_path / "long.jsonl", [_row("x " * 3000, "y")] * 3)
    with pytest.raises(
        UserError, match=r"--eval_dataset_name .*long.jsonl: none of its .*3|200000 rows can be evaluated"
    ):
        prepare(name, f"--eval_dataset_name={long}", *streaming)


@pytest.mark.parametrize("options", [[], ["--dataset_weights=1,1"], ["--dataset_weights=1,1", "--streaming"]])
def test_no_row_comes_twice_in_a_mix(prepare: Any, tmp_path: Path, options: list[str]) -> None:
    one, other = _write(tmp_path / "a.jsonl", MIXED), _write(tmp_path / "b.jsonl", MIXED)
    for names in (f"{one},{tmp_path}/../{tmp_path.name}/a.jsonl", f"{tmp_path}/*.jsonl,{other}"):
        with pytest.raises(UserError, match=r"--dataset_name .*: .*\.jsonl has files that are named twice"):
            prepare(names, *options)


def test_a_stream_without_rows_in_a_mix_is_named(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("problem,generated_solution\n")
    name = _write(tmp_path / "a.jsonl", MIXED)
    with pytest.raises(UserError, match=r"^--dataset_name .*b\.csv: split 'train' holds no row"):
        prepare(f"{name},{tmp_path / 'b.csv'}", "--dataset_weights=1,1", "--streaming")


def test_an_empty_name_is_not_the_current_folder(prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _write(tmp_path / "a.jsonl", MIXED)
    monkeypatch.chdir(tmp_path)
    for options in (["--dataset_name=a.jsonl,"], ["--eval_dataset_name="]):
        with pytest.raises(UserError, match=f"{options[0].partition('=')[0]} has an empty name"):
            prepare(name, *options)


@pytest.mark.slow
def test_a_broken_line_in_a_mix(prepare: Any, tmp_path: Path) -> None:
    name = _mix(tmp_path)
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write('{"conversations": \n')
    for streaming in ([], ["--streaming"]):
        with pytest.raises(UserError, match=r"b\.jsonl, line 91: not valid JSON"):
            _take(prepare(name, "--dataset_weights=1,9", *streaming), 30)


@pytest.mark.slow
def test_bytes_that_are_no_text_in_a_mix_of_streams(prepare: Any, tmp_path: Path) -> None:
    name = _mix(tmp_path, num_ours=3)
    broken = (tmp_path / "a.jsonl").read_bytes().replace(b"a 2", b"a \xba")
    (tmp_path / "a.jsonl").write_bytes(broken)
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: not valid JSON \(not UTF-8"):
        _take(prepare(name, "--dataset_weights=1,1", "--streaming"), 1)


@pytest.mark.slow
def test_a_mix_of_streams_with_hardly_any_row_of_one(prepare: Any, tmp_path: Path) -> None:
    data = prepare(_mix(tmp_path), "--dataset_weights=0.0001,1", "--streaming", "--validation_fraction=0")
    assert _take(data, 3) and data.report.num_rows_used == 90


def test_bytes_that_are_no_text(prepare: Any, tmp_path: Path) -> None:
    file = _write(tmp_path / "train.jsonl", MIXED[:1])
    file.write_bytes(file.read_bytes() + b'{"problem": "\xff\xfe", "generated_solution": "x"}\n')
    with pytest.raises(UserError, match=r"train\.jsonl, line 2: not valid JSON \(not UTF-8"):
        prepare(tmp_path)


def test_a_folder_from_save_to_disk_stays_as_it_is(prepare: Any, tmp_path: Path) -> None:
    Dataset.from_list(MIXED).save_to_disk(tmp_path / "saved")
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert prepare(tmp_path / "saved").report.num_rows_read == 5
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before
    assert len(load_from_disk(tmp_path / "saved")) == 5


@pytest.mark.slow
def test_ranks_share_the_work_and_the_preparation(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    entered = []

    @contextmanager
    def main_first() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    options = ("--validation_fraction", "0.2", "--batch_size", "4", "--gradient_accumulation_steps", "2")
    ranks = [prepare(tmp_path, *options, rank=rank, world_size=2, main_process_first=main_first) for rank in range(2)]
    assert entered == ["in", "out"] * 2
    trained = _row_ids(batch for data in ranks for batch in _epoch(data))
    evaluated = _row_ids(batch for data in ranks for batch in data.eval)
    assert sorted(trained + evaluated) == list(range(len(rows)))
    assert len({len(_epoch(data)) for data in ranks}) == 1 and len({len(list(data.eval)) for data in ranks}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_csv_files_of_other_columns_in_a_stream(prepare: Any, tmp_path: Path, mixed: bool) -> None:
    (tmp_path / "a-0.csv").write_text("problem,generated_solution\np,s\n")
    (tmp_path / "a-1.csv").write_text("problem,answer\nq,s\n")
    name, options = str(tmp_path / "a-*.csv"), ["--streaming", "--packing", "--validation_fraction", "0"]
    if mixed:
        name, options = f"{name},embedded", [*options, "--dataset_weights", "0.5,0.5"]
    with pytest.raises(UserError, match=r"a-\*\.csv: rows behind the first have no column 'generated_solution'; give"):
        _take(prepare(name, *options), 2)


def test_the_description(prepare: Any, tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", MIXED)
    lines = prepare(tmp_path, "--packing", "--validation_fraction", "0").describe()
    assert f"data: {tmp_path}, split train, evaluated on nothing, packed sequences of 128 tokens" in lines
    assert r"prompt form: 'Problem:\n{problem}\n\nSolution:\n'" in lines
    assert "5 rows read, 2 used, 0 held out, 1 dropped as longer than 128 tokens, 0 truncated to that, 2 empty" in lines
    assert "Solution:\n    >>>2<|eos|><<<" in lines


@pytest.mark.parametrize(("num_empty", "warned"), [(5, False), (6, True)])
def test_many_dropped_rows_are_warned_of(prepare: Any, tmp_path: Path, num_empty: int, warned: bool) -> None:
    rows = [_row(f"{i} + 0?", "" if 3 <= i < 3 + num_empty else str(i)) for i in range(100)]
    lines = prepare(_write(tmp_path / "train.jsonl", rows), "--validation_fraction", "0").describe()
    sentence = (
        "WARNING: 6.0% of the rows are not trained on: 6 have nothing to learn: no text, no answer, or no turn of the "
        "role 'assistant' (the first is row 3)\n"
    )
    assert (sentence in lines) == warned and ("WARNING" in lines) == warned
    rows[50] = _row("50", "0" * 500)
    lines = prepare(_write(tmp_path / "train.jsonl", rows), "--validation_fraction", "0").describe()
    assert "1 are longer than 128 tokens (the first is row 50; --max_seq_length or --overlong truncate keeps" in lines


@pytest.mark.slow
def test_data_is_known_by_its_content(prepare: Any, tmp_path: Path) -> None:
    """Not by the file's name or time: a copy continues a run, another answer does not."""
    rows = _repeated_problems(tmp_path / "one" / "train.jsonl")
    shutil.copy(tmp_path / "one" / "train.jsonl", _folder(tmp_path / "two") / "train.jsonl")
    rows[7]["generated_solution"] = "Way 0: 7 + 7 = 15"
    _write(tmp_path / "three" / "train.jsonl", rows)
    first, copied, other = (prepare(tmp_path / name) for name in ("one", "two", "three"))
    _take(first, 2)
    copied.train.load_state_dict(first.train.state_dict())
    with pytest.raises(UserError, match="made with other training data"):
        other.train.load_state_dict(first.train.state_dict())


@pytest.mark.slow
def test_a_stream_that_changed_is_not_continued(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    options = ("--validation_fraction", "0.1", "--batch_size", "4", "--streaming")
    first = _small_buffer(prepare(tmp_path, *options))
    _take(first, 3)
    state = json.loads(json.dumps(first.train.state_dict()))
    same = _small_buffer(prepare(tmp_path, *options))
    same.train.load_state_dict(state)
    _take(same, 1)
    rows[20]["generated_solution"] = "another answer"
    _write(tmp_path / "train.jsonl", rows)
    other = _small_buffer(prepare(tmp_path, *options))
    other.train.load_state_dict(state)
    with pytest.raises(UserError, match="--resume_from: rows 0 to 64 of the stream are not those"):
        _take(other, 1)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.slow
def test_eval_batches(prepare: Any) -> None:
    data = prepare("embedded", "--eval_batches", "3", "--batch_size", "5")
    assert len(list(data.eval)) == 3 and len(_row_ids(data.eval)) == 15


# ---- streaming ----


def _take(data: PreparedData, steps: int) -> list[list[Batch]]:
    iterator = iter(data.train)
    taken = list(islice(iterator, steps))
    iterator.close()  # type: ignore[attr-defined]
    return taken


def _small_buffer(data: PreparedData, buffer_rows: int = 64) -> PreparedData:
    rows = data.train._sequences
    assert isinstance(rows, StreamSequences)
    rows.buffer_rows = buffer_rows
    return data


def _same(first: list[list[Batch]], second: list[list[Batch]]) -> bool:
    pairs = list(zip((b for step in first for b in step), (b for step in second for b in step), strict=True))
    return all(a.row_ids == b.row_ids and torch.equal(a.labels, b.labels) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
def test_a_stream_holds_out_the_same_problems(prepare: Any, tmp_path: Path, packing: str) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    options = (packing, "--validation_fraction", "0.2", "--batch_size", "4")
    whole, stream = prepare(tmp_path, *options), _small_buffer(prepare(tmp_path, *options, "--streaming"))
    assert stream.train.steps_per_epoch is None
    assert _row_ids(stream.eval) == _row_ids(whole.eval)
    held_out = {i for i, row in enumerate(rows) if is_held_out(problem_key(row["problem"]), 0.2)}
    assert set(_row_ids(stream.eval)) == held_out

    trained: Counter[int] = Counter()
    for step in stream.train:
        trained.update(row for batch in step for row in batch.row_ids)
        if stream.train.epoch >= 2:
            break
    # Of two passes at least, and no more than the global batch that went over into the third.
    assert set(trained) == set(range(len(rows))) - held_out
    assert set(trained.values()) <= {2, 3} and stream.report.num_rows_read >= 2 * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
@pytest.mark.parametrize("done", [0, 1, 7, 12, 19])
def test_a_stream_resumes_where_it_was(prepare: Any, tmp_path: Path, packing: str, done: int) -> None:
    _repeated_problems(tmp_path / "train.jsonl")
    options = (packing, "--validation_fraction", "0.1", "--batch_size", "4", "--streaming", "--num_of_samples", "250")
    whole = _take(_small_buffer(prepare(tmp_path, *options)), 40)
    first = _small_buffer(prepare(tmp_path, *options))
    _take(first, done)
    state = json.loads(json.dumps(first.train.state_dict()))
    second = _small_buffer(prepare(tmp_path, *options))
    second.train.load_state_dict(state)
    assert _same(_take(second, 40 - done), whole[done:])


@pytest.mark.slow
def test_a_stream_hands_poorly_filled_sequences_on(prepare: Any, tmp_path: Path) -> None:
    _repeated_problems(tmp_path / "train.jsonl", num_problems=200)
    data = _small_buffer(
        prepare(tmp_path, "--packing", "--validation_fraction", "0", "--streaming", "--batch_size", "2"), 37
    )
    carried = []
    batches = []
    for step in data.train:
        if data.train.epoch >= 1:
            break
        batches += step
        carried.append(len(data.train.state_dict()["rows"]["carried"]))
    assert max(carried) > 0
    counts = Counter(row for batch in batches for row in batch.row_ids)
    assert set(counts.values()) == {1}
    filled = sum(batch.num_real_tokens for batch in batches) / sum(batch.num_tokens for batch in batches)
    best = prepare(tmp_path, "--packing", "--validation_fraction", "0").report.padding_efficiency
    assert filled > 0.97 * best


@pytest.mark.slow
def test_a_stream_is_cut_into_ranks_as_prepared_data_is(prepare: Any, tmp_path: Path) -> None:
    _repeated_problems(tmp_path / "train.jsonl")
    options = ("--packing", "--streaming", "--gradient_accumulation_steps", "2", "--batch_size", "2")
    one = _take(prepare(tmp_path, *options[:-4], "--gradient_accumulation_steps", "4", "--batch_size", "2"), 6)
    ranks = [_take(prepare(tmp_path, *options, rank=rank, world_size=2), 6) for rank in range(2)]
    for i in range(6):
        assert [batch.row_ids for batch in one[i]][0::2] == [batch.row_ids for batch in ranks[0][i]]
        assert [batch.row_ids for batch in one[i]][1::2] == [batch.row_ids for batch in ranks[1][i]]


@pytest.mark.slow
def test_looking_at_the_first_batch_counts_nothing_twice(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    data = _small_buffer(prepare(tmp_path, "--streaming", "--validation_fraction", "0"), len(rows) + 1)
    start = data.train.state_dict()
    assert len(_take(data, 1)) == 1
    read = data.report.num_rows_read
    data.train.load_state_dict(start)
    _take(data, 1)
    assert data.report.num_rows_read == read == len(rows)


@pytest.mark.slow
def test_a_stream_takes_its_validation_split(prepare: Any) -> None:
    data = prepare("embedded", "--streaming", "--max_seq_length", "1024")
    assert data.report.num_eval_rows == 300 == len(_row_ids(data.eval))
    assert ">>>" in data.describe()


@pytest.mark.slow
def test_a_broken_line_in_a_stream(prepare: Any, tmp_path: Path) -> None:
    rows = _repeated_problems(tmp_path / "train.jsonl")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"problem": "What')
    with pytest.raises(UserError, match=rf"train\.jsonl, line {len(rows) + 1}: not valid JSON"):
        list(islice(iter(prepare(tmp_path, "--streaming").train), 1000))
