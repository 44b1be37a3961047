"""The tokenised dataset: what becomes of each row, and when its cache is used."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_fp8.data import tokenise as module
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prompt import problem_of
from llm_fp8.data.split import problem_key
from llm_fp8.data.tokenise import Outcome, TokeniseOptions, cache_key, document_reader, tokenise, tokenizer_digest
from llm_fp8.utils.errors import UserError

OPTIONS = TokeniseOptions("problem_solution", max_seq_length=64)
ROWS = [
    {"problem": "What is 7 * 8?", "generated_solution": "The answer is \\boxed{56}.", "other": 1},
    {"problem": "What is 7 * 9?", "generated_solution": "1 2 3 4 5 6 7 8 9 " * 20, "other": 2},
    {"problem": "What is 7 * 7?", "generated_solution": "", "other": 3},
    {"problem": "1 2 3 4 5 6 7 8 9 " * 20, "generated_solution": "49", "other": 4},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def dataset() -> Dataset:
    return Dataset.from_list(ROWS)


def _outcomes(tokenised: Dataset) -> list[Outcome]:
    return [Outcome(value) for value in tokenised["outcome"]]


def test_outcomes_when_dropping(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenised = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path))
    assert _outcomes(tokenised) == [Outcome.USED, Outcome.OVERLONG, Outcome.EMPTY, Outcome.OVERLONG]
    assert set(tokenised.column_names) == set(module.FEATURES)
    assert [length > 0 for length in tokenised["length"]] == [True, False, False, False]
    assert list(tokenised["row_id"]) == [0, 1, 2, 3]
    assert list(tokenised["problem_key"]) == [problem_key(problem_of(row, "problem_solution")) for row in ROWS]
    (document,) = document_reader(tokenised)([0])
    assert document.input_ids.dtype == "int64" and document.supervised.dtype == "bool" and document.row_id == 0
    assert tokenizer.decode(document.input_ids[document.supervised]) == "The answer is \\boxed{56}.<|eos|>"
    assert tokenised["length"][0] == len(document.input_ids)
    assert tokenised["num_supervised"][0] == document.supervised.sum()


def test_outcomes_when_truncating(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, overlong="truncate")
    tokenised = tokenise(dataset, tokenizer, options, str(tmp_path))
    # Of the last row nothing supervised is left.
    assert _outcomes(tokenised) == [Outcome.USED, Outcome.TRUNCATED, Outcome.EMPTY, Outcome.EMPTY]
    whole = tokenise(dataset, tokenizer, dataclasses.replace(OPTIONS, max_seq_length=4096), str(tmp_path))
    cut, full = document_reader(tokenised)([1])[0], document_reader(whole)([1])[0]
    assert len(cut.input_ids) == 64
    assert (
        cut.input_ids.tolist() == full.input_ids[:64].tolist()
        and cut.supervised.tolist() == full.supervised[:64].tolist()
    )
    assert tokenizer.eos_token_id not in cut.input_ids  # stopping in mid-solution is not taught


def test_a_length_that_just_fits(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    length = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path))["length"][0]
    for limit, outcome in ((length, Outcome.USED), (length - 1, Outcome.OVERLONG)):
        assert (
            _outcomes(tokenise(dataset, tokenizer, dataclasses.replace(OPTIONS, max_seq_length=limit), str(tmp_path)))[
                0
            ]
            == outcome
        )


def test_a_second_run_reads_the_cache(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = module.encode_batch
    monkeypatch.setattr(module, "encode_batch", lambda rows, *rest: calls.append(len(rows)) or original(rows, *rest))
    first = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path))
    assert calls == [4]
    tokenizer(["a", "b b"], padding=True, truncation=True, max_length=3)  # leaves settings behind in the tokenizer
    again = tokenise(dataset, AutoTokenizer.from_pretrained(MODEL_DIR), OPTIONS, str(tmp_path))
    same = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path))
    assert calls == [4]
    assert first[:] == again[:] == same[:]
    assert len(list(tmp_path.glob("tokenised-*/*.arrow"))) == 1
    tokenise(dataset, tokenizer, dataclasses.replace(OPTIONS, max_seq_length=65), str(tmp_path))
    assert calls == [4, 4]
    assert len(list(tmp_path.glob("tokenised-*/*.arrow"))) == 2


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_cache_that_is_no_folder_is_named(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "cache"
    if kind == "file":
        place.write_text("")
    else:
        place.symlink_to(tmp_path / "disk that is not there")
    with pytest.raises(UserError, match=f"the datasets cache {place} is, or lies below, what is no folder"):
        tokenise(dataset, tokenizer, OPTIONS, str(place))


def test_what_a_killed_process_left_in_the_cache_goes(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    sound = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path))[:]
    (made,) = tmp_path.glob("tokenised-*/*.arrow")
    left = made.with_name("tmpabcd1234")  # as datasets names what it writes
    left.write_bytes(b"half")
    assert tokenise(dataset, tokenizer, OPTIONS, str(tmp_path))[:] == sound and not left.exists()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("damage", ["zeros in the middle", "cut", "another dataset's", "empty", "no checksum"])
def test_a_damaged_cache_is_made_anew(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys, damage: str, num_workers: int
) -> None:
    sound = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path), num_workers)[:]
    first, *_ = sorted(tmp_path.glob("tokenised-*/*.arrow"))
    content = first.read_bytes()
    half = len(content) // 2
    if damage == "zeros in the middle":
        first.write_bytes(content[:half] + bytes(64) + content[half + 64 :])
    elif damage == "cut":
        first.write_bytes(content[:half])
    elif damage == "another dataset's":
        tokenise(dataset.select([0]), tokenizer, OPTIONS, str(tmp_path / "other"))
        first.write_bytes(next((tmp_path / "other").glob("*/*.arrow")).read_bytes())
    elif damage == "empty":
        first.write_bytes(b"")
    else:
        first.with_name(f"{first.name}.xxh3").unlink()
    assert "damaged" not in capsys.readouterr().out
    assert tokenise(dataset, tokenizer, OPTIONS, str(tmp_path), num_workers)[:] == sound
    assert f"the token cache {first} is damaged or incomplete" in capsys.readouterr().out
    assert tokenise(dataset, tokenizer, OPTIONS, str(tmp_path), num_workers)[:] == sound
    assert "damaged" not in capsys.readouterr().out


def test_everything_that_shapes_the_tokens_changes_the_key(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(change: str, value: Any) -> PreTrainedTokenizerBase:
        other = copy.deepcopy(tokenizer)
        setattr(other, change, value)
        return other

    more_tokens = copy.deepcopy(tokenizer)
    more_tokens.add_tokens(["<new>"])
    keys = {
        "same": cache_key("d", tokenizer, OPTIONS),
        "dataset": cache_key("e", tokenizer, OPTIONS),
        "vocabulary": cache_key("d", more_tokens, OPTIONS),
        "template": cache_key("d", changed("chat_template", "{{ messages }}"), OPTIONS),
        "eos": cache_key("d", changed("eos_token", "<|pad|>"), OPTIONS),
        "columns": cache_key("d", tokenizer, dataclasses.replace(OPTIONS, form="text")),
        "length": cache_key("d", tokenizer, dataclasses.replace(OPTIONS, max_seq_length=65)),
        "overlong": cache_key("d", tokenizer, dataclasses.replace(OPTIONS, overlong="truncate")),
        "prompt": cache_key("d", tokenizer, dataclasses.replace(OPTIONS, train_on_prompt=True)),
    }
    for constant, value in (("FORMAT_VERSION", 1_000), ("PROMPT_FORM", "Q: {problem}"), ("PLAIN_TURN", "{role}")):
        monkeypatch.setattr(module, constant, value)
        keys[constant] = cache_key("d", tokenizer, OPTIONS)
    assert len(set(keys.values())) == len(keys)
    monkeypatch.undo()
    assert cache_key("d", AutoTokenizer.from_pretrained(MODEL_DIR), OPTIONS) == keys["same"]
    assert tokenizer_digest(changed("pad_token", "<|eos|>")) == tokenizer_digest(
        tokenizer
    )  # padding is told by position


def test_workers_give_the_same(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    dataset = Dataset.from_list(ROWS * 10)
    one = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path / "one"))
    two = tokenise(dataset, tokenizer, OPTIONS, str(tmp_path / "two"), num_workers=2)
    assert one[:] == two[:]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_documents_are_those_of_the_rows_wherever_they_lie(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, num_workers: int
) -> None:
    """In the file's pieces of 1,000 rows, in the files of several processes, and beside rows that hold no token."""
    tokenised = tokenise(Dataset.from_list(ROWS * 600), tokenizer, OPTIONS, str(tmp_path), num_workers)
    indices = [2399, 0, 1, 998, 999, 1000, 1001, 1199, 1200, 1201, 0, 2000]
    documents = document_reader(tokenised)(indices)
    for index, document in zip(indices, documents, strict=True):
        row = tokenised[index]
        assert (document.input_ids.tolist(), document.supervised.tolist()) == (row["input_ids"], row["supervised"])
        assert document.row_id == row["row_id"] == index
        assert document.input_ids.dtype == "int64" and document.supervised.dtype == "bool"
    assert (
        tokenised.data.table.column(0).num_chunks > 2 and sum(len(document.input_ids) > 0 for document in documents) > 4
    )


def test_documents_of_picked_rows_are_refused(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="not in the order of its table"):
        document_reader(tokenise(dataset, tokenizer, OPTIONS, str(tmp_path)).select([2, 0]))
