"""Let an exported model answer the rows that its run held out: the share of right final answers, and the eval loss.

The rows are those of the run's own evaluation (`prepare_data` with the options of its run.json), so none was trained
on. The model gets each row up to its last supervised part and answers greedily until one of the EOS tokens in
generation_config.json; math-verify compares the final answer with that of the row: `0.5` equals `\\frac12`. What it
finds no answer in counts as right only where the texts are equal. `llm-fp8 evaluate` and scripts/evaluate.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from llm_fp8.config.options import Config, DataConfig, ModelConfig
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading
from llm_fp8.utils.json_files import read_json, write_json_atomic

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TEXTS = ("dataset_name", "eval_dataset_name", "split_name", "validation_split_name")
DATA_OPTIONS = {**dict.fromkeys(_TEXTS, str), "validation_fraction": float, "max_seq_length": int}
"""Options of the training scripts that decide which rows are held out -> their types."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add, where = parser.add_argument, "exported folder, other Hugging Face folder, or hub id"
    add("--model_name", "--model", type=os.path.expanduser, required=True, help=where)
    fields = {field.name: field.metadata["help"].replace("%", "%%") for field in dataclasses.fields(DataConfig)}
    for name, kind in DATA_OPTIONS.items():
        add(f"--{name}", type=kind, help=f"in place of the run's: {fields[name]}")
    add("--num_problems", type=int, default=500, help="rows to answer at most (default %(default)s)")
    add("--max_new_tokens", type=int, default=512, help="where an answer is cut off (default %(default)s)")
    add("--batch_size", type=int, default=64, help="rows answered at a time (default %(default)s)")
    add("--output", type=Path, help="JSON file (default: exact_match.json in the folder of the run)")
    return parser.parse_args(argv)


def data_options(options: argparse.Namespace) -> DataConfig:
    """The data options of the run that exported the model, else the defaults, with those of the command line."""
    given = {name: value for name in DATA_OPTIONS if (value := getattr(options, name)) is not None}
    record, recorded = Path(options.model_name).absolute().parent / "run.json", {}
    if record.is_file() and Path(options.model_name).is_dir() and "dataset_name" not in given:
        known = {field.name for field in dataclasses.fields(DataConfig)}
        with reading("--model_name", options.model_name, f"{record}"):
            recorded = {name: value for name, value in read_json(record)["config"]["data"].items() if name in known}
    batching = {"batch_size": 1, "packing": False, "train_on_prompt": False}
    return DataConfig(**{**recorded, **given, **batching})


def adapter_base(folder: str | Path) -> str | None:
    """The folder or hub id of the base model of the adapter in `folder`; None where there is no adapter."""
    from llm_fp8.models.source import is_adapter_folder, resolve_source

    if not is_adapter_folder(folder):
        return None
    with reading("--model_name", folder, "the base model's name in adapter_config.json"):
        name = read_json(Path(folder) / "adapter_config.json")["base_model_name_or_path"]
        return resolve_source(ModelConfig(model_name=name)).location


