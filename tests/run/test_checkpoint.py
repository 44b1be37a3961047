"""Checkpoints: exact round trips, state after a kill or with a full disk, and checkpoints that are refused."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llm_fp8.run.checkpoint import Checkpoint, CheckpointManager, _Writer
from llm_fp8.run.train_state import restore_rng_state, rng_state
from llm_fp8.settle.resume import check_compatible
from llm_fp8.utils.errors import UserError
from tests.support.processes import CONTEXT


def make_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.nn.Parameter(torch.randn(64, 32, generator=generator)),
        "model/bf16": torch.randn(33, generator=generator).bfloat16(),
        "model/column": torch.randn(6, 5, generator=generator)[:, 2],  # a view of a larger storage
        "optimizer/remainder": torch.randint(-(2**15), 2**15, (64, 32), generator=generator).to(torch.int16),
        "optimizer/codes": torch.randint(0, 256, (7,), generator=generator, dtype=torch.uint8),
        "optimizer/step": torch.tensor(float(seed)),
    }


def zeros_of(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def checkpoint_names(manager):
    return sorted(path.name for path in manager.folder.iterdir())


def test_load_restores_exact_values_in_place(tmp_path):
    manager, saved = CheckpointManager(tmp_path, limit=2), make_tensors()
    path = manager.save(120, saved, {"data_position": {"epoch": 1, "row": 17}})
    assert path == tmp_path / "checkpoints" / "step-00000120"
    targets = zeros_of(saved)
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    checkpoint = manager.find("latest")
    checkpoint.load(targets)
    assert checkpoint.folder == path and checkpoint.meta == {"data_position": {"epoch": 1, "row": 17}, "step": 120}
    for name, tensor in saved.items():
        assert torch.equal(targets[name], tensor) and targets[name].dtype == tensor.dtype, name
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == addresses
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json", "meta.json"]


def test_limit_keeps_latest_saves(tmp_path, monkeypatch):
    """The checkpoint that is saved last counts as the latest, even if the host's clock was set back before the save."""
    manager = CheckpointManager(tmp_path, limit=2)
    for step in (10, 20, 30):
        manager.save(step, make_tensors(step), {})
    assert checkpoint_names(manager) == ["step-00000020", "step-00000030"]
    monkeypatch.setattr("time.time", lambda: 0.0)
    with_wrong_clock = CheckpointManager(tmp_path, limit=1)
    with_wrong_clock.save(5, make_tensors(), {}, best_step=20)
    assert checkpoint_names(manager) == ["step-00000005", "step-00000020"]
    assert manager.find("latest").step == 5


def test_renamed_and_copied_checkpoints_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path, limit=1)
    manager.save(10, make_tensors(1), {})
    (manager.folder / "step-00000010").rename(manager.folder / "step-00000010-keep")
    manager.save(20, make_tensors(2), {})
    shutil.copytree(manager.folder / "step-00000020", manager.folder / "step-00000020.bak")
    manager.save(30, make_tensors(3), {})
    names = sorted(path.name for path in manager.folder.iterdir())
    assert names == ["step-00000010-keep", "step-00000020.bak", "step-00000030"]
    assert manager.find("latest").step == 30


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    manager.save(7, make_tensors(1), {"try": 1})
    manager.save(7, make_tensors(2), {"try": 2})
    targets = zeros_of(make_tensors())
    manager.find("latest").load(targets)
    assert manager.find("latest").meta["try"] == 2
    assert torch.equal(targets["model/weight"], make_tensors(2)["model/weight"])
    assert checkpoint_names(manager) == ["step-00000007"]


