"""Generated answers against expected ones: a model that knows some problems by heart, alone, in training and on
disk.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from llm_fp8.config.parser import parse_config
from llm_fp8.data import encode_prompt, prepare_data
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.data.split import Problem, problem_key
from llm_fp8.models.architectures import bundled_config
from llm_fp8.tools.evaluate_checkpoint import data_options, evaluate_exact_match_folder
from llm_fp8.train import exact_match
from llm_fp8.train.exact_match import ExactMatchResult, answer_problems
from llm_fp8.train.generate import check_positions, copy_for_generation, default_batch_size, generate_greedy
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_jsonl
from scripts import evaluate
from tests.support.generation import texts_of_family
from tests.support.processes import exit_code, start_ranks
from tests.support.small import records, steps, tiny_config, train, write_model

Rows = list[dict[str, Any]]


def _write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _dataset(folder: Path, train_rows: Rows, held_out: Rows) -> Path:
    _write(folder / "data" / "train-00000-of-00001.jsonl", train_rows)
    _write(folder / "data" / "validation-00000-of-00001.jsonl", held_out)
    return folder


@pytest.fixture(scope="module")
def embedded_rows() -> Rows:
    """Short embedded rows, no two with the same expected answer."""
    lines = (DATASET_DIR / "data" / "train-00000-of-00004.jsonl").read_text().splitlines()
    rows = {row["expected_answer"]: row for row in map(json.loads, lines[:400]) if len(json.dumps(row)) < 260}
    return list(rows.values())


@pytest.fixture(scope="module")
def known(embedded_rows: Rows) -> Rows:
    """What the model of `memorised` knows by heart."""
    return embedded_rows[:6]


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory, known: Rows) -> Path:
    """The exported folder of a model trained on `known` until it repeats them."""
    folder = tmp_path_factory.mktemp("memorised")
    model = write_model(folder / "model", hidden_size=64, intermediate_size=128)
    code = train(
        f"--model_name={model}", f"--dataset_name={_write(folder / 'known.jsonl', known)}", "--validation_fraction=0",
        "--max_seq_length=128", "--batch_size=6", "--max_steps=120", "--learning_rate=1e-2", "--num_warmup_steps=5",
        f"--output_dir={folder / 'run'}"
    )  # fmt: skip
    assert code == 0
    return folder / "run" / "final"


@pytest.fixture(scope="module")
def tokenizer(memorised: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(memorised)


def _row_ids(result: ExactMatchResult) -> list[int]:
    return [answer.row_id for answer in result.answers]


def _problems(rows: Rows) -> list[Problem]:
    return [Problem(number, row["problem"], row["expected_answer"]) for number, row in enumerate(rows)]


# ---- generation ----


def test_what_is_known_by_heart_is_right_and_scrambled_answers_are_not(memorised, known, embedded_rows, tmp_path):
    data = _dataset(tmp_path / "known", embedded_rows[20:30], known)
    result = evaluate_exact_match_folder(
        memorised, num_problems=6, max_new_tokens=100, changes={"dataset_name": str(data)}
    )
    assert result.share == 1.0 and _row_ids(result) == list(range(6))
    assert [answer.generated for answer in result.answers] == [row["generated_solution"] for row in known]

    answers = [row["expected_answer"] for row in known]
    scrambled = [
        {**row, "expected_answer": answer} for row, answer in zip(known, answers[1:] + answers[:1], strict=True)
    ]
    data = _dataset(tmp_path / "scrambled", embedded_rows[20:30], scrambled)
    result = evaluate_exact_match_folder(
        memorised, num_problems=6, max_new_tokens=100, changes={"dataset_name": str(data)}
    )
    assert result.share == 0.0 and [answer.generated for answer in result.answers] == [
        row["generated_solution"] for row in known
    ]

    half = evaluate_exact_match_folder(
        memorised, num_problems=3, max_new_tokens=100, changes={"dataset_name": str(data)}
    )
    keys = sorted(range(6), key=lambda i: problem_key(known[i]["problem"]))
    assert _row_ids(half) == sorted(keys[:3]), "the smallest hashes"


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batches_padded_on_the_left_give_what_each_prompt_gives_alone(
    memorised, tokenizer, known, embedded_rows, batch_size
):
    model = AutoModelForCausalLM.from_pretrained(memorised)
    rows = [*known, *embedded_rows[40:46]]
    prompts = [encode_prompt(row["problem"], tokenizer) for row in rows]
    assert len({len(prompt) for prompt in prompts}) > 5, "there is something to pad"
    found = generate_greedy(model, tokenizer, prompts, 40, batch_size)
    plain = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=1, pad_token_id=2)
    alone, num_ended = [], 0
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), generation_config=plain)[0, len(prompt) :].tolist()
        num_ended += output[-1] == 1
        alone.append(tokenizer.decode(output, skip_special_tokens=True))
    assert 0 < num_ended < len(prompts), "some stop by themselves and some are cut off"
    assert found == alone


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_tied", "mistral_window", "qwen2_window"])
def test_generation_is_that_of_transformers(family):
    ours, theirs = texts_of_family(family, "cpu")
    assert len(set(theirs)) == len(theirs) and ours == theirs


def test_a_checkpoints_own_sampling_options_do_not_apply(memorised, tokenizer, known):
    model = AutoModelForCausalLM.from_pretrained(memorised)
    prompts = [encode_prompt(row["problem"], tokenizer) for row in known]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=2.0, repetition_penalty=5.0, max_new_tokens=3
    )
    assert generate_greedy(model, tokenizer, prompts, 100) == [row["generated_solution"] for row in known]


def test_prompts_begin_as_the_training_documents_do(known, tokenizer, tmp_path):
    config = parse_config(
        [f"--dataset_name={_write(tmp_path / 'rows.jsonl', known)}", "--validation_fraction=0", "--max_seq_length=128"]
    )
    batches = next(iter(prepare_data(config, tokenizer).train))
    assert sorted(batches[0].row_ids) == list(range(len(known)))
    # The lines of a batch behind its rows are padding.
    documents = {row: ids.tolist() for row, ids in zip(batches[0].row_ids, batches[0].input_ids, strict=False)}
    for number, row in enumerate(known):
        prompt = encode_prompt(row["problem"], tokenizer)
        assert documents[number][: len(prompt)] == prompt


def test_prompts_that_do_not_fit_the_model_are_refused():
    config = tiny_config(max_position_embeddings=100)
    check_positions([[0] * 60], config, 40, "--flag")
    with pytest.raises(UserError, match=r"--flag 41 with the longest prompt of 60 tokens .* lower it to 40 or less"):
        check_positions([[0] * 60, [0]], config, 41, "--flag")
    with pytest.raises(UserError, match="lower --max_seq_length"):
        check_positions([[0] * 100], config, 1, "--flag")


# ---- the copy that generates ----


@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_is_what_would_be_exported_and_nothing_else_changes(memorised, tokenizer, tied):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(tie_word_embeddings=tied), attn_implementation="eager").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    copied = copy_for_generation(model, torch.Tensor.detach, torch.bfloat16, torch.device("cpu"))
    prompt = encode_prompt("What is 2 + 2?", tokenizer)
    generate_greedy(copied, tokenizer, [prompt], 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not copied.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation == "eager" and copied.config._attn_implementation == "sdpa"
    assert (copied.lm_head.weight is copied.model.embed_tokens.weight) == tied

    rounded = copy.deepcopy(model).to(torch.bfloat16).float().eval()
    assert all(torch.equal(tensor, rounded.state_dict()[name]) for name, tensor in copied.state_dict().items())
    ids = torch.tensor([prompt])
    with torch.no_grad():
        torch.testing.assert_close(copied(ids).logits, rounded(ids).logits)


# ---- in training ----


OPTIONS = ["--max_seq_length=128", "--batch_size=4", "--learning_rate=1e-3", "--eval_batches=1"]
EXACT_MATCH = ["--eval_exact_match=5", "--eval_max_new_tokens=100", "--eval_every=2"]


def _answers(folder: Path, step: int) -> list[dict[str, Any]]:
    return read_jsonl(folder / "eval_answers" / f"step-{step}.jsonl")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, known: Rows, embedded_rows: Rows) -> Path:
    """Trained on: rows that `memorised` does not know; held out: three that it knows and two that it does not."""
    return _dataset(tmp_path_factory.mktemp("data") / "rows", embedded_rows[20:50], [*known[:3], *embedded_rows[60:62]])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, memorised: Path, dataset: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    options = [f"--model_name={memorised}", f"--dataset_name={dataset}", *OPTIONS, *EXACT_MATCH]
    # So small a step that what was known stays known.
    assert train(*options, "--learning_rate=1e-6", "--max_steps=4", f"--output_dir={folder}") == 0
    return folder


def test_a_run_reports_exact_match_and_keeps_every_answer(run, known):
    evaluations = [record for record in records(run) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [2, 4]
    for record in evaluations:
        answers = _answers(run, record["step"])
        assert [answer["row_id"] for answer in answers] == [0, 1, 2, 3, 4]
        assert [answer["correct"] for answer in answers] == [True, True, True, False, False]
        assert (
            answers[0]["generated"] == known[0]["generated_solution"]
            and answers[0]["expected"] == known[0]["expected_answer"]
        )
        assert record["eval_exact_match"] == 0.6 and record["eval_num_problems"] == 5
        assert record["eval_generation_time_s"] > 0
    assert json.loads((run / "summary.json").read_text())["last_evaluation"]["eval_exact_match"] == 0.6


def test_the_exported_folder_gives_the_same_answers(run, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["evaluate.py", f"--model={run / 'final'}", "--num_problems=9", "--max_new_tokens=100"]
    )
    assert evaluate.main() == 0
    printed = capsys.readouterr().out
    written = json.loads((run / "exact_match.json").read_text())
    assert written["answers"] == _answers(run, 4) and written["num_correct"] == 3 and written["num_problems"] == 5
    assert written["wilson_95"] == pytest.approx([0.2307, 0.8824], abs=1e-4)
    assert "9 problems were asked for, and 5 are held out" in printed
    assert "exact match: 60.0% (3 of 5; 95% interval 23.1% to 88.2%)" in printed


def test_another_model_beside_the_exported_one_has_answers_of_its_own(run, monkeypatch):
    """As its fp8 export, or an adapter merged."""
    of_final = run / "exact_match.json"
    of_final.write_text("as before")
    shutil.copytree(run / "final", run / "final-fp8")
    monkeypatch.setattr(
        sys, "argv", ["evaluate.py", f"--model={run / 'final-fp8'}", "--num_problems=2", "--max_new_tokens=4"]
    )
    assert evaluate.main() == 0
    assert of_final.read_text() == "as before"
    assert json.loads((run / "exact_match_final-fp8.json").read_text())["model"] == str(run / "final-fp8")


def test_training_does_not_feel_the_evaluation(run, memorised, dataset, tmp_path):
    options = [
        f"--model_name={memorised}",
        f"--dataset_name={dataset}",
        *OPTIONS,
        "--learning_rate=1e-6",
        "--no_export",
    ]
    assert train(*options, "--max_steps=4", f"--output_dir={tmp_path / 'without'}") == 0
    assert [step["loss"] for step in steps(run)] == [step["loss"] for step in steps(tmp_path / "without")]


def test_two_processes_share_the_problems(run, memorised, dataset, tmp_path):
    """With sharded weights, and the library that changes how transformers builds models and generates."""
    log = tmp_path / "log"
    processes = start_ranks(
        2,
        log,
        f"--model_name={memorised}",
        f"--dataset_name={dataset}",
        *OPTIONS,
        *EXACT_MATCH,
        "--learning_rate=1e-6",
        "--max_steps=2",
        "--no_export",
        "--sharding_mode=deepspeed_3",
        f"--output_dir={tmp_path / 'run'}",
    )
    assert [exit_code(process) for process in processes] == [0, 0], log.read_text()[-4000:]
    assert _answers(tmp_path / "run", 2) == _answers(run, 2)
    assert records(tmp_path / "run")[-1]["eval_exact_match"] == 0.6


def test_running_out_of_memory_costs_the_figure_and_not_the_run(memorised, dataset, tmp_path, monkeypatch, capfd):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(exact_match, "answer_problems", full)
    options = [f"--model_name={memorised}", f"--dataset_name={dataset}", *OPTIONS, *EXACT_MATCH]
    assert train(*options, "--max_steps=2", f"--output_dir={tmp_path / 'run'}") == 0
    assert "WARNING: no exact match at step 2: generation ran out of GPU memory" in capfd.readouterr().out
    assert "eval_loss" in records(tmp_path / "run")[-1] and "eval_exact_match" not in records(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "final" / "config.json").exists()


# ---- which problems ----


def _prepared(path: Path, tokenizer: PreTrainedTokenizerBase, *options: str) -> Any:
    return prepare_data(parse_config([f"--dataset_name={path}", "--max_seq_length=128", *options]), tokenizer)


def test_held_out_problems_are_asked_once_and_never_trained_on(tokenizer, tmp_path):
    rows = [
        {
            "problem": f"What is {i} + {i}?" + " " * way,
            "generated_solution": f"way {way}: {2 * i}",
            "expected_answer": str(2 * i),
        }
        for way in range(3)
        for i in range(40)
    ]
    data = _prepared(
        _write(tmp_path / "rows.jsonl", rows), tokenizer, "--validation_fraction=0.3", "--eval_exact_match=1000"
    )
    assert len({problem.problem for problem in data.problems}) == len(data.problems) > 5
    assert all(problem.row_id < 40 and rows[problem.row_id]["problem"] == problem.problem for problem in data.problems)
    keys = [problem_key(problem.problem) for problem in data.problems]
    assert keys == sorted(keys)
    trained = [
        row
        for batches, _ in zip(data.train, range(data.train.steps_per_epoch), strict=False)
        for b in batches
        for row in b.row_ids
    ]
    assert not {problem_key(rows[row]["problem"]) for row in trained} & set(keys)
    assert len(set(trained)) + 3 * len(keys) == len(rows)
    fewer = _prepared(tmp_path / "rows.jsonl", tokenizer, "--validation_fraction=0.3", "--eval_exact_match=4")
    assert fewer.problems == data.problems[:4]
    assert "exact match: 4 of its problems are answered" in fewer.describe()


def test_problems_without_an_expected_answer_are_passed_over(tokenizer, embedded_rows, tmp_path):
    held_out = [
        {**row, "expected_answer": None if i % 2 else row["expected_answer"]} for i, row in enumerate(embedded_rows[:8])
    ]
    data = _prepared(_dataset(tmp_path / "some", embedded_rows[20:30], held_out), tokenizer, "--eval_exact_match=8")
    assert sorted(problem.row_id for problem in data.problems) == [0, 2, 4, 6]
    held_out = [{**row, "expected_answer": ""} for row in held_out]
    with pytest.raises(UserError, match="none of the 8 held-out rows has an expected_answer"):
        _prepared(_dataset(tmp_path / "none", embedded_rows[20:30], held_out), tokenizer, "--eval_exact_match=8")


def test_what_cannot_be_is_said_before_anything_is_trained(tokenizer, embedded_rows, tmp_path):
    bare = [{key: row[key] for key in ("problem", "generated_solution")} for row in embedded_rows[:20]]
    path = _write(tmp_path / "bare.jsonl", bare)
    with pytest.raises(UserError, match="lacks expected_answer"):
        _prepared(path, tokenizer, "--eval_exact_match=2")
    _prepared(path, tokenizer)
    text = _write(tmp_path / "text.jsonl", [{"text": "abc def", "expected_answer": "1"}] * 3)
    with pytest.raises(UserError, match="lacks problem, generated_solution"):
        _prepared(text, tokenizer, "--eval_exact_match=2")
    with pytest.raises(UserError, match="--streaming"):
        parse_config(["--streaming", "--max_steps=1", "--eval_exact_match=2"])
    with pytest.raises(UserError, match="--eval_max_new_tokens 9 has no effect"):
        parse_config(["--eval_max_new_tokens=9"])
    for wrong in ("--eval_exact_match=-1", "--eval_max_new_tokens=0"):
        with pytest.raises(UserError, match=wrong.split("=")[0]):
            parse_config(["--eval_exact_match=1", wrong])
    model = write_model(tmp_path / "model")
    path = _write(tmp_path / "rows.jsonl", embedded_rows[:20])
    common = [
        f"--model_name={model}",
        f"--dataset_name={path}",
        "--max_seq_length=128",
        f"--output_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(UserError, match="--eval_exact_match 3 has no effect, because no row is held out"):
        train(*common, "--validation_fraction=0", "--eval_exact_match=3")
    with pytest.raises(UserError, match="--eval_max_new_tokens 250 with the longest prompt"):
        train(
            f"--model_name={model}",
            *OPTIONS,
            f"--output_dir={tmp_path / 'run'}",
            "--eval_exact_match=3",
            "--eval_max_new_tokens=250",
        )


# ---- the script ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model={run}"], "--model {run} is a run's folder, and its model is in {run}/final; give that."),
        (["--model={unfinished}"], "--model {unfinished} is a run's folder, and there is no model in "
            "{unfinished}/final: the run did"),
        (["--model=no/such/folder"], "no such folder"),
        (["--model=embedded"], "has no weights that could be evaluated"),
        (["--model={run}/final", "--num_problems=0"], "--num_problems must be at least 1"),
        (["--model={run}/final", "--max_new_tokens=500"], "--max_new_tokens 500 with the longest prompt"),
        (["--model={run}/final", "--output=/proc/x.json"], "--output /proc/x.json cannot be written"),
        (["--model={run}/final", "--output={run}"], "is a folder; give a file"),
        (["--model={run}/final", "--dataset_name=no.jsonl"], "no such file"),
        (["--model={run}/final", "--dataset_name={bare}"], "lacks expected_answer")
    ]
)  # fmt: skip
def test_mistakes_are_one_sentence(options, sentence, run, embedded_rows, tmp_path, monkeypatch):
    bare = _write(tmp_path / "bare.jsonl", [{**row, "expected_answer": None} for row in embedded_rows[:2]])
    bare.write_text(bare.read_text().replace(', "expected_answer": null', ""))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text("{}")
    fill = {"run": run, "bare": bare, "unfinished": tmp_path / "unfinished"}
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *(option.format(**fill) for option in options)])
    with pytest.raises(UserError) as error:
        evaluate.main()
    assert sentence.format(**fill) in str(error.value)


def test_a_disk_without_room_for_the_answers_is_found_before_they_are_asked_for(memorised, small_disk, monkeypatch):
    (small_disk / "filling").write_bytes(bytes(3_900_000))
    output = small_disk / "answers.json"
    monkeypatch.setattr(sys, "argv", ["evaluate.py", f"--model={memorised}", f"--output={output}"])
    with pytest.raises(UserError, match=rf"--output {output} cannot be written \(No space left on device\)"):
        evaluate.main()
    assert [path.name for path in small_disk.iterdir()] == ["filling"]


def test_a_damaged_run_json_is_named(run, tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "run.json").write_text("{")
    for file in (run / "final").iterdir():
        (tmp_path / "final" / file.name).symlink_to(file)
    with pytest.raises(UserError, match=r"run\.json is not valid JSON"):
        evaluate_exact_match_folder(tmp_path / "final", num_problems=1)


def test_the_data_are_those_of_the_runs_last_start_unless_said_otherwise(run, dataset, tmp_path):
    assert data_options(run / "final", {}).dataset_name == str(dataset)
    (tmp_path / "final").mkdir()
    recorded = json.loads((run / "run.json").read_text())
    resumed = copy.deepcopy(recorded["config"])
    resumed["data"] |= {"num_of_samples": 7, "streaming": True, "option_of_another_version": 1}
    (tmp_path / "run.json").write_text(json.dumps({**recorded, "resumes": [{"config": resumed}]}))
    found = data_options(tmp_path / "final", {"max_seq_length": 64})
    assert (found.dataset_name, found.num_of_samples, found.max_seq_length, found.streaming) == (
        str(dataset),
        7,
        64,
        False,
    )
    assert data_options(dataset, {}).dataset_name == "embedded", "no run made it"


def test_another_dataset_comes_without_what_was_recorded_of_the_former(run, dataset, tmp_path):
    (tmp_path / "final").mkdir()
    recorded = json.loads((run / "run.json").read_text())
    recorded["config"]["data"] |= {"columns": "problem=question", "validation_fraction": 0.5, "max_seq_length": 48}
    (tmp_path / "run.json").write_text(json.dumps(recorded))

    def found(**changes):
        options = data_options(tmp_path / "final", changes)
        return options.columns, options.validation_fraction, options.max_seq_length

    assert found(dataset_name=str(dataset)) == found() == ("problem=question", 0.5, 48)
    assert found(dataset_name="other") == (None, None, 48)
    assert found(dataset_name="other", validation_fraction=0.1) == (None, 0.1, 48)
    assert found(eval_dataset_name="other") == ("problem=question", None, 48)
    assert found(validation_split_name="other") == ("problem=question", None, 48)


def test_answers_come_back_in_the_order_of_their_rows(memorised, tokenizer, known):
    model = AutoModelForCausalLM.from_pretrained(memorised)
    result = answer_problems(model, tokenizer, _problems(known)[::-1], 100, batch_size=2)
    assert _row_ids(result) == [0, 1, 2, 3, 4, 5] and result.num_correct == 6


def test_small_models_answer_more_problems_at_a_time():
    """As many as 8 GiB hold caches for, whatever the GPU."""
    small, large = (AutoConfig.from_pretrained(bundled_config(name)) for name in ("Llama-57M", "Llama-3.1-8B"))
    assert default_batch_size(small, 200) == 1024 and default_batch_size(large, 4000) == 64
    each = 2 * 32 * 8 * 128 + 3 * 14336 + 4 * 4096
    assert default_batch_size(large, 200) == 8 * 2**30 // (2 * 200 * each) > 64
