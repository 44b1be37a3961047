"""The sample page of docs/tools.md from a record under benchmarks/results: what `llm-fp8 compare` writes for such runs.

    python benchmarks/comparison_page.py

The record, comparison_8b_pair.json, is of an earlier version, which took an interval from the steps of a single run.
Today's needs several seeds, so the page has none. Nor did it record parameters, batch and sequence length, which the
page has from the run's command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.predict.workload import ModelSize

from llm_fp8.config.parser import parse_config
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.tools.compare.page import render_page
from llm_fp8.tools.compare.report import Comparison
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN, judge
from llm_fp8.utils.errors import OneSentenceParser, run_script

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
RECORD = HERE / "results" / "comparison_8b_pair.json"
PAGE = HERE / "plots" / "comparison_8b_pair.html"


def sample() -> Comparison:
    """The record's figures under today's rules."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    for variant in record["arms"]:
        for figure in ("tokens_per_s", "speedup", "loss_gap"):
            if variant[figure] and len(variant["seeds"]) == 1:
                variant[figure] |= {"low": None, "high": None}
    record["provenance"] |= workload_of(record["provenance"]["of_first_run"]["command"][1:])
    comparison = TypeAdapter(Comparison).validate_python({**record, "verdicts": {}, "quality_margin": QUALITY_MARGIN})
    bf16, *others = comparison.arms
    verdicts = {own.arm: judge(own, bf16, comparison.differences) for own in (*others, bf16)}
    comparison.verdicts.update(verdicts)
    return comparison


def workload_of(words: list[str]) -> dict[str, Any]:
    """What a run with these options trains, and in a step, under the names of a comparison's provenance."""
    config = parse_config([str(ROOT / word) if word.startswith("configs/") else word for word in words])
    model = ModelSize.from_config(load_config(config.model, resolve_source(config.model)))
    return {
        "random_weights": config.model.random_init,
        "num_parameters": model.num_parameters,
        "global_batch_size": config.data.batch_size * config.optim.gradient_accumulation_steps,
        "max_seq_length": config.data.max_seq_length,
    }


def main() -> int:
    """Writes the page."""
    OneSentenceParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    PAGE.write_text(render_page(sample()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script(main)
