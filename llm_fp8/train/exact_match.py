"""Exact match: the share of held-out problems that the model answers correctly, and every answer it gave.

The model gets a problem as in training (data/prompt.py), generates a solution greedily (generate.py), and the
solution's final answer is compared with the dataset's `expected_answer` (answers.py).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm_fp8.data.prompt import encode_prompt
from llm_fp8.data.split import Problem
from llm_fp8.distributed.process_group import largest
from llm_fp8.models.weight_shards import parts_of
from llm_fp8.observability.metrics import GIB
from llm_fp8.train.answers import ANSWERS_FOLDER, answers_equal, extract_answer
from llm_fp8.train.generate import copy_for_generation, default_batch_size, generate_greedy, memory_needed_gib
from llm_fp8.utils.json_files import write_jsonl_atomic


@dataclass(frozen=True)
class Answer:
    """A model's answer to one problem; `extracted` is None where the generated text has no final answer."""

    row_id: int
    problem: str
    expected: str
    generated: str
    extracted: str | None
    correct: bool


@dataclass(frozen=True)
class ExactMatchResult:
    """The answers to a set of problems, in order of their row ids."""

    answers: tuple[Answer, ...]

    @property
    def num_correct(self) -> int:
        """Number of correct answers."""
        return sum(answer.correct for answer in self.answers)

    @property
    def share(self) -> float:
        """`num_correct` over the number of problems."""
        return self.num_correct / len(self.answers)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's score interval of `share`."""
        from scipy import stats  # a second that a run without evaluation saves

        found = stats.binomtest(self.num_correct, len(self.answers)).proportion_ci(confidence, method="wilson")
        return float(found.low), float(found.high)


def score(problem: Problem, generated: str) -> Answer:
    """Compare a generated solution's final answer with the expected one."""
    extracted = extract_answer(generated)
    correct = answers_equal(extracted, problem.expected_answer)
    return Answer(problem.row_id, problem.problem, problem.expected_answer, generated, extracted, correct)


def encode_problems(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Each problem's prompt as token ids, as its training document would begin."""
    return [encode_prompt(problem.problem, tokenizer) for problem in problems]


def answer_problems(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    max_new_tokens: int,
    batch_size: int | None = None,
) -> ExactMatchResult:
    """Let `model` answer `problems`, in this process."""
    texts = generate_greedy(model, tokenizer, encode_problems(problems, tokenizer), max_new_tokens, batch_size)
    return in_order(score(problem, text) for problem, text in zip(problems, texts, strict=True))


def in_order(answers: Iterable[Answer]) -> ExactMatchResult:
    """`answers` as a result."""
    return ExactMatchResult(tuple(sorted(answers, key=lambda answer: answer.row_id)))


@dataclass(frozen=True)
class ExactMatchEvaluation:
    """Exact match of a model in training, under any sharding: each rank answers its share of the problems with a full
    bf16 copy. The trained model's mode, fp8 scales and the random state don't change.
    """

    accelerator: Accelerator
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    problems: Sequence[Problem]
    full_tensor: Callable[[Tensor], Tensor]
    """Unshards a parameter; may be collective."""
    export_dtype: torch.dtype
    max_new_tokens: int
    folder: Path
    """Of the run."""
    warn: Callable[[str], None]

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics as in `metrics.METRICS`; empty, with a warning, where GPU memory is short. Collective.

        Writes every answer to eval_answers/step-<step>.jsonl in the run's folder.
        """
        started = time.perf_counter()
        accelerator = self.accelerator
        if (missing := self._missing_memory_gib()) > 0:
            needs = "a copy of the model in bf16 and its KV cache"
            return self._skip(step, f"{needs} lack {missing:.1f} GiB of GPU memory beside the training")
        copied = copy_for_generation(self.model, self.full_tensor, self.export_dtype, accelerator.device)
        own = self.problems[accelerator.process_index :: accelerator.num_processes]
        answers: tuple[Answer, ...] | None = None
        try:
            answers = answer_problems(copied, self.tokenizer, own, self.max_new_tokens).answers
        except torch.OutOfMemoryError:
            pass  # generation is not collective, so every rank reaches the check below
        del copied
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        if largest(int(answers is None)):
            return self._skip(step, "generation ran out of GPU memory beside the training")
        result = in_order(gather_object(list(answers or ())))
        if accelerator.is_main_process:
            records = [dataclasses.asdict(answer) for answer in result.answers]
            write_jsonl_atomic(self.folder / ANSWERS_FOLDER / f"step-{step}.jsonl", records)
        return {
            "eval_exact_match": result.share,
            "eval_num_problems": len(result.answers),
            "eval_generation_time_s": time.perf_counter() - started,
        }

    def _missing_memory_gib(self) -> float:
        """The largest shortage of any rank; 0 or less where every rank has enough, and on CPUs. Collective."""
        device = self.accelerator.device
        if device.type != "cuda":
            return 0.0
        prompt = max(map(len, encode_problems(self.problems, self.tokenizer)))
        each = prompt + self.max_new_tokens
        tokens = min(default_batch_size(self.model.config, each), len(self.problems)) * each
        num_parameters = sum(math.prod(part.shape) for parts in parts_of(self.model).values() for part in parts)
        needed = memory_needed_gib(self.model.config, num_parameters, tokens, device)
        torch.cuda.empty_cache()
        return largest(math.ceil(needed * GIB - torch.cuda.mem_get_info(device)[0])) / GIB

    def _skip(self, step: int, reason: str) -> dict[str, float]:
        remedy = "evaluate the exported model with scripts/evaluate.py instead"
        self.warn(f"WARNING: no exact match at step {step}: {reason}; {remedy}.")
        return {}
