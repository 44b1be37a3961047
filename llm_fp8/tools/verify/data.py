"""The embedded tokenizer and dataset make batches, through the run's own code."""

from __future__ import annotations

from typing import Any

from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup

TEXT = "If 3 apples cost 6 dollars, what do 7 cost? 7 * (6 / 3) = 14"
NUM_ROWS = 64


def judge(round_trip: str, shares: dict[str, float], describe: str) -> Result:
    """`round_trip`: `TEXT` encoded and decoded. `shares`: of the first batch's positions, those that are real and
    that carry loss.
    """
    problems = Problems()
    mend = "git checkout -- llm_fp8/data/embedded && rm -rf ~/.cache/huggingface/datasets/json"
    if round_trip != TEXT:
        problems.fail(f"the tokenizer gives back '{round_trip}' for '{TEXT}'", mend)
    if not 0 < shares["supervised"] < shares["real"] <= 1:
        problems.fail(
            f"the first batch is wrong: {shares['real']:.0%} of its positions are real, {shares['supervised']:.0%} "
            "supervised",
            mend,
        )
    return problems.result(describe, facts={"round_trip": round_trip, **shares})


def check(setup: Setup) -> Result:
    """Tokenise and pack a few rows; look at the first batch."""
    from llm_fp8.config.options import Config, DataConfig
    from llm_fp8.data import prepare_data
    from llm_fp8.models.source import load_tokenizer, resolve_source

    data_options = DataConfig(
        num_of_samples=NUM_ROWS,
        max_seq_length=512,
        batch_size=2,
        packing=True,
        data_cache_dir=str(setup.scratch / "data"),
    )
    config = Config(data=data_options)
    tokenizer, _ = load_tokenizer(config.model, resolve_source(config.model))
    round_trip = tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False))
    data: Any = prepare_data(config, tokenizer)
    batch = next(iter(data.train))[0]
    shares = {
        "real": batch.num_real_tokens / batch.num_tokens,
        "supervised": batch.num_supervised_tokens / batch.num_tokens,
    }
    summary = f"{NUM_ROWS} rows tokenised and packed, {shares['supervised']:.0%} of the first batch carries loss"
    return judge(str(round_trip), shares, summary)
