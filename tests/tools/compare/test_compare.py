"""The comparison's statistics, verdicts, flags and plans, on figures of our choosing."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare import cli
from llm_fp8.tools.compare.differences import Difference, find_differences
from llm_fp8.tools.compare.figures import CertificateState, LossGap, VariantFigures, certificate_state, variant_figures
from llm_fp8.tools.compare.launch import (
    claim_folder,
    command_line,
    default_folder,
    failure_reason,
    launch,
    make_slots,
    only_launcher,
    plan_runs,
    set_aside,
)
from llm_fp8.tools.compare.page import render_page
from llm_fp8.tools.compare.report import Failure, compare, table_rows
from llm_fp8.tools.compare.run_record import RunRecord, read_run_folder
from llm_fp8.tools.compare.statistics import Interval, PairedAnswers
from llm_fp8.tools.compare.variants import parse_variants, variant_words
from llm_fp8.tools.compare.verdict import Verdict, judge
from llm_fp8.utils.errors import UserError
from tests.support import small
from tests.support.made_up_runs import PROVENANCE, made_up_run, precision_of, write_run_folder

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compare_performance.py"

# ---- figures of variants ----


def three(variant: str, rate: float, losses: list[float], **changes: Any) -> list[RunRecord]:
    """Runs of seeds 1 to 3."""
    return [made_up_run(variant, seed, rate, loss, **changes) for seed, loss in enumerate(losses, start=1)]


def test_the_figures_of_an_arm():
    base = three("bf16", 100_000, [1.00, 1.04, 1.02])
    own = three("delayed", 130_000, [1.01, 1.05, 1.03])
    figures = variant_figures("delayed", own, base)
    assert figures.tokens_per_s.value == pytest.approx(130_000, rel=0.01)
    assert 1.28 < figures.speedup.low < figures.speedup.value < figures.speedup.high < 1.32
    assert figures.peak_memory_gib == 37.0 and figures.energy_j_per_million_tokens == pytest.approx(6000 / 1.3)
    assert figures.loss_gap.mean == pytest.approx(0.01)
    assert figures.effective == ["fp8 delayed"] and figures.certificate.state == "certified"
    # bf16's runs end at their final loss; ours ends 0.01 above, so it never gets there.
    assert figures.equal_loss_time.loss == "held-out" and list(figures.equal_loss_time.by_seed_s.values()) == [None] * 3
    better = variant_figures("delayed", three("delayed", 130_000, [0.8, 0.8, 0.8]), base)
    reference = variant_figures("bf16", base, base)
    reached, whole = (of.equal_loss_time.by_seed_s[1] for of in (better, reference))
    assert 0 < reached < whole == pytest.approx(60 * 8192 / 100_000, rel=0.8)
    assert reached == pytest.approx(own[0].wall_times_s[44], rel=0.02), (
        "the evaluation after step 45 is the first at or below"
    )


def test_speeds_are_paired_by_seed():
    """Runs without a measured speed must not shift the pairs."""
    base = [made_up_run("bf16", seed, rate) for seed, rate in ((1, 1e5), (2, 2e5), (3, 4e5))]
    own = [made_up_run("delayed", seed, 1.3 * rate) for seed, rate in ((1, 1e5), (2, 2e5), (3, 4e5))]
    bare = [{"step": s["step"], "loss": s["loss"]} for s in base[2].steps]
    figures = variant_figures(
        "delayed",
        [dataclasses.replace(own[0], steps=bare), *own[1:]],
        [*base[:2], dataclasses.replace(base[2], steps=bare)],
    )
    assert figures.speedup.low < 1.3 < figures.speedup.high and figures.speedup.high > 10, "not pairs, so Welch's"
    same = variant_figures("delayed", own, base)
    assert same.speedup.high - same.speedup.low < 0.05


def test_without_evaluations_during_training_the_training_loss_times_the_arms():
    final_only = [
        dataclasses.replace(run, evaluations=run.evaluations[-1:]) for run in three("bf16", 1e5, [1.0, 1.0, 1.0])
    ]
    own = [dataclasses.replace(run, evaluations=[]) for run in three("delayed", 2e5, [1.0, 1.0, 1.0])]
    figures = variant_figures("delayed", own, final_only)
    assert figures.equal_loss_time.loss == "training" and figures.loss_gap is None
    reference = variant_figures("bf16", final_only, final_only)
    assert figures.equal_loss_time.by_seed_s[1] == pytest.approx(reference.equal_loss_time.by_seed_s[1] / 2, rel=0.2)
    assert "not measured" in table_rows([figures])[0]


def test_what_was_not_measured_is_said_and_not_zero():
    keys = ("peak_memory_gib", "energy_j_per_million_tokens")
    bare = [
        dataclasses.replace(
            run, steps=[{k: v for k, v in step.items() if k not in keys} for step in run.steps], evaluations=[]
        )
        for run in three("bf16", 1e5, [1.0, 1.0, 1.0])
    ]
    figures = variant_figures("bf16", bare, bare)
    assert (
        figures.peak_memory_gib is figures.energy_j_per_million_tokens is None
        and figures.eval_loss == figures.exact_match == {}
    )
    assert table_rows([figures])[0].count("not measured") == 4  # memory, energy, eval loss, exact match


def with_steps(run: RunRecord, changes: dict[int, dict[str, float]], **more: Any) -> RunRecord:
    """`run` with entries of some of its steps changed."""
    steps = [{**step, **changes.get(int(step["step"]), {})} for step in run.steps]
    return dataclasses.replace(run, steps=steps, **more)


def test_the_recorded_step_and_the_start_of_each_process_do_not_count_in_speed_and_time():
    run = made_up_run()
    slow = {"step_time_s": 99.0, "tokens_per_s": 1.0}
    recorded = with_steps(run, {1: slow, 13: {**slow, "num_gemm_kernels": 72}})
    assert [step["step"] for step in recorded.measured_steps] == [11, 12, *range(14, 61)]
    assert min(recorded.step_rates) > 90_000 and recorded.wall_times_s[-1] < 12
    resumed = with_steps(run, {number: slow for number in range(31, 41)}, resumes=[{"resumed_after_step": 30}])
    assert [step["step"] for step in resumed.measured_steps] == [*range(11, 31), *range(41, 61)]
    assert min(resumed.step_rates) > 90_000


def test_the_copy_of_the_model_that_answers_problems_is_not_in_the_peak_of_training():
    run = with_steps(made_up_run(), {step: {"peak_memory_gib": 45.0} for step in range(16, 61)})
    assert run.peak_memory_gib == 45.0
    answering = [{**evaluation, "eval_exact_match": 0.5} for evaluation in run.evaluations]
    assert dataclasses.replace(run, evaluations=answering).peak_memory_gib == 37.0


def test_losses_and_times_that_are_not_numbers_confound_no_more_than_their_own():
    base, own = three("bf16", 1e5, [1.0, 1.04, 1.02]), three("delayed", 1.3e5, [1.0, 1.04, 1.02])

    def diverged(run: RunRecord) -> RunRecord:
        return dataclasses.replace(
            run, evaluations=[*run.evaluations[:-1], {**run.evaluations[-1], "eval_loss": math.nan}]
        )

    assert compare([*base, diverged(own[0]), *own[1:]]).verdicts["delayed"].conclusion == "worse"
    without_one = compare([diverged(base[0]), *base[1:], *own])
    assert without_one.verdicts["delayed"].conclusion == "too few seeds" and list(
        without_one.arms[1].loss_gap.by_seed
    ) == [2, 3]
    assert list(without_one.arms[1].equal_loss_time.by_seed_s) == [2, 3], "not a loss that was never reached"
    without_any = compare([*map(diverged, base), *own])
    assert without_any.arms[1].equal_loss_time is None
    assert "no bf16 run of the same seed with a finite one" in without_any.verdicts["delayed"].sentences[1]
    bare = [
        dataclasses.replace(run, steps=[{"step": s["step"], "loss": s["loss"]} for s in run.steps])
        for run in [*base, *own]
    ]
    comparison = compare(bare)
    assert comparison.arms[1].equal_loss_time is None and comparison.verdicts["delayed"].conclusion == "speed unknown"
    points = re.findall(r'points="([^"]*)"', render_page(comparison))
    assert points and all(re.fullmatch(r"(\d+,\d+ ?)+", piece) for piece in points), "what is not finite is a gap"


# ---- verdicts, a test per branch ----

REFERENCE = variant_figures("bf16", three("bf16", 100_000, [1.00, 1.04, 1.02]), [])
GOOD = variant_figures(
    "delayed", three("delayed", 130_000, [1.01, 1.03, 1.02]), three("bf16", 100_000, [1.00, 1.04, 1.02])
)
GAP = LossGap(0.0, -0.002, 0.002, {1: 0.001, 2: -0.001, 3: 0.0})
ONE_SEED = LossGap(0.0, None, None, {1: 0.0})
LEANING = {1: 0.001, 2: 0.003, 3: 0.002}
BETTER = {1: -0.05, 2: -0.05, 3: -0.05}


def answers(only_reference: int, only_other: int) -> PairedAnswers:
    """Of seeds that agree."""
    difference = (only_other - only_reference) / 500
    ends = (difference - 0.02, difference + 0.02)
    return PairedAnswers(500, only_reference, only_other, only_reference, only_other, *ends)


def verdict(differences: list[Difference] | None = None, reference: VariantFigures | None = REFERENCE, **changes: Any):
    return judge(dataclasses.replace(GOOD, **{"loss_gap": GAP, **changes}), reference, differences or [])


def said(given: Verdict) -> str:
    return " ".join(given.sentences)


def test_verdict_use_it():
    given = verdict(answers=answers(22, 20), speedup=Interval(1.31, 1.29, 1.33), loss_gap=GAP)
    assert given.conclusion == "use it"
    assert given.quality == "as good" and given.sentences == [
        "fp8 delayed is faster: 1.31 times the speed of bf16 (1.29 to 1.33).",
        "Its eval loss differs by +0.0000 nats/token (-0.0020 to +0.0020 over 3 seeds), within the margin of 0.005; "
        "exact match differs by -0.4 points (p = 0.88).",
        "Use it.",
    ]


def test_worse_in_every_seed_is_no_recommendation():
    given = verdict(loss_gap=LossGap(0.002, 0.0005, 0.0035, LEANING))
    assert given.conclusion == given.quality == "slightly worse"
    assert given.sentences[1].endswith("within the margin of 0.005, and is higher in every seed.")
    assert given.sentences[2].startswith("Its loss is worse in every seed")
    assert "higher in every seed" not in said(verdict(loss_gap=GAP))


def test_the_margin_is_the_callers():
    own = dataclasses.replace(GOOD, loss_gap=GAP)
    assert judge(own, REFERENCE, [], margin=0.001).conclusion == "not shown"
    far = dataclasses.replace(GOOD, loss_gap=LossGap(0.02, 0.018, 0.022, LEANING))
    assert judge(far, REFERENCE, []).conclusion == "worse"
    assert judge(far, REFERENCE, [], margin=0.03).conclusion == "slightly worse"


@pytest.mark.parametrize(
    ("changes", "conclusion", "words"),
    [
        ({"seeds": []}, "failed", "no run finished"),
        (
            {"fallback_reasons": ["mxfp8 is not available"], "effective": ["fp8 delayed"]},
            "fell back",
            "fp8 delayed ran in its place",
        ),
        (
            {"certificate": CertificateState("failed", ["0 fp8 kernels"])},
            "not certified",
            "certificate failed (0 fp8 kernels)",
        ),
        ({"certificate": CertificateState("missing", [])}, "not certified", "No certificate shows"),
        ({"certificate": CertificateState("undetermined", ["names"])}, "not certified", "undetermined (names)"),
        ({"loss_gap": LossGap(0.05, 0.04, 0.06, LEANING)}, "worse", "worse by more than the margin of 0.005"),
        (
            {"loss_gap": LossGap(-0.05, -0.06, -0.04, BETTER)},
            "use it",
            "within the margin",
        ),
        (
            {"loss_gap": LossGap(0.004, -0.001, 0.009, LEANING)},
            "not shown",
            "does not show it within the marg",
        ),
        ({"answers": answers(60, 20)}, "worse", "differs by -8.0 points (p < 0.001)"),
        ({"answers": answers(20, 60)}, "use it", "differs by +8.0 points"),
        # One of both tests alone, or every seed, is no proof and no recommendation.
        (
            {"answers": dataclasses.replace(answers(60, 20), low=-0.2, high=0.04)},
            "not shown",
            "differs by -8.0 points (p < 0.001)",
        ),
        ({"answers": dataclasses.replace(answers(22, 20), low=-0.005, high=-0.003)}, "not shown", "(p = 0.88)"),
        ({"answers": dataclasses.replace(answers(22, 20), worse_in_every_seed=True)}, "not shown", "(p = 0.88)"),
        ({"speedup": Interval(0.8, 0.79, 0.81)}, "slower", "is slower: 0.80 times the speed of bf16 (0.79 to 0.81)"),
        ({"speedup": Interval(1.0, 0.98, 1.02)}, "not faster", "is not measurably faster"),
        ({"speedup": None}, "speed unknown", "has no measured speed"),
        ({"loss_gap": ONE_SEED}, "too few seeds", "nats/token in one seed. Too few seeds to tell, run at least 3"),
        ({"speedup": Interval(1.3, None, None)}, "too few seeds", "ran at 1.30 times the speed of bf16 in one seed"),
        ({"loss_gap": None, "eval_loss": {}}, "quality unknown", "eval loss was not measured"),
        ({"loss_gap": None}, "quality unknown", "no bf16 run of the same seed"),
        ({"loss_gap": dataclasses.replace(GAP, mean=math.nan)}, "worse", "eval loss is not finite"),
        ({"num_failed": 1}, "not shown", "(1 of 4 runs failed)"),
    ],
)
def test_verdict_of_other_figures(changes, conclusion, words):
    given = verdict(**changes)
    assert given.conclusion == conclusion and words in said(given), given


@pytest.mark.parametrize(
    ("changes", "quality"),
    [
        ({}, "as good"),
        ({"speedup": Interval(0.8, 0.79, 0.81)}, "as good"),
        ({"loss_gap": LossGap(0.05, 0.04, 0.06, LEANING), "speedup": Interval(0.8, 0.79, 0.81)}, "worse"),
        ({"loss_gap": ONE_SEED}, "not shown"),
        ({"loss_gap": None}, "not shown"),
        ({"num_failed": 1}, "not shown"),
    ],
)
def test_quality_is_judged_whatever_the_speed(changes, quality):
    assert verdict(**changes).quality == quality
    assert judge(REFERENCE, REFERENCE, []).quality == "baseline"
    differs = [Difference("optim.learning_rate", "quality", {}, ["delayed"])]
    assert verdict(differs, **changes).quality == "not shown"


def test_verdict_without_or_with_a_broken_reference():
    assert verdict(reference=None).conclusion == "no reference"
    assert verdict(reference=dataclasses.replace(REFERENCE, seeds=[])).conclusion == "no reference"
    broken = dataclasses.replace(REFERENCE, certificate=CertificateState("failed", ["fp8 kernels ran"]))
    given = verdict(reference=broken)
    assert given.conclusion == "not comparable" and "fp8 kernels ran" in said(given)
    own = judge(broken, broken, [])
    assert own.conclusion == "reference" and "fp8 kernels ran" in said(own)


@pytest.mark.parametrize(
    ("effect", "conclusion", "words"),
    [
        ("all", "not comparable", "the runs differ in optim.learning_rate"),
        ("speed", "speed unknown", "cannot be compared in speed"),
        ("quality", "quality unknown", "quality cannot be compared"),
        ("note", "use it", "Use it."),
    ],
)
def test_verdict_of_runs_that_differ(effect, conclusion, words):
    given = verdict([Difference("optim.learning_rate", effect, {}, ["delayed"])])
    assert given.conclusion == conclusion and words in said(given)
    assert verdict([Difference("optim.learning_rate", effect, {}, ["current"])]).conclusion == "use it", (
        "another variant's concern"
    )


def test_the_certificate_of_a_variant_is_that_of_its_worst_run():
    good, open_, bad = ({"verdict": v, "reasons": [v]} for v in ("certified", "undetermined", "failed"))
    assert certificate_state([good, good]).state == "certified"
    assert (
        certificate_state([good, None]).state
        == certificate_state([None]).state
        == certificate_state([]).state
        == "missing"
    )
    assert certificate_state([good, open_, None]) == CertificateState("undetermined", ["undetermined"])
    assert certificate_state([good, bad, open_]) == CertificateState("failed", ["failed"])
    assert certificate_state([{"verdict": "splendid"}]).state == "undetermined"


# ---- flags ----


def changed(run: RunRecord, section: str, path: list[str], value: Any) -> RunRecord:
    """`run` with one entry of a nested section replaced."""
    tree = json.loads(json.dumps(getattr(run, section)))
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return dataclasses.replace(run, **{section: tree})


@pytest.mark.parametrize(
    ("section", "path", "value", "field", "effect"),
    [
        ("config", ["optim", "learning_rate"], 3e-4, "config.optim.learning_rate", "all"),
        ("config", ["data", "max_seq_length"], 2048, "config.data.max_seq_length", "all"),
        ("config", ["parallel", "sharding_mode"], "ddp", "config.parallel.sharding_mode", "speed"),
        ("config", ["run", "log_every"], 7, "config.run.log_every", "note"),
        ("config", ["run", "eval_batches"], 7, "config.run.eval_batches", "quality"),
        ("effective", ["global_batch_size"], 8, "effective.global_batch_size", "all"),
        ("data", ["num_tokens"], 5, "data.num_tokens", "all"),
        ("precision", ["optimizer"], "adamw_8bit", "optimizer", "all"),
        ("provenance", ["gpus"], [{"name": "NVIDIA H100"}], "provenance.gpus", "speed"),
        ("provenance", ["packages", "torch"], "2.13.0", "provenance.packages.torch", "all"),
        ("provenance", ["git", "commit"], "1" * 40, "provenance.git.commit", "all"),
        ("provenance", ["driver"], "999", "provenance.driver", "speed"),
        (
            "provenance",
            ["environment", "CUDA_VISIBLE_DEVICES"],
            "3",
            "provenance.environment.CUDA_VISIBLE_DEVICES",
            "note",
        ),
    ],
)
def test_a_field_that_differs_is_flagged_with_what_it_confounds(section, path, value, field, effect):
    base, own = made_up_run("bf16"), made_up_run("delayed")
    assert find_differences([base, own]) == [], "runs that differ in their variant alone"
    (found,) = find_differences([base, changed(own, section, path, value)])
    assert (found.field, found.effect, found.arms) == (field, effect, ["delayed"])
    assert sorted(label for labels in found.values.values() for label in labels) == ["bf16 seed 1", "delayed seed 1"]


def test_what_is_each_runs_own_is_not_a_difference():
    runs = [changed(made_up_run("bf16", seed), "config", ["run", "output_dir"], f"runs/{seed}") for seed in (1, 2)]
    assert find_differences(runs) == []


def test_a_reference_that_does_not_agree_with_itself_concerns_every_arm():
    runs = [
        made_up_run("bf16", 1),
        changed(made_up_run("bf16", 2), "config", ["optim", "learning_rate"], 1.0),
        made_up_run("delayed", 1),
    ]
    (found,) = find_differences(runs)
    assert found.arms == ["bf16", "delayed"]


def test_other_rows_and_other_weights_are_seen_in_the_figures_themselves():
    base, own = made_up_run("bf16"), made_up_run("delayed")
    steps = [{**step, "tokens_seen": step["tokens_seen"] + (step["step"] > 30)} for step in own.steps]
    (found,) = find_differences([base, dataclasses.replace(own, steps=steps)])
    assert found.effect == "all" and found.field == "tokens seen with seed 1 after step 31"
    steps = [{**step, "loss": step["loss"] * (1.2 if step["step"] == 1 else 1)} for step in own.steps]
    (found,) = find_differences([base, dataclasses.replace(own, steps=steps)])
    assert found.effect == "quality" and "first step" in found.field


def test_within_a_variant_the_precision_must_be_one():
    first = made_up_run("delayed", 1)
    other = changed(made_up_run("delayed", 2), "config", ["precision", "fp8_last_bf16_layers"], 2)
    (found,) = find_differences([made_up_run("bf16", 1), made_up_run("bf16", 2), first, other])
    assert found.field == "config.precision.fp8_last_bf16_layers" and found.arms == ["delayed"]
    fell_back = dataclasses.replace(made_up_run("mxfp8", 2), precision=precision_of("mxfp8", "delayed"))
    found = find_differences([made_up_run("mxfp8", 1), fell_back])[0]
    assert found.field == "effective precision" and found.effect == "all"


def test_shared_hardware_resumes_uncommitted_code_and_missing_sections_are_flagged():
    dirty = {**PROVENANCE, "git": {**PROVENANCE["git"], "dirty": True}}
    runs = [
        made_up_run("bf16", provenance=dirty),
        made_up_run("delayed", provenance=dirty, resumes=[{"resumed_after_step": 30}], data={}),
    ]
    alone = find_differences(
        [made_up_run(variant) for variant in ("bf16", "block", "delayed")], [("block seed 1", "delayed seed 1")]
    )
    assert [d.arms for d in alone] == [["block", "delayed"]]
    with_reference = find_differences(
        [made_up_run(variant) for variant in ("bf16", "block", "delayed")], [("bf16 seed 1", "block seed 1")]
    )
    assert [d.arms for d in with_reference] == [["bf16", "block", "delayed"]], "every variant is held against it"
    found = {d.field: d for d in find_differences(runs, [("bf16 seed 1", "delayed seed 1")])}
    assert found["hardware shared while running"].effect == "speed"
    assert found["hardware shared while running"].arms == ["bf16", "delayed"]
    assert found["resumed during the run"].values == {"yes": ["delayed seed 1"]}
    assert len(found["code had uncommitted changes"].values["yes"]) == 2
    other = {**PROVENANCE, "driver": "999"}
    (resumed,) = find_differences(
        [made_up_run("bf16"), made_up_run("delayed", resumes=[{"resumed_after_step": 9, "provenance": other}])]
    )[:1]
    assert (resumed.field, resumed.effect, resumed.arms) == ("provenance.driver when resumed", "speed", ["delayed"])
    assert found["data: not kept by the source, so not compared"].effect == "note" and len(found) == 4


# ---- run folders ----


def test_a_folder_gives_back_what_was_written_and_the_answers_of_its_last_evaluation(tmp_path):
    run = made_up_run("current", 3)
    answers = {15: {1: True, 2: True}, 60: {1: True, 2: False}, 9: {1: True}}
    read = read_run_folder(write_run_folder(tmp_path / "run", run, answers))
    assert (
        read.steps == run.steps and read.evaluations == run.evaluations and read.variant == "current" and read.seed == 3
    )
    assert read.answers == {"1: problem 1": True, "2: problem 2": False} and read.exact_match == 0.5
    assert read.certificate == {"verdict": "certified", "reasons": []}
    (tmp_path / "run" / "certificate.json").write_text('{"verdict": "failed"}')
    assert read_run_folder(tmp_path / "run").certificate == {"verdict": "failed"}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().replace('"loss": 4.0', '"loss": "NaN"')
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    assert math.isnan(read_run_folder(tmp_path / "run").steps[0]["loss"])


def test_answers_decide_through_whole_folders(tmp_path):
    """The variant answers 40 problems fewer: worse, whatever its loss."""
    records = []
    for variant, num_right in (("bf16", 70), ("delayed", 30)):
        for seed in (1, 2, 3):
            answers = {60: {row: row < num_right for row in range(100)}}
            folder = write_run_folder(
                tmp_path / f"{variant}{seed}", made_up_run(variant, seed, 1e5 if variant == "bf16" else 1.3e5), answers
            )
            records.append(read_run_folder(folder))
    comparison = compare(records)
    assert comparison.verdicts["delayed"].conclusion == "worse"
    found = comparison.arms[1].answers
    assert found.worse_in_every_seed
    alike = dataclasses.replace(found, low=None, high=None, worse_in_every_seed=False)
    assert alike == PairedAnswers(300, 120, 0, 40, 0)
    assert found.low == pytest.approx(-0.4) == found.high
    assert list(comparison.verdicts) == ["delayed", "bf16"] and [variant.arm for variant in comparison.arms] == [
        "bf16",
        "delayed",
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("summary.json", None, "there is no summary.json in it, so the run did not finish"),
        ("run.json", None, "it is not a run's --output_dir"),
        ("run.json", "{", "is not valid JSON"),
        ("run.json", "{}", "run.json lacks config"),
        (
            "run.json",
            '{"config": {"optim": {"seed": 1}}, "precision": {"requested": "bf16"}}',
            "lacks precision.effective",
        ),
        ("metrics.jsonl", '{"step": 59, "loss": 1.0}\n', "ends at step 59 and summary.json at step 60"),
        ("metrics.jsonl", b"\xff\xfe", "cannot be read"),
        ("metrics.jsonl", "", "holds no optimizer step"),
        ("metrics.jsonl", '{"step": 1}\nx\n', "line 2 is not valid JSON"),
        ("summary.json", '{"steps": 3, "stopped_by": "SIGTERM"}', "stopped by SIGTERM after step 3"),
        ("summary.json", '{"steps": 3, "failed": "no fp8 kernel ran"}', "failed after step 3: no fp8 kernel ran"),
    ],
)
def test_a_folder_that_is_not_a_finished_run_is_refused(tmp_path, name, content, expected):
    folder = write_run_folder(tmp_path / "run", made_up_run())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=expected):
        read_run_folder(folder)


def test_two_runs_of_one_variant_and_seed_are_refused():
    with pytest.raises(UserError, match=r"are of the same variant and seed \(bf16 seed 1\)"):
        compare([made_up_run("bf16", 1), made_up_run("bf16", 1)])


def test_a_fallback_is_said_in_the_variants_row_and_verdict():
    fell_back = [made_up_run("mxfp8", seed, 1.3e5, precision=precision_of("mxfp8", "delayed")) for seed in (1, 2, 3)]
    comparison = compare([*three("bf16", 1e5, [1.0, 1.1, 1.2]), *fell_back])
    row = table_rows(comparison.arms)[1]
    assert row[:2] == ["fp8 mxfp8", "fp8 delayed (fell back)"]
    assert comparison.verdicts["mxfp8"].conclusion == "fell back"
    assert "not available on NVIDIA H200" in said(comparison.verdicts["mxfp8"])


def test_a_variant_whose_runs_all_failed_is_still_reported():
    comparison = compare(
        [made_up_run("bf16")], [Failure("block", 1, "exit code 1: boom", "log")], variant_order=["bf16", "block"]
    )
    assert comparison.verdicts["block"].conclusion == "failed" and comparison.arms[1].num_failed == 1


def test_long_runs_are_thinned_to_means_over_all_their_steps():
    run = made_up_run()
    steps = [{**run.steps[-1], "step": n, "tokens_per_s": 100.0 + n % 2} for n in range(1, 1501)]
    (curve,) = compare([dataclasses.replace(run, steps=steps, evaluations=[])]).curves
    assert len(curve["step"]) == len(curve["tokens_per_s"]) == 500 and curve["step"][:2] == [3, 6]
    assert curve["step"][-1] == 1500
    assert {round(value, 4) for value in curve["tokens_per_s"]} == {100.3333, 100.6667}


# ---- variants and plans ----


def test_variants_by_name():
    assert parse_variants("fp8, mxfp8,bf16") == ["bf16", "delayed", "mxfp8"]
    for text, words in (("", "is empty"), ("fp4", "fp4 is unknown"), ("fp8,delayed", "names delayed twice")):
        with pytest.raises(UserError, match=words):
            parse_variants(text)


def test_options_of_fp8_reach_only_the_variants_in_which_they_take_effect():
    words = (
        "--max_steps 3 --fp8_strict --amax_history_len 16 --fp8_format E4M3 --fp8_last_bf16_layers=2 --use_te".split()
    )
    plain = ["--max_steps", "3", "--use_te"]
    fp8 = ["--fp8_strict", "--fp8_last_bf16_layers", "2"]
    assert variant_words("bf16", words) == [*plain, "--mixed_precision", "bf16"]
    scenario = ["--mixed_precision", "fp8", "--fp8_scenario"]
    assert sorted(variant_words("nvfp4", words)) == sorted([*plain, *fp8, *scenario, "nvfp4"])
    assert sorted(variant_words("mxfp8", words)) == sorted([*plain, *fp8, "--fp8_format", "E4M3", *scenario, "mxfp8"])
    delayed = variant_words("delayed", words)
    assert parse_config(delayed).precision.amax_history_len == 16 and parse_config(delayed).precision.fp8_strict


def test_an_option_of_fp8_that_no_variant_takes_is_refused(tmp_path):
    for train, arms, said in (
        (
            "--fp8_strict",
            ["bf16", "no"],
            "--fp8_strict has no effect on bf16 and no; leave it out, or add one of delayed, ",
        ),
        (
            "--amax-history-len=16",
            ["bf16", "mxfp8"],
            "--amax_history_len has no effect on bf16 and mxfp8; .* delayed",
        ),
    ):
        with pytest.raises(UserError, match=f"^--train: {said}"):
            plan_runs(train, arms, [1], 1, tmp_path)
    assert len(plan_runs("--fp8_strict", ["bf16", "mxfp8"], [1], 1, tmp_path).runs) == 2


def test_variants_take_turns_within_each_seed_and_differ_in_precision_alone(tmp_path):
    plan = plan_runs("--max_steps 3 --use_te --use_wandb", ["bf16", "delayed"], [1, 2], 1, tmp_path / "out")
    assert [run.name for run in plan.runs] == ["bf16-seed1", "delayed-seed1", "bf16-seed2", "delayed-seed2"]
    base, own = (parse_config(list(run.words)) for run in plan.runs[:2])
    assert base.run.wandb_run_name == "bf16-seed1"
    assert dataclasses.replace(own, precision=base.precision, run=base.run) == base
    assert command_line(plan, plan.runs[0])[1].endswith("train_fp8.py")
    several = plan_runs("--sharding_mode ddp", ["bf16"], [1], 4, tmp_path)
    command = command_line(several, several.runs[0])
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    assert command[5].endswith("train_multi_gpu.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("--seed 3", "--seed is set by the comparison itself"),
        ("--resume-from /x", "--resume_from is set by the comparison itself"),
        ("--mixed_precision=fp8", "--mixed_precision is set by the comparison itself"),
        ("--batch_size 0", "--train: --batch_size must be at least 1"),
        ("--batch_size auto", "--train: --batch_size auto would give each precision batches of its own"),
        ("--fp8_params", "--fp8_params changes what is stored"),
        ("--dry_run", "--dry_run trains nothing that could be compared"),
        ("--model_name 'x", "No closing quotation"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path, train, expected):
    with pytest.raises(UserError, match=expected):
        plan_runs(train, ["bf16"], [1], 2, tmp_path)


def test_a_folder_belongs_to_one_comparison(tmp_path):
    plan = plan_runs("--max_steps 3", ["bf16"], [1], 1, tmp_path / "out")
    claim_folder(plan)
    claim_folder(
        plan_runs("--max_steps  3", ["bf16", "no"], [1, 2], 1, tmp_path / "out")
    )  # more variants and seeds go on in it
    for train, num_gpus, said in (
        ("--max_steps 4", 1, "--train"),
        ("--max_steps 3", 2, "--num_gpus"),
        ("--max_steps 4", 2, "--train and --num_gpus"),
    ):
        with pytest.raises(UserError, match=f"holds a comparison with another {said} \\("):
            claim_folder(plan_runs(train, ["bf16"], [1], num_gpus, tmp_path / "out"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no comparison"):
        claim_folder(dataclasses.replace(plan, folder=tmp_path / "taken"))
    assert (
        default_folder("--max_steps 3", 1)
        == default_folder("--max_steps  '3'", 1)
        != default_folder("--max_steps 3", 2)
    )


def test_runs_get_gpus_of_their_own_unless_told():
    four = ["0", "1", "2", "3"]
    assert make_slots(four, 2, 2, share=False) == [("0", "1"), ("2", "3")]
    assert make_slots(four, 1, 1, share=False) == [("0",)]
    assert make_slots(["0"], 1, 2, share=True) == [("0",), ("0",)]
    assert make_slots([], 2, 1, share=False) == [()]
    for arguments, words in (
        ((["0"], 1, 2, False), "--share_gpus"),
        (([], 1, 2, False), "no GPU"),
        ((["0", "1"], 3, 1, False), "there are 2 GPUs"),
    ):
        with pytest.raises(UserError, match=words):
            make_slots(*arguments)


@pytest.mark.slow
def test_runs_in_slots_of_their_own_see_their_gpu_and_a_failure_stops_no_other(tmp_path, monkeypatch):
    """The scheduler with a stand-in for the training script, which would need GPUs."""
    stand_in = (
        "import json, os, pathlib, sys, time; folder = pathlib.Path(sys.argv[2]); name = sys.argv[1]; time.sleep(0.5)\n"
        "if name == 'no': sys.exit('error: it broke')\n"
        "folder.mkdir(parents=True); (folder / 'gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "(folder / 'summary.json').write_text(json.dumps({'steps': 1}))\n"
    )
    monkeypatch.setattr(
        "llm_fp8.tools.compare.launch.command_line",
        lambda plan, run: [sys.executable, "-c", stand_in, run.variant, str(plan.run_folder(run))],
    )
    said: list[str] = []
    plan = plan_runs("--max_steps 3", ["bf16", "no", "delayed"], [1], 1, tmp_path)
    failures, overlaps = launch(plan, [("4",), ("7",)], said.append)
    (failure,) = failures
    assert (failure.arm, failure.seed, failure.reason) == ("no", 1, "exit code 1: error: it broke")
    assert overlaps == []
    gpus = {run.variant: plan.run_folder(run) / "gpu" for run in plan.runs}
    assert gpus["bf16"].read_text() == "4" and gpus["delayed"].read_text() in ("4", "7")
    failures_again, _ = launch(plan, [("4",), ("4",)], said.append)
    assert len(failures_again) == 1 and sum("finished earlier" in line for line in said) == 2
    shared = plan_runs("--max_steps 3", ["bf16", "delayed"], [8], 1, tmp_path)
    assert launch(shared, [("4",), ("4",)], said.append)[1] == [("bf16 seed 8", "delayed seed 8")]
    assert launch(shared, [("4",)], said.append)[1] == [("bf16 seed 8", "delayed seed 8")], "remembered"


def test_a_signal_stops_the_runs_before_the_script_and_no_two_work_in_one_folder(tmp_path, monkeypatch, capsys):
    """SIGTERM to the script, whose run is a stand-in that saves on SIGTERM; a second script in the folder meanwhile."""
    stand_in = (
        "import pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True)\n"
        "def save(number, frame):\n    time.sleep(0.3); (folder / 'saved').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save); (folder / 'begun').touch(); time.sleep(60)\n"
    )
    monkeypatch.setattr(
        "llm_fp8.tools.compare.launch.command_line",
        lambda plan, run: [sys.executable, "-c", stand_in, str(plan.run_folder(run))],
    )
    run = tmp_path / "runs" / "bf16-seed1"
    monkeypatch.setattr(cli, "usable_gpus", lambda given: [])
    options = [
        "--train",
        "--use_te",
        "--arms",
        "bf16",
        "--seeds",
        "1",
        "--output",
        str(tmp_path),
    ]  # a single word is no option of the script
    monkeypatch.setattr(sys, "argv", ["compare_performance.py", *options])
    plan = plan_runs("--use_te", ["bf16"], [1], 1, tmp_path)
    refused: list[bool] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not (run / "begun").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        with (
            pytest.raises(UserError, match="another comparison, or a run of one, is at work"),
            only_launcher(plan.folder),
        ):
            pass
        refused.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert cli.main() == 143
    thread.join()
    assert (
        (run / "saved").exists() and refused and "stopped by SIGTERM; the same command again" in capsys.readouterr().out
    )
    with only_launcher(plan.folder):
        pass  # free again


def test_the_reason_of_a_failure_is_its_last_error():
    assert (
        failure_reason("$ x --error\nTraceback\nRuntimeError: CUDA error: out\nbye\n", 1)
        == "exit code 1: RuntimeError: CUDA error: out"
    )
    assert failure_reason("$ x\nlast words\n", -9) == "killed by SIGKILL: last words"
    torchrun = (
        "[rank0]: ValueError: boom\nE1121 torch/distributed/elastic failed (exitcode: 1) local_rank: 0\nTraceback "
        "(most recent call last):\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nRoot "
        "Cause (first observed failure):\n  error_file: <N/A>\n  traceback : To enable traceback see: "
        "https://pytorch.org/docs/stable/elastic/errors.html\n=====\n"
    )
    assert failure_reason(torchrun, 1) == "exit code 1: [rank0]: ValueError: boom"
    assert failure_reason("", 1) == "exit code 1: it printed nothing"


# ---- the script's own options ----


def run_script(*options: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The script as a process of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], cwd=cwd, capture_output=True, text=True, env=environment
    )


def test_the_help_gives_each_default_once(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: bf16,fp8)" in said and "(default: None)" not in said and "(default: False)" not in said


@pytest.mark.slow
def test_mistakes_are_said_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cli, "PAIR", (tmp_path / "train_bf16", tmp_path / "train_fp8")
    )  # which this repository may hold
    (tmp_path / "a file").touch()
    for options, words in (
        ([], "give --train OPTIONS .* or run scripts/train_bf16.sh and scripts/train_fp8.sh first"),
        (["--train", "", "--runs", "x"], "without --runs and --wandb"),
        (["--runs", "x", "--seeds", "3"], "--seeds belongs to --train"),
        (["--train", "", "--seeds", "0"], "--seeds must be at least 1"),
        (["--train", "", "--share_gpus"], "--share_gpus has no effect without --parallel 2 or more"),
        (["--train", "--model_name 'x"], "--train: No closing quotation"),
        (["--train", "--max_steps 1", "--arms", "", "--output", str(tmp_path / "out")], "--arms is empty"),
        (["--runs", str(tmp_path / "none")], "no such folder"),
        (["--wandb", str(tmp_path)], "is not ENTITY/PROJECT/RUNID; .* with --runs"),
        (["--wandb", "nonsense"], "--wandb nonsense is not ENTITY/PROJECT/RUNID"),
        (["--train", "--max_steps 1", "--output", str(tmp_path / "a file" / "out")], "cannot be written to"),
        (["--train", "--max_steps 1", "--gpus", "99", "--output", str(tmp_path / "out")], "99 is not among the GPUs"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare_performance.py", *options])
        with pytest.raises(UserError, match=words):
            cli.main()
    assert not (tmp_path / "out").exists()
    done = run_script("--runs", str(tmp_path / "none"), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: --runs") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_interrupted_run_continues_from_its_checkpoint_or_begins_anew_beside_what_it_left(
    tmp_path, tiny_model, rows
):
    """Two real runs that stopped early: one saved, one did not."""
    train = (
        f"--model_name {tiny_model} --dataset_name {rows} --max_seq_length 128 --batch_size 2 --max_steps 4 "
        "--save_every 2 --no_export"
    )
    plan = plan_runs(train, ["no"], [1, 2], 1, tmp_path)
    saved, unsaved = plan.runs
    small.train(*saved.words, "--max_steps", 2, "--output_dir", plan.run_folder(saved))
    (plan.run_folder(saved) / "summary.json").unlink()
    plan.run_folder(unsaved).mkdir(parents=True)
    (plan.run_folder(unsaved) / "run.json").write_text("{}")
    assert command_line(plan, saved)[-2:] == ["--resume_from", "latest"] and "--resume_from" not in command_line(
        plan, unsaved
    )
    for run in plan.runs:
        set_aside(plan.run_folder(run))
    assert plan.run_folder(saved).exists() and not plan.run_folder(unsaved).exists()
    (kept,) = (tmp_path / "runs").glob("no-seed2.unfinished-*")
    assert (kept / "run.json").read_text() == "{}"
