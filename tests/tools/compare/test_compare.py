"""The comparison of runs: figures, verdicts, differences, plans and HTML page, for made-up and for trained runs."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from typing import Any

import pytest

from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare import cli
from llm_fp8.tools.compare.cli import parse, plan_runs
from llm_fp8.tools.compare.figures import (
    CertificateState,
    Difference,
    Gap,
    Interval,
    VariantFigures,
    certificate_state,
    find_differences,
    variant_figures,
)
from llm_fp8.tools.compare.report import Failure, compare, render_page, without_folders
from llm_fp8.tools.compare.run_record import RunRecord, parse_variants, read_run_folder, read_wandb, variant_argv
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN, judge
from llm_fp8.utils.errors import UserError
from tests.support import small
from tests.support.made_up_runs import made_up_run, precision_of, write_run_folder
from tests.support.wandb_file import only_wandb_run

TRAIN = "--max_steps 8 --eval_every 4 --eval_batches 2 --batch_size 4 --max_seq_length 128 --num_of_samples 200"
TRAIN += " --no_export"


def three_runs(variant: str, rate: float, losses: list[float], **changes: Any) -> list[RunRecord]:
    """Return a made-up run of `variant` for each loss, with seeds 1, 2, ... and a speed of about `rate` tokens/s."""
    return [made_up_run(variant, seed, rate, loss, **changes) for seed, loss in enumerate(losses, start=1)]


def test_figures_of_a_variant_are_speedup_loss_gap_memory_and_energy():
    base = three_runs("bf16", 100_000, [1.00, 1.04, 1.02])
    figures = variant_figures("delayed", three_runs("delayed", 130_000, [1.01, 1.05, 1.03]), base)
    assert figures.tokens_per_s.value == pytest.approx(130_000, rel=0.01)
    assert 1.28 < figures.speedup.low < figures.speedup.value < figures.speedup.high < 1.32
    assert figures.peak_memory_gib == 37.0 and figures.energy_j_per_million_tokens == pytest.approx(6000 / 1.3)
    assert figures.loss_gap.value == pytest.approx(0.01)
    assert figures.effective == ["fp8 delayed"] and figures.certificate.state == "certified"
    assert figures.time_to_reference_loss_s is None, "its loss stays above bf16's final loss"


def test_time_to_bf16s_final_loss_ends_at_the_first_step_that_reaches_it():
    base = three_runs("bf16", 100_000, [1.00, 1.04, 1.02])
    better = three_runs("delayed", 130_000, [0.80, 0.84, 0.82])  # reaches bf16's final loss 15 steps early
    all_steps_s = statistics.mean(sum(step["step_time_s"] for step in run.steps) for run in base)
    assert variant_figures("bf16", base, base).time_to_reference_loss_s == pytest.approx(all_steps_s)
    first_45_steps_s = statistics.mean(sum(step["step_time_s"] for step in run.steps[:45]) for run in better)
    assert variant_figures("delayed", better, base).time_to_reference_loss_s == pytest.approx(first_45_steps_s)
    assert "time to bf16&#39;s final loss" in render_page(compare([*base, *better]))


def test_speeds_are_paired_by_seed():
    """If a run has no measured speed, its pair is left out, and the other pairs still have equal seeds."""
    base = [made_up_run("bf16", seed, rate) for seed, rate in ((1, 1e5), (2, 2e5), (3, 4e5))]
    fp8 = [made_up_run("delayed", seed, 1.3 * rate) for seed, rate in ((1, 1e5), (2, 2e5), (3, 4e5))]
    without_speed = [dataclasses.replace(run, summary={}) for run in (fp8[0], base[2])]
    unpaired = variant_figures("delayed", [without_speed[0], *fp8[1:]], [*base[:2], without_speed[1]])
    paired = variant_figures("delayed", fp8, base)
    assert unpaired.speedup.low is None, "only the second seed has both speeds"
    assert paired.speedup.high - paired.speedup.low < 0.05


def test_diverged_run_is_worse_and_missing_measurements_are_none():
    base, fp8 = three_runs("bf16", 1e5, [1.0, 1.04, 1.02]), three_runs("delayed", 1.3e5, [1.0, 1.04, 1.02])
    diverged = dataclasses.replace(fp8[0], evaluations=[{**fp8[0].evaluations[-1], "eval_loss": math.nan}])
    assert compare([*base, diverged, *fp8[1:]]).verdicts["delayed"].conclusion == "worse"
    steps = [{"step": 60, "loss": 1.0}]
    unmeasured = [dataclasses.replace(run, steps=steps, summary={}, evaluations=[]) for run in base]
    figures = variant_figures("bf16", unmeasured, unmeasured)
    assert figures.peak_memory_gib is figures.energy_j_per_million_tokens is figures.tokens_per_s is None
    assert figures.time_to_reference_loss_s is None
    assert figures.eval_loss == {} and figures.exact_match_percent is None


REFERENCE = variant_figures("bf16", three_runs("bf16", 100_000, [1.00, 1.04, 1.02]), [])
GOOD = variant_figures(
    "delayed", three_runs("delayed", 130_000, [1.01, 1.03, 1.02]), three_runs("bf16", 100_000, [1.00, 1.04, 1.02])
)
GAP = Gap(0.0, -0.002, 0.002, {1: 0.001, 2: -0.001, 3: 0.0})
POSITIVE_GAPS = {1: 0.001, 2: 0.003, 3: 0.002}
NEGATIVE_GAPS = {1: -0.05, 2: -0.05, 3: -0.05}
EXACT_MATCH_GAP = Gap(-0.4, -2.4, 1.6, {1: -0.6, 2: 0.2, 3: -0.8})


def verdict(differences: list[Difference] | None = None, reference: VariantFigures | None = REFERENCE, **changes: Any):
    figures = dataclasses.replace(GOOD, **{"loss_gap": GAP, **changes})
    return judge(figures, reference, differences or [], QUALITY_MARGIN)


def test_verdict_of_a_faster_variant_with_equal_loss_is_use_it():
    good = verdict(exact_match_gap=EXACT_MATCH_GAP, speedup=Interval(1.31, 1.29, 1.33))
    assert (good.conclusion, good.quality) == ("use it", "as good")
    assert all(figure in good.sentences[0] for figure in ("1.31 times", "0.0000 nats"))
    assert "-0.4" in good.sentences[1] and "0.005" in good.sentences[2]


def test_first_sentence_says_whether_a_difference_is_beyond_chance():
    gaps = (GAP, Gap(0.004, 0.002, 0.006, POSITIVE_GAPS), Gap(0.004, None, None, {1: 0.004}))
    assert len({verdict(loss_gap=gap).sentences[0].split(", ")[-1] for gap in gaps}) == 3
    unsure, sure = (verdict(speedup=Interval(1.1, low, 1.3)).sentences[0] for low in (0.9, 1.01))
    assert unsure != sure


def test_emulated_fp8_has_no_speed_and_is_marked_as_emulated():
    base = three_runs("bf16", 100_000, [1.00, 1.04, 1.02])
    emulated = {**precision_of("tensorwise"), "backend": "torchao", "emulated": True}
    comparison = compare([*base, *three_runs("tensorwise", 130_000, [1.00, 1.04, 1.02], precision=emulated)])
    figures, judged, page = comparison.variants[1], comparison.verdicts["tensorwise"], render_page(comparison)
    assert figures.speedup is None and judged.conclusion == "speed unknown"
    assert "EMULATED" in judged.sentences[0] and "EMULATED" in figures.effective[0] and "EMULATED" in page
    assert 'class="bar"' not in page, "a speed bar of bf16 alone would compare nothing"


def test_verdict_of_runs_in_one_precision_names_the_missing_precision():
    for variant, missing in (("bf16", "fp8"), ("delayed", "bf16")):
        comparison = compare(three_runs(variant, 1e5, [1.0, 1.1, 1.2]))
        (only_verdict,) = comparison.verdicts.values()
        assert missing in only_verdict.sentences[0] and only_verdict.sentences[0] in render_page(comparison)


def test_quality_margin_decides_between_worse_and_slightly_worse():
    near = dataclasses.replace(GOOD, loss_gap=GAP)
    assert judge(near, REFERENCE, [], margin=0.001).conclusion == "not shown"
    far = dataclasses.replace(GOOD, loss_gap=Gap(0.02, 0.018, 0.022, POSITIVE_GAPS))
    assert judge(far, REFERENCE, [], QUALITY_MARGIN).conclusion == "worse"
    assert judge(far, REFERENCE, [], margin=0.03).conclusion == "slightly worse"


@pytest.mark.parametrize(
    ("changes", "conclusion", "quality"),
    [
        ({"seeds": []}, "failed", "not shown"),
        ({"fallback_reasons": ["none here"], "effective": ["fp8 delayed"]}, "fell back", "not shown"),
        ({"certificate": CertificateState("failed", ["0 fp8 kernels"])}, "not certified", "as good"),
        ({"certificate": CertificateState("missing", [])}, "not certified", "as good"),
        ({"certificate": CertificateState("undetermined", ["names"])}, "not certified", "as good"),
        ({"loss_gap": Gap(0.05, 0.04, 0.06, POSITIVE_GAPS)}, "worse", "worse"),
        ({"loss_gap": Gap(-0.05, -0.06, -0.04, NEGATIVE_GAPS)}, "use it", "as good"),
        ({"loss_gap": Gap(0.004, -0.001, 0.009, POSITIVE_GAPS)}, "not shown", "not shown"),
        ({"loss_gap": Gap(0.002, 0.0005, 0.0035, POSITIVE_GAPS)}, "slightly worse", "slightly worse"),
        ({"exact_match_gap": dataclasses.replace(EXACT_MATCH_GAP, value=-8.0, low=-10.0, high=-6.0)}, "worse", "worse"),
        ({"exact_match_gap": dataclasses.replace(EXACT_MATCH_GAP, value=8.0, low=6.0, high=10.0)}, "use it", "as good"),
        # A drop in every single seed neither proves "worse" nor permits "use it".
        ({"exact_match_gap": Gap(-4.0, -9.0, 1.0, {1: -1.0, 2: -5.0, 3: -6.0})}, "not shown", "not shown"),
        ({"speedup": Interval(0.8, 0.79, 0.81)}, "not faster", "as good"),
        ({"speedup": Interval(1.0, 0.98, 1.02)}, "not faster", "as good"),
        ({"speedup": None}, "speed unknown", "as good"),
        ({"loss_gap": Gap(0.0, None, None, {1: 0.0})}, "too few seeds", "not shown"),
        ({"speedup": Interval(1.3, None, None)}, "too few seeds", "as good"),
        ({"loss_gap": None, "eval_loss": {}}, "quality unknown", "not shown"),
        ({"loss_gap": None}, "quality unknown", "not shown"),
        ({"loss_gap": dataclasses.replace(GAP, value=math.nan)}, "worse", "worse"),
        ({"num_failed": 1}, "not shown", "not shown"),
    ],
)
def test_verdict_follows_from_the_figures(changes, conclusion, quality):
    judged = verdict(**changes)
    assert (judged.conclusion, judged.quality) == (conclusion, quality), judged
    if conclusion not in ("failed", "fell back"):
        differs = [Difference("optim.learning_rate", "quality", {}, ["delayed"])]
        assert verdict(differs, **changes).quality == "not shown"


def test_verdict_needs_a_certified_reference():
    assert verdict(reference=None).conclusion == "no reference"
    assert verdict(reference=dataclasses.replace(REFERENCE, seeds=[])).conclusion == "no reference"
    broken = dataclasses.replace(REFERENCE, certificate=CertificateState("failed", ["fp8 kernels ran"]))
    assert verdict(reference=broken).conclusion == "not comparable"
    judged = judge(broken, broken, [], QUALITY_MARGIN)
    assert (judged.conclusion, judged.quality) == ("reference", "baseline")
    assert "fp8 kernels ran" in " ".join(judged.sentences)


@pytest.mark.parametrize(
    ("effect", "conclusion"), [("both", "not comparable"), ("speed", "speed unknown"), ("quality", "quality unknown")]
)
def test_verdict_of_runs_with_different_options(effect, conclusion):
    assert verdict([Difference("optim.learning_rate", effect, {}, ["delayed"])]).conclusion == conclusion
    of_another_variant = Difference("optim.learning_rate", effect, {}, ["current"])
    assert verdict([of_another_variant]).conclusion == "use it"


def test_certificate_of_a_variant_is_that_of_its_worst_run():
    good, open_, bad = ({"verdict": v, "reasons": [v]} for v in ("certified", "undetermined", "failed"))

    def state(*certificates: dict[str, Any] | None) -> CertificateState:
        return certificate_state([{"certificate": certificate} for certificate in certificates])

    assert state(good, good).state == "certified"
    assert state(good, None).state == state().state == "missing"
    assert state(good, open_, None) == CertificateState("undetermined", ["undetermined"])
    assert state(good, bad, open_) == CertificateState("failed", ["failed"])


def with_entry(run: RunRecord, section: str, path: list[str], value: Any) -> RunRecord:
    """Return a copy of `run` whose run.json has `value` at the keys `path` inside `section`."""
    stored = json.loads(json.dumps(run.stored))
    inner = stored[section]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return dataclasses.replace(run, stored=stored)


@pytest.mark.parametrize(
    ("section", "path", "value", "field", "effect"),
    [
        ("config", ["optim", "learning_rate"], 1.0, "config.optim.learning_rate", "both"),
        ("config", ["run", "eval_batches"], 3, "config.run.eval_batches", "quality"),
        ("effective", ["global_batch_size"], 3, "effective.global_batch_size", "both"),
        ("provenance", ["driver"], "1.0", "provenance.driver", "speed"),
        ("provenance", ["packages", "torch"], "1.0", "provenance.packages.torch", "both"),
        ("precision", ["optimizer"], "adamw_fp32", "precision.optimizer", "both"),
    ],
)
def test_difference_names_the_field_and_its_effect_on_speed_or_quality(section, path, value, field, effect):
    runs = [made_up_run("bf16"), with_entry(made_up_run("delayed"), section, path, value)]
    (difference,) = find_differences(runs)
    assert (difference.field, difference.effect, difference.variants) == (field, effect, ["delayed"])


def test_differences_among_bf16_runs_concern_all_variants_and_output_folders_or_automatic_graphs_none():
    elsewhere = with_entry(made_up_run("delayed"), "config", ["run", "output_dir"], "elsewhere")
    assert find_differences([made_up_run("bf16"), elsewhere]) == []
    in_graphs = dataclasses.replace(elsewhere, summary={**elsewhere.summary, "cuda_graphs": {"used": True}})
    assert find_differences([made_up_run("bf16"), in_graphs]) == [], "what the run chose belongs to its speed"
    base = [made_up_run("bf16", 1), with_entry(made_up_run("bf16", 2), "effective", ["packing"], False)]
    (difference,) = find_differences([*base, made_up_run("delayed", 1)])
    assert difference.variants == ["bf16", "delayed"]


def test_differences_include_rows_initial_weights_and_effective_precisions():
    def differing(*runs: RunRecord) -> list[tuple[str, str, list[str]]]:
        return [(each.field, each.effect, each.variants) for each in find_differences(runs)]

    base, fp8 = made_up_run("bf16"), made_up_run("delayed")
    other_rows = [{**step, "tokens_seen": step["tokens_seen"] + 1} for step in fp8.steps]
    other_rows = dataclasses.replace(fp8, steps=other_rows)
    assert differing(base, other_rows) == [("tokens_seen, summed", "both", ["delayed"])]
    other_weights = dataclasses.replace(fp8, steps=[{**fp8.steps[0], "loss": 9.0}, *fp8.steps[1:]])
    assert differing(base, other_weights) == [("first_loss", "quality", ["delayed"])]
    mxfp8 = made_up_run("mxfp8", 1), made_up_run("mxfp8", 2, precision=precision_of("mxfp8", "delayed"))  # it fell back
    assert differing(base, made_up_run("bf16", 2), *mxfp8) == [("precision.effective", "both", ["mxfp8"])]
    with_fp8_params = with_entry(fp8, "config", ["parallel", "fp8_params"], True)  # as in a run of LoRA in fp8
    assert differing(base, with_fp8_params) == []
    assert differing(fp8, with_fp8_params) == [("config.precision.fp8_params", "both", ["delayed"])]


def test_options_changed_on_a_resume_and_answers_to_other_problems_are_not_compared(tmp_path):
    base, other = made_up_run("bf16"), made_up_run("delayed")
    base, other = (dataclasses.replace(run, answers=((name, True),)) for run, name in ((base, "a"), (other, "b")))
    folders = [write_run_folder(tmp_path / run.variant, run) for run in (base, other)]
    changed = with_entry(other, "config", ["optim", "learning_rate"], 7.0).stored
    path = folders[1] / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resumes": [{"config": changed["config"]}]}))
    runs = [read_run_folder(folder) for folder in folders]
    assert "config.optim.learning_rate" in [difference.field for difference in find_differences(runs)]
    assert compare(runs).variants[1].exact_match_gap is None


def test_answers_read_from_run_folders_decide_the_verdict(tmp_path):
    runs = []
    for variant, first_right in (("bf16", 0), ("delayed", 60)):
        for run in three_runs(variant, 130_000 if variant == "delayed" else 100_000, [1.0, 1.04, 1.02]):
            answers = tuple((str(row), row >= first_right + run.seed) for row in range(100))
            run = dataclasses.replace(run, answers=answers)
            folder = write_run_folder(tmp_path / f"{variant}-{run.seed}", run)
            read = read_run_folder(folder)
            assert read.steps == run.steps and read.evaluations == run.evaluations and read.answers == answers
            runs.append(read)
    comparison = compare(runs)
    assert comparison.verdicts["delayed"].conclusion == "worse" and comparison.variants[1].exact_match_gap.value == -60


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", None, "summary.json"),
        ("run.json", "{", "run.json"),
        ("run.json", "{}", "config"),
        ("metrics.jsonl", "", "no optimizer step"),
        ("summary.json", '{"steps": 3, "stopped_by": "SIGTERM"}', "stopped by SIGTERM after step 3"),
        ("summary.json", '{"steps": 3, "failed": "no fp8 kernel ran"}', "no fp8 kernel ran"),
    ],
)
def test_unfinished_runs_and_equal_runs_are_refused(tmp_path, name, content, message):
    folder = write_run_folder(tmp_path / "run", made_up_run())
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(UserError, match=f"{folder}.*{message}"):
        read_run_folder(folder)
    with pytest.raises(UserError, match="are both of precision bf16 seed 1"):
        compare([made_up_run(), made_up_run()])


def test_variants_are_parsed_and_get_only_the_options_that_apply():
    assert parse_variants("fp8, mxfp8,bf16") == ["bf16", "delayed", "mxfp8"]
    for text in ("", "fp4", "fp8,delayed"):
        with pytest.raises(UserError, match="--variants"):
            parse_variants(text)
    options = ["--max_steps", "3", "--fp8_strict", "--amax_history_len", "16", "--use_te"]
    assert variant_argv("bf16", options) == ["--max_steps", "3", "--use_te", "--mixed_precision", "bf16"]
    delayed, mxfp8 = (parse_config(variant_argv(name, options)).precision for name in ("delayed", "mxfp8"))
    assert delayed.amax_history_len == 16 and delayed.fp8_strict
    assert mxfp8.amax_history_len is None and mxfp8.fp8_strict and mxfp8.fp8_scenario == "mxfp8"


def test_planned_runs_alternate_variants_and_differ_only_in_precision(tmp_path):
    train = "--config configs/train_pair.yaml --use_wandb"
    runs = plan_runs(train, ["bf16", "delayed"], 2, 1, tmp_path / "out")
    assert [run.folder.name for run in runs] == ["bf16-seed1", "delayed-seed1", "bf16-seed2", "delayed-seed2"]
    base, fp8 = (parse_config(list(run.argv)) for run in runs[:2])
    assert base.run.wandb_run_name == "bf16-seed1" and base.optim.seed == 1 and base.model.use_te
    assert dataclasses.replace(fp8, precision=base.precision, run=base.run) == base
    with pytest.raises(UserError, match="--output .*other options"):
        plan_runs("--max_steps 3", ["bf16"], 2, 1, tmp_path / "out")


@pytest.mark.parametrize("train", ["--seed 3", "--mixed_precision=fp8", "--batch_size 0", "--lora 'x"])
def test_options_that_the_comparison_sets_or_cannot_parse_are_refused(tmp_path, train):
    with pytest.raises(UserError, match="--train|--batch_size"):
        plan_runs(train, ["bf16"], 1, 1, tmp_path)


def test_train_accepts_a_single_quoted_option(tmp_path):
    assert parse(["--train", "--use_te", "--output", str(tmp_path)]).train == "--use_te"


def test_page_has_all_charts_and_no_folder_names():
    runs = [*three_runs("bf16", 1e5, [1.0, 1.04, 1.02]), *three_runs("delayed", 1.3e5, [1.1, 1.14, 1.12])]
    runs = [dataclasses.replace(run, source=f"/home/me/runs/{run.variant}-{run.seed}") for run in runs]
    failure = Failure("mxfp8", 1, "<script>alert(1)</script>", "/home/me/log")
    page = render_page(compare(runs, [failure]))
    assert "/home/me" not in page and "<script" not in page and "nan" not in page
    assert page.count("<polyline") == 6 and page.count('class="bar"') == 2 and "exact match" not in page
    assert page.index("<h1>fp8 delayed trained 1.3") < page.index("<h2>")
    assert page.count("doubtful") > 1, "the bar of a variant with a worse loss is pale"
    assert without_folders("in /a/b/c.json and https://x.org/a/b") == "in c.json and https://x.org/a/b"


@pytest.mark.slow
def test_trained_runs_are_compared_from_folders_and_from_wandb(tmp_path, monkeypatch, call_main, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "out"
    runs = plan_runs(f"{TRAIN} --use_wandb", ["bf16", "no"], 1, 1, folder)
    for run in runs:
        assert small.train(*run.argv) == 0
    options = ("--train", f"{TRAIN} --use_wandb", "--variants", "bf16,no", "--seeds", 1, "--output", folder)
    assert call_main(cli, *options) == 0, "finished runs are not trained again"
    printed, result = capsys.readouterr().out, json.loads((folder / "comparison.json").read_text())
    assert printed.count("finished earlier") == 2 and (folder / "comparison.html").stat().st_size > 5000
    losses = [read_run_folder(run.folder).final_eval_loss for run in runs]
    assert result["variants"][1]["loss_gap"]["value"] == pytest.approx(losses[1] - losses[0])
    assert result["differences"] == []

    class StandInApi:
        """Stand in for wandb.Api: one run, with the values that the offline run would have sent."""

        def run(self, path: str) -> Any:
            stored = only_wandb_run(runs[0].folder)
            rows = [{**dict.fromkeys(("eval_loss", "loss")), **row} for row in stored.history]
            fields = {"state": state, "config": stored.config, "summary": stored.summary}
            return type("Run", (), {**fields, "scan_history": lambda self: rows})()

    state = "finished"
    online, local = read_wandb("team/llm-fp8/abc", StandInApi()), read_run_folder(runs[0].folder)
    assert online.evaluations and online.label == local.label and online.stored["config"] == local.stored["config"]
    assert online.final_eval_loss == local.final_eval_loss
    assert online.summary["median_tokens_per_s"] == local.summary["median_tokens_per_s"]
    assert find_differences([online, local]) == []
    state = "running"
    with pytest.raises(UserError, match="--wandb team/llm-fp8/abc.* running"):
        read_wandb("team/llm-fp8/abc", StandInApi())


@pytest.mark.slow
def test_failed_run_does_not_stop_the_others_and_is_reported(tmp_path, monkeypatch, call_main, capsys):
    """A short program that ends like a failed training replaces the training."""
    failing_program = "raise SystemExit('error: --model_name nowhere: no such folder')"
    failing_command = [sys.executable, "-c", failing_program]
    monkeypatch.setattr(cli, "training_command", lambda num_gpus, *options: [*failing_command, *options])
    options = ("--train", TRAIN, "--variants", "bf16", "--seeds", 1, "--output", tmp_path / "out")
    assert call_main(cli, *options) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "--model_name" in printed
    assert "--model_name" in (tmp_path / "out" / "logs" / "bf16-seed1.log").read_text()
