"""The tokenised dataset: the outcome of each row, the cache, and tokenising in several processes."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_fp8.data import tokenise as module
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.tokenise import Outcome, RowOptions, cache_key, document_reader, tokenise
from tests.support.small import write_jsonl

COLUMNS = {"problem": "problem", "generated_solution": "generated_solution"}
OPTIONS = RowOptions("problem_solution", COLUMNS, ["other"], max_seq_length=64)
ROWS = [
    {"problem": "What is 7 * 8?", "generated_solution": "The answer is \\boxed{56}.", "other": 1},
    {"problem": "What is 7 * 9?", "generated_solution": "1 2 3 4 5 6 7 8 9 " * 20, "other": 2},
    {"problem": "What is 7 * 7?", "generated_solution": "", "other": 3},
    {"problem": "1 2 3 4 5 6 7 8 9 " * 20, "generated_solution": "49", "other": 4},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    return tmp_path / "llm_fp8"


def _outcomes(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> list[Outcome]:
    return list(
        map(Outcome, tokenise(Dataset.from_list(ROWS), tokenizer, dataclasses.replace(OPTIONS, **changes))["outcome"])
    )


def test_outcome_says_whether_a_row_is_used_overlong_truncated_or_empty(tokenizer: PreTrainedTokenizerBase) -> None:
    assert _outcomes(tokenizer) == [Outcome.USED, Outcome.OVERLONG, Outcome.EMPTY, Outcome.OVERLONG]
    # Truncation leaves no supervised token of the last row.
    truncated = [Outcome.USED, Outcome.TRUNCATED, Outcome.EMPTY, Outcome.OVERLONG]
    assert _outcomes(tokenizer, overlong="truncate") == truncated
    tokenised = tokenise(Dataset.from_list(ROWS), tokenizer, OPTIONS)
    length = tokenised["length"][0]
    assert [_outcomes(tokenizer, max_seq_length=n)[0] for n in (length, length - 1)] == [Outcome.USED, Outcome.OVERLONG]
    (document,) = document_reader(tokenised)([0])
    assert document.input_ids.dtype == "int64" and document.supervised.dtype == "bool" and document.row_id == 0
    assert tokenizer.decode(document.input_ids[document.supervised]) == "The answer is \\boxed{56}.<|eos|>"
    assert (length, tokenised["num_supervised"][0]) == (len(document.input_ids), document.supervised.sum())


def test_second_run_reads_the_cache(
    tokenizer: PreTrainedTokenizerBase, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, original, dataset = [], module.encode_batch, Dataset.from_list(ROWS)
    monkeypatch.setattr(module, "encode_batch", lambda rows, *rest: calls.append(len(rows)) or original(rows, *rest))
    first = tokenise(dataset, tokenizer, OPTIONS)
    tokenizer(["a", "b b"], padding=True, truncation=True, max_length=3)  # changes the state of the tokenizer
    second = tokenise(dataset, AutoTokenizer.from_pretrained(MODEL_DIR), OPTIONS)
    assert first[:] == second[:] == tokenise(dataset, tokenizer, OPTIONS)[:]
    assert calls == [4] and len(list(cache.glob("*.arrow"))) == 1
    tokenise(dataset, tokenizer, dataclasses.replace(OPTIONS, max_seq_length=65))
    assert calls == [4, 4] and len(list(cache.glob("*.arrow"))) == 2


def test_cache_key_depends_on_everything_that_changes_the_tokens(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cache_key("d", tokenizer, OPTIONS), cache_key("e", tokenizer, OPTIONS)}
    for name, value in (("chat_template", "{{ messages }}"), ("eos_token", "<|pad|>"), ("bos_token", "<|pad|>")):
        other = copy.deepcopy(tokenizer)
        setattr(other, name, value)
        keys.add(cache_key("d", other, OPTIONS))
    more_tokens = copy.deepcopy(tokenizer)
    more_tokens.add_tokens(["<new>"])
    keys.add(cache_key("d", more_tokens, OPTIONS))
    changes = {"form": "text", "max_seq_length": 65, "overlong": "truncate", "train_on_prompt": True}
    for name, value in {**changes, "columns": {"problem": "question"}}.items():
        keys.add(cache_key("d", tokenizer, dataclasses.replace(OPTIONS, **{name: value})))
    for constant, value in (("FORMAT_VERSION", 1_000), ("PROMPT_FORM", "Q: {problem}"), ("PLAIN_TURN", "{role}")):
        monkeypatch.setattr(module, constant, value)
        keys.add(cache_key("d", tokenizer, OPTIONS))
    assert len(keys) == 14


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 64), ("350000 100000", 4)])
def test_cpu_quota_limits_cores_of_job(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(module, "CPU_QUOTA", tmp_path / "cpu.max")
    assert module.cores_of_job() == 64
    (tmp_path / "cpu.max").write_text(quota)
    assert module.cores_of_job() == cores


@pytest.mark.slow
def test_document_reader_finds_rows_in_pieces_and_files(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stores pieces of 1,000 rows. One process writes one file, two write two. Some rows have no token."""
    single_file = tokenise(Dataset.from_list(ROWS * 300), tokenizer, OPTIONS)
    datasets.config.HF_DATASETS_CACHE = str(tmp_path / "other")
    monkeypatch.setattr(module, "ROWS_PER_WORKER", 1_000)
    monkeypatch.setattr(module, "cores_of_job", lambda: 2)
    two_files = tokenise(Dataset.from_list(ROWS * 300), tokenizer, OPTIONS)
    indices = [1199, 0, 1, 998, 999, 1000, 1001, 599, 600, 601, 0, 1100]
    for tokenised in (single_file, two_files):
        for index, document in zip(indices, document_reader(tokenised)(indices), strict=True):
            row = single_file[index]
            assert (document.input_ids.tolist(), document.supervised.tolist()) == (row["input_ids"], row["supervised"])
            assert document.row_id == row["row_id"] == index


@pytest.mark.slow
def test_ctrl_c_ends_tokenising_in_several_processes(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", ROWS * 20_000)
    command = [sys.executable, "train_fp8.py", "--dry_run", "--random_init", f"--dataset_name={rows}"]
    new_session: dict[str, Any] = {"env": {**os.environ, "HF_DATASETS_CACHE": str(tmp_path)}, "start_new_session": True}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **new_session)
    while not any((tmp_path / "llm_fp8").glob("*")):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].endswith("interrupted\n") and process.returncode == 130
