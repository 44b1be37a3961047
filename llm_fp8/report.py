"""Where the numbers of a run go: metrics.jsonl, the trackers, the screen and summary.json.

The training loop hands over plain floats, several steps at a time (it synchronises with the GPU once per `log_every` steps);
everything here happens on the main process only and never touches a tensor.

    output_dir/
      metrics.jsonl      one line per optimizer step, and one per evaluation, with the keys of `llm_fp8.metrics.METRICS`
      summary.json       written at the end: last values, medians, whatever the loop adds
      wandb/             the W&B run's files (with --use_wandb)
      tensorboard/       TensorBoard's event files (with --report_to tensorboard)

The trackers get the same keys and steps through Accelerate's own tracker classes. A resumed run continues metrics.jsonl: what the
interrupted process wrote beyond its last checkpoint is cut off first, because those steps are taken again. On W&B each start
is a run of its own in the group named after the output folder, since W&B cannot take back steps that it has seen.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from llm_fp8.config import Config
from llm_fp8.errors import UserError
from llm_fp8.json_files import json_line, write_json_atomic
from llm_fp8.metrics import METRICS
from llm_fp8.progress import ProgressDisplay
from llm_fp8.provenance import package_version

WARMUP_STEPS = 10
"""Steps at the start of a process that medians leave out (compilation, autotuning, allocator growth); at most half of all."""

_MEDIANS = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "real_tokens_per_s",
    "supervised_tokens_per_s",
    "packing_efficiency",
    "model_tflops",
    "mfu_bf16_peak",
    "mfu_fp8_peak",
)


def check_trackers(config: Config) -> None:
    """Raise `UserError` where a tracker that was asked for cannot work, before anything expensive is done.

    Only the first process of a distributed run looks: the others never talk to a tracker.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if "tensorboard" in config.trackers and package_version("tensorboard") is None:
        raise UserError(
            f"--report_to {config.run.report_to} needs the tensorboard package, which is not installed: run 'pip install tensorboard'."
        )
    if "wandb" in config.trackers:
        flag = "--use_wandb" if config.run.use_wandb else f"--report_to {config.run.report_to}"
        _check_wandb(flag)


def _check_wandb(flag: str) -> None:
    """Raise `UserError` where W&B is not installed, or would have to ask for a login; `flag` is what asked for it."""
    # By metadata, not by import: a folder named wandb in the working directory would import as an empty package.
    if package_version("wandb") is None:
        raise UserError(f"{flag} needs the wandb package, which is not installed: run 'pip install wandb', or leave {flag} out.")
    import wandb

    # Silent, because a login that is greeted by name asks the server for it, and hangs where there is no network; the run's own start
    # speaks again, in a set-up of its own.
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    try:
        if settings.mode in ("offline", "dryrun", "disabled"):
            return
        logged_in = wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        raise UserError(f"{flag}: the stored W&B login is not usable ({error}); run 'wandb login --relogin'.") from error
    finally:
        wandb.teardown()
    if not logged_in:
        raise UserError(
            f"{flag}: there is no W&B login on this machine; run 'wandb login', or set WANDB_MODE=offline in the environment to keep "
            "the run's data in the output folder."
        )


def _output_dir(config: Config) -> Path:
    """The run's folder, which has been chosen by the time that anything is reported."""
    if config.run.output_dir is None:
        raise ValueError("config.run.output_dir must be set before the run is reported.")
    return Path(config.run.output_dir)


def accelerator_tracking(config: Config) -> dict[str, Any]:
    """The arguments of `Accelerator(...)` that concern trackers: `log_with` and `project_config`."""
    folder = _output_dir(config)
    return {
        "log_with": config.trackers or None,
        "project_config": ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "tensorboard")),
    }


