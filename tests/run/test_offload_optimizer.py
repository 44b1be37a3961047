"""Runs with --offload_optimizer equal runs without it bitwise, also when they are resumed with another setting."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from llm_fp8.optim import offload
from llm_fp8.optim.offload import StatePipeline
from llm_fp8.utils.errors import UserError
from tests.support.small import assert_same_continuation, final_weights, run_json, tiny_config, train, write_model

pytestmark = pytest.mark.slow

GIB = 2**30


@pytest.fixture
def options(rows) -> list[str]:
    options = f"--dataset_name={rows} --max_seq_length=128 --batch_size=4 --gradient_accumulation_steps=2 --max_steps=4"
    options += " --learning_rate=1e-2 --validation_fraction=0 --log_every=1 --save_every=2 --optimizer=adamw_master"
    # eager, because sdpa in torch 2.x uses AMX's format even if ATEN_CPU_CAPABILITY excludes AMX
    return f"{options} --mixed_precision=bf16 --attn_implementation=eager".split()


@pytest.fixture
def piece_sizes(monkeypatch) -> list[int]:
    """Make optimizers copy their state from the host in pieces of at most 1,000 elements. Return a list, to which the
    number of elements of each piece is appended.
    """
    sizes: list[int] = []
    update_ = StatePipeline.update_

    def recording_update_(self, state, update):
        sizes.append(len(state["exp_avg"]))
        update_(self, state, update)

    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 1000)
    monkeypatch.setattr(StatePipeline, "update_", recording_update_)
    return sizes


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_offloaded_and_resumed_runs_equal_plain_run(options, piece_sizes, tmp_path, capfd, dtype, tied):
    """A bf16 run that starts from fp32 weights exports fp32 weights, whose lower 16 bits must be equal, too."""
    model = write_model(tmp_path / "model", dtype=dtype, tie_word_embeddings=tied)
    plain, offloaded = tmp_path / "plain", tmp_path / "offloaded"
    options = [f"--model_name={model}", *options]
    train(*options, f"--output_dir={plain}")
    assert not piece_sizes and "optimizer_gib_on_host" not in run_json(plain)["effective"]
    train(*options, "--offload_optimizer=1", f"--output_dir={offloaded}")
    assert max(piece_sizes) == 1000 and len(piece_sizes) > 4 * 40
    assert_same_continuation(plain, offloaded, completed=0)
    assert all(tensor.dtype == dtype for tensor in final_weights(offloaded).values())

    num_parameters = run_json(offloaded)["model"]["num_parameters"]
    assert run_json(offloaded)["effective"]["optimizer_gib_on_host"] == 8 * num_parameters / GIB
    assert "GiB in host memory (--offload_optimizer)" in capfd.readouterr().out

    for source, share in ((plain, 0.5), (offloaded, 0.0)):
        resumed = tmp_path / f"resumed-{share}"
        checkpoint = source / "checkpoints" / "step-00000002"
        train(*options, f"--offload_optimizer={share}", f"--output_dir={resumed}", f"--resume_from={checkpoint}")
        assert_same_continuation(plain, resumed, completed=2)


def test_insufficient_host_memory_is_refused_before_reading_weights(options, tmp_path, monkeypatch):
    """The folder contains the config of a model with two billion parameters, but no weights."""
    folder = tmp_path / "large"
    tiny_config(hidden_size=2048, intermediate_size=32768, num_hidden_layers=8).save_pretrained(folder)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    with pytest.raises(UserError) as error:
        train(f"--model_name={folder}", *options, "--offload_optimizer=1", f"--output_dir={tmp_path / 'run'}")
    assert "--offload_optimizer 1 takes 12.8 GiB" in str(error.value)
    assert not (tmp_path / "run").exists()
