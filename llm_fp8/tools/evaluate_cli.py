"""Let a model answer held-out problems and count how many of its answers are right.

`llm-fp8 evaluate` and scripts/evaluate.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from llm_fp8.config.options import DataConfig, RunConfig
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.json_files import write_json_atomic

DATA_OPTIONS: dict[str, Callable[[str], str | int | float]] = {
    "dataset_name": str,
    "dataset_weights": str,
    "eval_dataset_name": str,
    "columns": str,
    "split_name": str,
    "validation_split_name": str,
    "validation_fraction": float,
    "num_of_samples": int,
    "max_seq_length": int,
}
"""Options of the training scripts that decide which problems are held out."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--model_name",
        "--model",
        type=os.path.expanduser,
        required=True,
        help="exported folder, other Hugging Face folder, or hub id",
    )
    help_texts = {field.name: field.metadata["help"] for field in dataclasses.fields(DataConfig)}
    for name, kind in DATA_OPTIONS.items():
        parser.add_argument(
            f"--{name}", type=kind, help=f"in place of the run's: {help_texts[name]}".replace("%", "%%")
        )
    parser.add_argument("--num_problems", type=int, default=500, help="problems to answer at most (default 500)")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=RunConfig.eval_max_new_tokens,
        help=f"tokens after which an answer is cut off (default {RunConfig.eval_max_new_tokens})",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="problems answered at a time (default: 64 to 1,024, as many as 8 GiB hold caches for)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file to write (default: in the folder of the model's run, exact_match.json for final/ and "
        "exact_match_NAME.json for another NAME/)",
    )
    options = parser.parse_args(argv)
    for name in ("num_problems", "max_new_tokens", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    return options


def output_file(options: argparse.Namespace) -> Path | None:
    """Where the JSON goes, which can be written to; None for nowhere."""
    from llm_fp8.tools.evaluate_checkpoint import run_of

    path: Path | None = options.output
    if path is None:
        run, name = run_of(options.model_name), Path(options.model_name).resolve().name
        if run is None:
            return None
        path = run / ("exact_match.json" if name == "final" else f"exact_match_{name}.json")
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file.")
    try:  # now, not when the answers are there
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(1 << 20))  # a few hundred answers
    except OSError as error:
        raise UserError(
            f"--output {path} cannot be written ({error.strerror}); give a file in a folder that is yours and has room."
        ) from error
    return path


def main() -> int:
    """Evaluate, print, write."""
    options = parse(sys.argv[1:])
    # After the parser: --help and mistakes answer without loading torch.
    from llm_fp8.distributed.process_group import own_device
    from llm_fp8.observability.provenance import collect_provenance
    from llm_fp8.tools.evaluate_checkpoint import data_options, evaluate_exact_match_folder
    from llm_fp8.train.generate import generation_dtype
    from llm_fp8.utils.console import quiet_libraries

    quiet_libraries()
    path, started = output_file(options), time.perf_counter()
    changes = {name: getattr(options, name) for name in DATA_OPTIONS if getattr(options, name) is not None}
    result = evaluate_exact_match_folder(
        options.model_name,
        num_problems=options.num_problems,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        changes=changes,
        say=lambda text: print(text, flush=True),
    )
    low, high = result.interval()
    unanswered = sum(answer.extracted is None for answer in result.answers)
    print(
        f"exact match: {result.share:.1%} ({result.num_correct} of {len(result.answers)}; 95% interval {low:.1%} to "
        f"{high:.1%}), {unanswered} without a final answer"
    )
    if path is not None:
        data = data_options(options.model_name, changes)
        write_json_atomic(
            path,
            {
                "model": options.model_name,
                "data": {name: getattr(data, name) for name in DATA_OPTIONS},
                "exact_match": result.share,
                "wilson_95": [low, high],
                "num_correct": result.num_correct,
                "num_problems": len(result.answers),
                "max_new_tokens": options.max_new_tokens,
                "batch_size": options.batch_size,
                "dtype": str(generation_dtype(own_device())),
                "time_s": time.perf_counter() - started,
                "provenance": collect_provenance(sys.argv),
                "answers": [dataclasses.asdict(answer) for answer in result.answers],
            },
        )
        print(f"answers: {path}")
    else:
        print("the answers are kept nowhere, because the model comes from no run; --output FILE keeps them")
    return 0
