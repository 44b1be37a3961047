"""Damaged files end in one sentence that names them; `python -m tests.faults.fuzz` tries thousands."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch

from llm_fp8.config.accelerate_env import launch_ranks
from llm_fp8.config.options import ModelConfig
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.train.checkpoint import CheckpointManager
from llm_fp8.utils.errors import UserError
from tests.faults.fuzz import Reader, damaged, try_reader
from tests.faults.readers import OLDER, READERS, ROWS, write_good_files

SEED, COUNT = 1, 150
FEWER = dict.fromkeys((f"{name}.jsonl" for name in ROWS), 40)
"""Of files that take `datasets` a tenth of a second each."""


@pytest.fixture(scope="module")
def good_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_good_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_named(good_files, name):
    count = FEWER.get(name, COUNT)
    tally = try_reader(READERS[name], good_files, SEED, count)
    assert tally.tried == count == tally.accepted + tally.refused, "\n".join(tally.failures)


def test_the_damage_is_that_of_the_seed():
    text = b'{"a": [1, {"b": "c"}]}'
    first, again, other = (
        [damaged(text, random.Random(seed * 100 + case)) for case in range(50)] for seed in (1, 1, 2)
    )
    assert first == again != other and sum(each != text for each in first) > 40


def test_a_reader_that_fails_is_counted(good_files):
    def crash(folder: Path) -> None:
        text = (folder / reader.file).read_text(errors="replace")
        if json.loads(text) is None:
            raise UserError("some file is damaged.")

    reader = Reader("run/run.json", crash)
    tally = try_reader(reader, good_files, SEED, 60)
    assert tally.tracebacks and any(kind.startswith("JSONDecodeError") for kind in tally.kinds)
    assert tally.kinds["not one line that names run.json"] and json.loads((good_files / reader.file).read_text())


def test_a_damaged_older_checkpoint_is_named_once_and_left(good_files, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(good_files / "run", run)
    manifest = tmp_path / OLDER / "manifest.json"
    manifest.write_text(json.dumps({"format": 1, "files": [], "tensors": {}, "saved_unix_s": 1.0}))
    manager = CheckpointManager(run, limit=1)
    with caplog.at_level(logging.WARNING):
        for step in (3, 4):
            manager.save(step, {"weight": torch.ones(3)}, {})
    named = [record.getMessage() for record in caplog.records if str(manifest) in record.getMessage()]
    assert len(named) == 1 and "files must be an object, not []" in named[0]
    assert sorted(path.name for path in manager.folder.glob("step-*")) == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize(
    ("entry", "value"),
    [("num_hidden_layers", 10**9), ("vocab_size", -1), ("hidden_size", 0), ("attention_dropout", 2.0)],
)
def test_a_config_that_cannot_be_meant_is_named(good_files, tmp_path, entry, value):
    config = json.loads((good_files / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, entry: value}))
    options = ModelConfig(model_name=str(tmp_path))
    with pytest.raises(UserError, match=rf"{tmp_path}.*{entry}"):
        load_config(options, resolve_source(options))


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "abc"}, "RANK=abc"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE=-1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"MASTER_PORT": ""}, "MASTER_PORT="),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ],
)
def test_variables_that_no_launcher_sets_are_named(environ, named):
    with pytest.raises(UserError, match=named):
        launch_ranks(environ)