def test_kill_while_saving_a_step_again_keeps_first_save(tmp_path, monkeypatch):
    manager, rename = CheckpointManager(tmp_path, limit=2), Path.rename
    final = manager.save(7, make_tensors(), {"try": 1})

    def killed(self, target):
        if target == final and not final.exists():
            os._exit(9)
        return rename(self, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", killed)
        manager.save(7, make_tensors(), {"try": 2})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and not final.exists()
    manager.clean_up()
    assert manager.find("latest").meta["try"] == 1 and checkpoint_names(manager) == [final.name]


def test_main_rank_removes_stale_temporary_folders(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    path = manager.save(1, make_tensors(), {})
    shutil.copytree(path, path.with_name(".tmp-step-00000002"))
    CheckpointManager(tmp_path, limit=2, is_main=False).clean_up()
    assert len(checkpoint_names(manager)) == 2
    manager.clean_up()
    assert checkpoint_names(manager) == ["step-00000001"]


def test_background_save_contains_values_at_the_call(tmp_path):
    manager, tensors = CheckpointManager(tmp_path, limit=2), make_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    manager.save(1, tensors, {"entry": 5}, in_background=True)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    manager.finish()
    loaded = zeros_of(tensors)
    manager.find("latest").load(loaded)
    assert manager.find("latest").meta["entry"] == 5
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def test_latest_falls_back_to_the_newest_complete_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path, limit=3)
    for step in (1, 2, 3):
        manager.save(step, make_tensors(step), {})
    (manager.folder / "step-00000003" / "__0_0.distcp").unlink()
    assert manager.find("latest").step == 2


def test_missing_checkpoint_is_refused_unless_latest(tmp_path):
    manager = CheckpointManager(tmp_path, limit=3)
    for name in (str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(UserError, match=f"--resume_from {name}"):
            manager.find(name)
    assert manager.find("latest") is None, "the run starts from the beginning"
    (manager.folder / "step-00000003").mkdir(parents=True)
    with pytest.raises(UserError, match="--resume_from .*step-00000003"):
        manager.find("latest")


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage_file"),
    [
        ("__0_0.distcp", truncate),
        ("__0_0.distcp", lambda path: path.unlink()),
        (".metadata", change_a_byte),
        ("meta.json", truncate),
        ("manifest.json", truncate),
        ("format", lambda path: path.with_name("manifest.json").write_text('{"saved_unix_s": 1, "files": {}}')),
    ],
)
def test_damaged_file_is_named(tmp_path, name, damage_file):
    path = CheckpointManager(tmp_path, limit=1).save(3, make_tensors(), {"long": "x" * 100})
    damage_file(path / name)
    with pytest.raises(UserError, match=f"{path}.*{name}"):
        Checkpoint.open(path)


def test_unreadable_tensors_are_refused(tmp_path):
    path = CheckpointManager(tmp_path, limit=1).save(3, make_tensors(), {})
    (path / "__0_0.distcp").write_bytes(b"\0" * (path / "__0_0.distcp").stat().st_size)
    with pytest.raises(UserError, match=f"--resume_from {path}"):
        Checkpoint.open(path).load(zeros_of(make_tensors()))


@pytest.mark.parametrize(
    "change",
    [
        {"model/lora_A": torch.zeros(3)},
        {"model/bf16": torch.zeros(33)},
        {"model/bf16": torch.zeros(11, 3, dtype=torch.bfloat16)},
    ],
)
def test_mismatched_tensors_are_refused_by_name(tmp_path, change):
    path = CheckpointManager(tmp_path, limit=1).save(3, make_tensors(), {})
    targets = {**zeros_of(make_tensors()), **change}
    with pytest.raises(UserError, match=next(iter(change))):
        Checkpoint.open(path).load(targets)
    assert not any(tensor.any() for tensor in targets.values())


def test_different_fingerprint_entries_are_named(tmp_path):
    saved = {"hidden_size": 64, "layers": (1, 2), "recipe": "delayed", "optimizer": "adamw_fp32"}
    CheckpointManager(tmp_path, limit=1).save(3, make_tensors(), {"fingerprint": saved})
    checkpoint = CheckpointManager(tmp_path, limit=1).find("latest")
    check_compatible(checkpoint, saved)
    with pytest.raises(UserError) as error:
        check_compatible(checkpoint, {"hidden_size": 128, "layers": (1, 2), "recipe": "delayed", "rope_theta": 1e4})
    assert all(name in str(error.value) for name in ("hidden_size", "optimizer", "rope_theta"))
    assert "recipe" not in str(error.value) and "layers" not in str(error.value)


def test_rank_restores_its_own_random_state(tmp_path):
    torch.manual_seed(3)
    manager = CheckpointManager(tmp_path, limit=1)
    manager.save(1, {**rng_state(rank=0), **rng_state(rank=3)}, {})
    expected = torch.rand(5)
    targets = rng_state(rank=3)
    manager.find("latest").load(targets)
    restore_rng_state(targets)
    assert torch.equal(torch.rand(5), expected)


# Several ranks


def save_sharded(output_dir, rendezvous, rank):
    """Save and load a sharded tensor, a replicated tensor and a random state as one of two ranks. The ranks find each
    other through the file `rendezvous`.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    manager = CheckpointManager(output_dir, limit=1, is_main=rank == 0)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(rank)
    for step in (1, 2):
        tensors = {
            "sharded": distribute_tensor(torch.arange(10.0).reshape(5, 2) * step, mesh, [Shard(0)]),
            "replicated": torch.full((3,), float(step)),
            **rng_state(rank),
        }
        manager.save(step, tensors, {"from_rank": rank}, in_background=step == 1)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint = manager.find("latest")
    checkpoint.load(targets)
    assert checkpoint.meta == {"from_rank": 0, "step": 2}
    assert torch.equal(targets["sharded"].full_tensor(), tensors["sharded"].full_tensor())
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors if name != "sharded")
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_rank_can_load_checkpoint_of_two_ranks(tmp_path):
    output_dir, place = tmp_path / "run", tmp_path / "rendezvous"
    ranks = [CONTEXT.Process(target=save_sharded, args=(output_dir, place, rank), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    manager = CheckpointManager(output_dir, limit=1)
    assert checkpoint_names(manager) == ["step-00000002"]
    targets = {"sharded": torch.zeros(5, 2), "replicated": torch.zeros(3)}
    manager.find("latest").load(targets)
    assert torch.equal(targets["sharded"], torch.arange(10.0).reshape(5, 2) * 2)
    assert torch.equal(targets["replicated"], torch.full((3,), 2.0))


# Full disks


@pytest.mark.slow
@pytest.mark.parametrize(
    "large_tensors",
    [
        pytest.param({"weight": torch.zeros(5_000_000)}, id="seen-beforehand"),
        # Each tensor has one value but needs more than a kilobyte in the file, so that the disk fills during the save.
        pytest.param({f"weight_{i}": torch.zeros(1) for i in range(6000)}, id="during-the-save"),
    ],
)
def test_full_disk_keeps_previous_checkpoint(small_disk, large_tensors):
    manager, tensors = CheckpointManager(small_disk, limit=2), {"weight": torch.arange(200_000.0)}
    manager.save(1, tensors, {})
    with pytest.raises(UserError, match="step-00000002 .* No space"):
        manager.save(2, large_tensors, {})
    assert checkpoint_names(manager) == ["step-00000001"]
    targets = zeros_of(tensors)
    manager.find("latest").load(targets)
    assert torch.equal(targets["weight"], tensors["weight"])
    manager.save(3, tensors, {})


def test_unexpected_error_keeps_its_type(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    with pytest.raises(TypeError):
        manager.save(1, make_tensors(), {"entry": object()})
    assert json.dumps(checkpoint_names(manager)) == "[]"


def test_rank_reports_the_cause_of_a_failed_write(tmp_path, monkeypatch):
    """As torch does if the disk is full: its file writer fails while it handles the system's error."""

    def write_data(*_):
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", write_data)
    with pytest.raises(UserError, match="step-00000001 .* Disk quota exceeded"):
        CheckpointManager(tmp_path, limit=2).save(1, make_tensors(), {})
    with pytest.raises(OSError, match="quota"):
        _Writer(tmp_path).write_data(None, None)