def load_exported(folder: str | Path, base: str | None, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model in `folder`, or the `base` model with the adapter of `folder` added to its weights."""
    from transformers import AutoModelForCausalLM

    with reading("--model_name", folder, "the model", "Give an exported folder, such as runs/x/final, or a hub id."):
        model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=dtype)
        if base is None:
            return model
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            # The adapter's matrices are fp32, so that the sum is rounded once.
            return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


class Problem(NamedTuple):
    """A held-out row. `labels[t]` is the token after position t, or -100 where nothing is learnt."""

    input_ids: list[int]
    labels: list[int]

    @property
    def supervised(self) -> range:
        """Positions whose labels are the row's last supervised part."""
        last = max(t for t, label in enumerate(self.labels) if label >= 0)
        return range(next((t + 1 for t in range(last, -1, -1) if self.labels[t] < 0), 0), last + 1)

    @property
    def prompt(self) -> list[int]:
        """What the model sees."""
        return self.input_ids[: self.supervised[0] + 1]


def is_right(expected: str, answer: str) -> bool:
    """Whether two texts have the same final answer: what follows the last '####', else what math-verify finds."""
    from math_verify import parse, verify

    gold, found = (text.rpartition("####")[2].strip() for text in (expected, answer))
    return gold == found or bool(verify(parse(gold), parse(found)))


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int
) -> list[str]:
    """Greedy answers, without special tokens."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    ends, pad = model.generation_config.eos_token_id, tokenizer.pad_token_id
    how = {"pad_token_id": pad, "eos_token_id": ends if ends is not None else tokenizer.eos_token_id}
    whole = cast(Any, model).generate(**padded, **how, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(whole[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)


def eval_loss(model: PreTrainedModel, problems: list[Problem]) -> float:
    """Mean cross entropy over the supervised tokens."""
    import torch

    loss_sum, num_tokens = 0.0, 0
    for problem in problems:
        ids, labels = (torch.tensor([row], device=model.device) for row in (problem.input_ids, problem.labels))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float()
        loss_sum += torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum").item()
        num_tokens += int((labels >= 0).sum())
    return loss_sum / num_tokens


def main() -> int:
    """Evaluate, print, write."""
    options = parse(sys.argv[1:])
    import torch  # here, so that --help and mistakes answer without loading it
    from scipy.stats import binomtest

    from llm_fp8.data import prepare_data
    from llm_fp8.models.source import load_tokenizer, resolve_source
    from llm_fp8.utils.console import quiet_libraries

    quiet_libraries()
    base = adapter_base(options.model_name)
    named = ModelConfig(model_name=base or options.model_name)
    tokenizer, _ = load_tokenizer(named, resolve_source(named))
    data = prepare_data(Config(model=named, data=data_options(options)), tokenizer)
    print(data.description, flush=True)
    if data.eval is None:
        raise UserError("--validation_fraction: no row is held out, so there is nothing to evaluate on; raise it.")
    rows = itertools.islice(data.eval, options.num_problems)
    problems = [Problem(row.input_ids[0].tolist(), row.labels[0].tolist()) for row in rows]
    solutions = [[problem.labels[t] for t in problem.supervised] for problem in problems]
    expected: Any = tokenizer.batch_decode(solutions, skip_special_tokens=True)
    on_gpu = torch.cuda.is_available()
    model = load_exported(options.model_name, base, torch.bfloat16 if on_gpu else torch.float32)
    torch.nn.Module.to(model, "cuda" if on_gpu else "cpu").eval()
    loss = eval_loss(model, problems)
    answered: dict[int, str] = {}
    order = sorted(range(len(problems)), key=lambda number: len(problems[number].prompt))
    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        prompts = [problems[number].prompt for number in batch]
        answered |= zip(batch, generate(model, tokenizer, prompts, options.max_new_tokens), strict=True)
    right = [is_right(gold, answered[number]) for number, gold in enumerate(expected)]
    interval = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    share, within = sum(right) / len(right), f"95% interval {interval.low:.1%} to {interval.high:.1%}"
    print(f"exact match: {share:.1%} ({sum(right)} of {len(right)}; {within}), eval loss {loss:.4f} nats/token")
    run = Path(options.model_name).absolute().parent
    path: Path | None = options.output or (run / "exact_match.json" if (run / "run.json").is_file() else None)
    if path is not None:
        told = [
            {"row_id": number, "problem": tokenizer.decode(problem.prompt), "expected": expected[number]}
            | {"answer": answered[number], "correct": right[number]}
            for number, problem in enumerate(problems)
        ]
        figures = {"exact_match": share, "wilson_95": [interval.low, interval.high], "eval_loss": loss}
        write_json_atomic(path, {"model": options.model_name, **figures, "answers": told})
        print(f"answers: {path}")
    return 0
