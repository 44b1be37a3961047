"""Exact match of exported models: the check of answers, the held-out rows of a run, and generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_fp8.tools import evaluate
from llm_fp8.tools.exported import merged_by_peft
from llm_fp8.utils.errors import UserError
from tests.support.small import LONGROPE, records, train, write_jsonl, write_model


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        (r"So it is \boxed{\frac12}.", "The answer is 0.5", True),
        (r"\boxed{1,234}", r"we get \boxed{1234}", True),
        ("2 + 2 = 4\n#### 4", "I think\n#### 4", True),
        ("2 + 2 = 4\n#### 4", "4 and 5\n#### 5", False),
        (r"\boxed{0.333}", r"\boxed{\frac{1}{3}}", False),
        ("Paris", "Paris", True),
        ("Paris", "London", False),
        (r"\boxed{7}", "", False),
        ("x = -1/2", "x = -0.5", True),
        ("So 2 + 2. The answer is: 4", "4", True),
        ("Because of X. The answer is (C).", "Since Y, the answer is (C).", True),
        ("I have 3 apples. The answer is (C).", "It's (D) with 3", False),
        ("So the answer is Paris.", "the answer is **paris**", True),
        ("####", "", None),
        ("The answer is ...", "", None),
        ("#### 5", r"So \boxed{5}. This answer is reasonable because it is positive.", True),
        ("\\boxed{5}\nThe answer is then five for each of the boys.", "5", True),
        ("#### .5", "#### 5", False),
        ("#### f'", "f", False),
        ("#### Background\n\nThe method has 3 steps, and more follow.", "3", None),
        ("The answer is that plants turn light into sugar.", "", None),
        *((text, text, None) for text in ("", "\n", "Sure, I have 3 cats.", "Call me at 5:30", "Hello there!")),
    ],
)
def test_answers_are_compared_by_value(expected, answer, right):
    assert evaluate.has_answer(expected) is (right is not None)
    assert right is None or evaluate.is_right(expected, answer) is right


def test_adapter_is_not_merged_into_fp8_weights(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match=f"--adapter {tmp_path}"):
        merged_by_peft(model, tmp_path, "--adapter")


def test_prompt_ends_before_the_last_supervised_span():
    chat = [1, 2, 3, 4, 5, 6, 7, 0], [-100, 3, -100, -100, 6, 7, -100, -100]
    assert evaluate.prompt_and_solution(*chat) == ([1, 2, 3, 4, 5], [6, 7])


@pytest.fixture(scope="module")
def run(tmp_path_factory, rows) -> Path:
    """Train briefly and return the run's folder. The model's RoPE (longrope) changes beyond 100 tokens."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    rope = LONGROPE | {"original_max_position_embeddings": 100}
    model = write_model(folder.parent / "model", rope_parameters=rope, initializer_range=0.3)
    options = [f"--model_name={model}", f"--dataset_name={rows}", "--validation_fraction=0.3", "--max_steps=10"]
    assert train(*options, "--max_seq_length=128", "--batch_size=8", f"--output_dir={folder}") == 0
    return folder


@pytest.mark.slow
def test_evaluation_answers_the_held_out_rows_and_reproduces_the_eval_loss(run, call_main, capsys):
    assert call_main(evaluate, "--model", run / "final", "--num_problems=9", "--max_new_tokens=4") == 0
    result = json.loads((run / "exact_match.json").read_text())
    (evaluation,) = [record for record in records(run) if "eval_loss" in record]
    assert result["eval_loss"] == pytest.approx(evaluation["eval_loss"], rel=1e-5)
    right = [answer["correct"] for answer in result["answers"]]
    assert len(right) == 9  # but the loss is that of all held-out rows
    assert result["exact_match"] == sum(right) / 9 and f"({sum(right)} of 9" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert all(len(tokenizer(answer["answer"])["input_ids"]) < 32 for answer in result["answers"])
    before, other = (run / "exact_match.json").read_text(), shutil.copytree(run / "final", run / "merged")
    assert call_main(evaluate, "--model", other, "--num_problems=1", "--max_new_tokens=1") == 0
    assert (run / "exact_match.json").read_text() == before, "the answers of another model are not the run's"