def truncate_metrics(path: Path, last_step: int, keep_evaluation: bool = True) -> None:
    """Cut from a metrics.jsonl every line of a step beyond `last_step`, and a last line that was never finished.

    `keep_evaluation` False cuts the evaluation after `last_step` too, for a run that was killed behind its last step and repeats it.
    Raises `UserError` where a line before the last is not JSON: that is not the trace of an interrupted run.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = record["step"]
        except (json.JSONDecodeError, KeyError, TypeError):
            if number == len(lines):
                break
            raise UserError(
                f"{path}: line {number} is not a metrics record; move the file away to resume without the earlier metrics."
            ) from None
        if step < last_step or (step == last_step and (keep_evaluation or "eval_loss" not in record)):
            kept.append(line + "\n")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def throughput_summary(steps: list[dict[str, float]], warmup_steps: int = WARMUP_STEPS) -> dict[str, float]:
    """Medians over `steps` (in order) of the figures that measure speed, the first `warmup_steps` left out.

    Of a run shorter than twice `warmup_steps` the first half is left out. Keys: `num_steps_measured`,
    `num_steps_left_out`, and `median_<key>` for each figure that every measured step has.
    """
    num_left_out = min(warmup_steps, len(steps) // 2)
    measured = steps[num_left_out:]
    summary: dict[str, float] = {"num_steps_measured": len(measured), "num_steps_left_out": num_left_out}
    for key in _MEDIANS:
        values = [record[key] for record in measured if key in record]
        if values and len(values) == len(measured):
            summary[f"median_{key}"] = statistics.median(values)
    return summary


def _check_record(record: dict[str, float]) -> dict[str, float]:
    """`record` as it is, or an error for what the loop must not hand over: unknown keys, values that are not numbers."""
    for key, value in record.items():
        if key not in METRICS:
            raise ValueError(f"'{key}' is not a declared metric; add it to llm_fp8.metrics.METRICS.")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"metric '{key}' must be a plain number, not {type(value).__name__}.")
    return record


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one level with dotted keys and values of the kinds that TensorBoard's hparams take."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


class RunReporter:
    """Takes the numbers of one run to all the places they belong; every rank makes one, only the main process writes.

    As a context manager it closes everything on a normal end. After an error the files are closed but the trackers are left
    to their own exit hooks, so that W&B shows the run as crashed and not as finished.
    """

    def __init__(
        self, accelerator: Accelerator, config: Config, run_info: dict[str, Any], total_steps: int, resume_step: int = 0
    ) -> None:
        """Open the files and trackers in `config.run.output_dir`.

        `accelerator` must have been made with `**accelerator_tracking(config)`. `run_info` is stored beside the configuration
        on the trackers; it holds at least the precision asked for and in effect. `total_steps` is the length of the whole run
        in optimizer steps, `resume_step` how many of them the checkpoint has behind it. Without a resume an existing
        metrics.jsonl is begun anew.
        """
        self._accelerator = accelerator
        self._folder = _output_dir(config)
        self._total_steps = total_steps
        self._last_step = resume_step
        self._steps: list[dict[str, float]] = []
        self._last_evaluation: dict[str, float] | None = None
        self._closed = False
        if not accelerator.is_main_process:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "metrics.jsonl"
        if resume_step > 0 and path.exists():
            truncate_metrics(path, resume_step, keep_evaluation=resume_step < total_steps)
        self._file = open(path, "a" if resume_step > 0 else "w", encoding="utf-8", buffering=1)
        if accelerator.log_with:
            self._start_trackers(config, run_info, resume_step)
        self._display = ProgressDisplay(total_steps, resume_step, config.run.log_every)

    def _start_trackers(self, config: Config, run_info: dict[str, Any], resume_step: int) -> None:
        """Start the trackers and give each the configuration in the shape it takes."""
        tensorboard = {"purge_step": resume_step + 1} if resume_step > 0 else {}
        self._accelerator.init_trackers(
            config.run.wandb_project,
            init_kwargs={
                "wandb": {"dir": str(self._folder), "name": config.run.wandb_run_name, "group": self._folder.resolve().name},
                "tensorboard": tensorboard,
            },
        )
        stored = {**config.to_dict(), **run_info}
        for tracker in self._accelerator.trackers:
            # TensorBoard's hparams are a flat table of scalars; W&B folds and searches nested ones.
            tracker.store_init_configuration(_flat(stored) if tracker.name == "tensorboard" else stored)

    def steps(self, records: list[dict[str, float]]) -> None:
        """Report optimizer steps in order; each record has `step` and any other keys of `METRICS`, as plain numbers."""
        if not self._accelerator.is_main_process:
            return
        for record in records:
            if record["step"] <= self._last_step:
                raise ValueError(f"step {record['step']} was reported after step {self._last_step}.")
            self._last_step = int(record["step"])
            self._write(record)
            self._steps.append(record)
            self._display.step(record)

    def evaluation(self, record: dict[str, float]) -> None:
        """Report an evaluation made after the last reported step; `record` has that `step` and the `eval_` keys."""
        if not self._accelerator.is_main_process:
            return
        if record["step"] != self._last_step:
            raise ValueError(f"evaluation of step {record['step']} while the last reported step is {self._last_step}.")
        self._write(record)
        self._last_evaluation = record
        figures = "  ".join(
            f"{key} {value:,.0f}" if value >= 1000 else f"{key} {value:.4g}" for key, value in record.items() if key != "step"
        )
        self._display.print(f"evaluation at step {self._last_step}: {figures}")

    def _write(self, record: dict[str, float]) -> None:
        """One record to metrics.jsonl and the trackers."""
        self._file.write(json_line(_check_record(record)))
        if self._accelerator.log_with:
            self._accelerator.log(record, step=int(record["step"]))

    def print(self, text: str) -> None:
        """Print a line on the main process, without disturbing the progress bar."""
        if self._accelerator.is_main_process:
            self._display.print(text)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json: what the run ended with, medians of its speed, and the entries of `summary`; returns it."""
        whole = {
            "steps": self._last_step,
            "total_steps": self._total_steps,
            "last_step": self._steps[-1] if self._steps else None,
            "last_evaluation": self._last_evaluation,
            "throughput": throughput_summary(self._steps),
            **summary,
        }
        if self._accelerator.is_main_process:
            write_json_atomic(self._folder / "summary.json", whole)
        return whole

    def close(self) -> None:
        """Close the files and end the trackers. May be called twice."""
        if self._closed:
            return
        self._close_files()
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def _close_files(self) -> None:
        self._closed = True
        if self._accelerator.is_main_process:
            self._display.close()
            self._file.close()

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error_type is None:
            self.close()
        elif not self._closed:
            self._close_files()