@pytest.mark.slow
def test_answers_do_not_depend_on_the_batch_and_end_at_any_eos_token(run):
    model, tokenizer = (kind.from_pretrained(run / "final") for kind in (AutoModelForCausalLM, AutoTokenizer))
    texts = [f"Problem:\nWhat is {text}?\n\nSolution:\n" for text in ("2 + 2", "73 * 44 - 1" * 16)]
    prompts = tokenizer(texts)["input_ids"]
    together = evaluate.generate(model, tokenizer, prompts, 12)
    assert together == [evaluate.generate(model, tokenizer, [prompt], 12)[0] for prompt in prompts]
    with torch.no_grad():
        logits = model(torch.tensor([prompts[0]])).logits
    model.generation_config.eos_token_id = [3, int(logits[0, -1].argmax())]  # the second ends the first answer at once
    ended_at_once = evaluate.generate(model, tokenizer, prompts, 12)[0]
    assert len(ended_at_once) < len(together[0])


@pytest.mark.slow
def test_adapter_reproduces_the_eval_loss_and_bad_models_are_refused(tiny_model, rows, tmp_path, call_main, capsys):
    data = (f"--dataset_name={rows}", "--validation_fraction=0.3", "--max_seq_length=128")
    more = ("--lora_rank=4", "--max_steps=3", "--batch_size=8", f"--output_dir={tmp_path / 'run'}", "--eval_every=0")
    assert train(f"--model_name={tiny_model}", *data, *more) == 0
    final, answers = tmp_path / "run" / "final", tmp_path / "answers.json"
    assert call_main(evaluate, "--model", final, "--max_new_tokens=4", "--output", answers) == 0
    losses = [record["eval_loss"] for record in records(tmp_path / "run") if "eval_loss" in record]
    if losses:
        assert json.loads(answers.read_text())["eval_loss"] == pytest.approx(losses[-1], rel=1e-4)
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    for last, expected in ((record["config"], "--dataset_name"), ({"data": {"dataset_name": "gone"}}, "gone")):
        changed = record | {"data": {**record["data"], "num_tokens": 3}, "resumes": [{"config": last}]}
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=expected):
            call_main(evaluate, "--model", final)
    path.write_text(json.dumps(record))
    tensors = load_file(final / "adapter_model.safetensors")
    del tensors[next(name for name in tensors if "lora_A" in name)]
    save_file(tensors, final / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="--model_name.*lora_A"):
        call_main(evaluate, "--model", final)
    with pytest.raises(UserError, match="--model_name"):
        call_main(evaluate, "--model", tmp_path / "nowhere", *data)
    with pytest.raises(UserError, match="--validation_fraction"):
        call_main(evaluate, "--model", tiny_model, f"--dataset_name={rows}", "--validation_fraction=0")
    stories = [*(f"A story of {number} cats." for number in range(20)), *"abcdefghijklmno"]
    chats = [[{"role": "user", "content": story}, {"role": "assistant", "content": story}] for story in stories]
    for rows in ([{"text": story} for story in stories], [{"messages": turns} for turns in chats]):
        capsys.readouterr()
        file = write_jsonl(tmp_path / f"{min(rows[0])}.jsonl", rows)
        options = (f"--dataset_name={file}", "--max_seq_length=128", "--max_new_tokens=4", "--output", answers)
        assert call_main(evaluate, "--model", tiny_model, *options) == 0
        result = json.loads(answers.read_text())
        assert result.keys() - {"samples"} == {"model", "eval_loss", "answers"} and result["answers"] == []
        assert bool(result.get("samples")) is ("messages" in rows[0]), "plain text has no prompt"
        assert "%" not in capsys.readouterr().out.partition("exact match")[2].partition("\nprompt: ")[0]
