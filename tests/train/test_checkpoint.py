"""Checkpoints: exact round trips, what a kill or a full disk leaves behind, and what is refused and how it is said."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llm_fp8.train.checkpoint import (
    CheckpointManager,
    check_compatible,
    load_checkpoint,
    read_meta,
    restore_rng_state,
    rng_state,
)
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


def blank_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def names_in(manager):
    return sorted(path.name for path in manager.folder.iterdir())


def test_round_trip_is_exact_and_in_place(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    saved = make_tensors()
    path = manager.save(120, saved, {"data_position": {"epoch": 1, "row": 17}})
    assert path == tmp_path / "checkpoints" / "step-00000120"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000120\n"
    targets = blank_like(saved)
    addresses = {name: tensor.data_ptr() for name, tensor in targets.items()}
    for source in (manager.find("latest"), path):
        for tensor in targets.values():
            tensor.data.zero_()
        assert load_checkpoint(source, targets) == {"data_position": {"epoch": 1, "row": 17}, "step": 120}
        for name, tensor in saved.items():
            assert torch.equal(targets[name], tensor) and targets[name].dtype == tensor.dtype, name
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == addresses
    assert read_meta(path)["step"] == 120


def test_optional_tensors_are_read_where_both_sides_have_them_alike(tmp_path):
    manager = CheckpointManager(tmp_path, limit=1)
    saved = {"weight": torch.ones(2), "fp8.a": torch.ones(2), "fp8.longer": torch.ones(4), "fp8.gone": torch.ones(2)}
    manager.save(1, saved, {})
    wanted = {"weight": (2,), "fp8.a": (2,), "fp8.longer": (3,), "fp8.new": (2,)}
    targets = {name: torch.zeros(shape) for name, shape in wanted.items()}
    with pytest.raises(UserError, match="fp8.new is not in the checkpoint"):
        load_checkpoint(manager.find("latest"), targets)
    assert load_checkpoint(manager.find("latest"), targets, "fp8.")["step"] == 1
    assert {name: tensor.sum().item() for name, tensor in targets.items()} == {
        "weight": 2.0,
        "fp8.a": 2.0,
        "fp8.longer": 0.0,
        "fp8.new": 0.0,
    }
    with pytest.raises(UserError, match="other is not in the checkpoint"):
        load_checkpoint(manager.find("latest"), {**targets, "other": torch.zeros(1)}, "fp8.")


def test_the_thread_that_writes_stays_on_its_ranks_gpu(tmp_path, monkeypatch):
    """A thread of Python begins at GPU 0."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    manager = CheckpointManager(tmp_path, limit=1)
    manager.save_in_background(1, {"tensor": torch.ones(2)}, {})
    manager.finish()
    ((device, thread),) = chosen
    assert device == 3 and thread is not threading.main_thread()


def test_no_pickle_but_the_librarys_index(tmp_path):
    path = CheckpointManager(tmp_path, limit=1).save(1, make_tensors(), {})
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json", "meta.json"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["tensors"]["model/bf16"] == {"shape": [33], "dtype": "torch.bfloat16"}
    assert sorted(manifest["files"]) == [".metadata", "__0_0.distcp", "meta.json"]


def test_limit_keeps_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    for step in (10, 20, 30):
        manager.save(step, make_tensors(step), {})
    assert names_in(manager) == ["latest", "step-00000020", "step-00000030"]


def test_limit_of_one_and_an_earlier_run_in_the_same_folder(tmp_path):
    """What was saved last counts as newest, whatever its step; the checkpoint just written always stays."""
    CheckpointManager(tmp_path, limit=5).save(1000, make_tensors(), {})
    manager = CheckpointManager(tmp_path, limit=1)
    manager.save(5, make_tensors(), {})
    assert names_in(manager) == ["latest", "step-00000005"]
    (manager.folder / "latest").unlink()
    assert manager.find("latest").name == "step-00000005"


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    manager.save(7, make_tensors(1), {"try": 1})
    manager.save(7, make_tensors(2), {"try": 2})
    targets = blank_like(make_tensors())
    assert load_checkpoint(manager.find("latest"), targets)["try"] == 2
    assert torch.equal(targets["model/weight"], make_tensors(2)["model/weight"])
    assert names_in(manager) == ["latest", "step-00000007"]


def test_a_kill_while_replacing_loses_nothing(tmp_path):
    """Between the two renames of a replacement the old checkpoint has another name; it is still found, and renamed
    back.
    """
    manager = CheckpointManager(tmp_path, limit=2)
    path = manager.save(7, make_tensors(), {})
    replaced = path.with_name(".replaced-" + path.name)
    path.rename(replaced)
    assert manager.find("latest") == replaced
    manager.clean_up()
    assert manager.find("latest") == path
    assert names_in(manager) == ["latest", "step-00000007"]


def test_stale_temporaries_are_removed(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    path = manager.save(1, make_tensors(), {})
    shutil.copytree(path, path.with_name(".tmp-step-00000002"))
    shutil.copytree(path, path.with_name(".tmp-deleting-step-00000000"))
    path.with_name(".tmp-latest").write_text("step-0")
    CheckpointManager(tmp_path, limit=2, is_main=False).clean_up()
    assert len(names_in(manager)) == 5
    manager.clean_up()
    assert names_in(manager) == ["latest", "step-00000001"]
    CheckpointManager(tmp_path / "new", limit=2).clean_up()


def test_a_background_save_is_what_was_there_when_it_was_asked_for(tmp_path):
    manager, tensors = CheckpointManager(tmp_path, limit=2), make_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    path = manager.save_in_background(1, tensors, {"entry": 5})
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    manager.finish()
    loaded = blank_like(tensors)
    assert load_checkpoint(path, loaded)["entry"] == 5
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def test_the_failure_of_a_background_save_is_raised_by_what_follows(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, limit=2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    manager.save_in_background(1, make_tensors(), {})
    with pytest.raises(UserError, match="with 0.0 MiB free"):
        manager.finish()
    manager.finish()


# Finding and refusing


def test_latest_falls_back_to_the_newest_complete_checkpoint(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, limit=3)
    for step in (1, 2, 3):
        manager.save(step, make_tensors(step), {})
    (manager.folder / "step-00000003" / "__0_0.distcp").unlink()
    assert manager.find("latest").name == "step-00000002"
    assert "falling back to" in caplog.text and "__0_0.distcp is missing" in caplog.text
    for pointer in ("", "../elsewhere", "step-00000099"):
        (manager.folder / "latest").write_text(pointer)
        assert manager.find("latest").name == "step-00000002"
    (manager.folder / "latest").unlink()
    assert manager.find("latest").name == "step-00000002"


def test_nothing_to_resume_from(tmp_path):
    manager = CheckpointManager(tmp_path, limit=3)
    with pytest.raises(UserError, match="--resume_from latest: there is no complete checkpoint under .*checkpoints"):
        manager.find("latest")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        manager.find(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"not a complete checkpoint: it has no manifest\.json"):
        manager.find(str(tmp_path))


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def change_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("__0_0.distcp", truncate, r"__0_0\.distcp has \d+ bytes instead of \d+"),
        ("__0_0.distcp", lambda path: path.unlink(), r"__0_0\.distcp is missing"),
        (".metadata", change_a_byte, r"\.metadata has been changed"),
        ("meta.json", truncate, r"meta\.json has \d+ bytes instead of \d+"),
        ("manifest.json", truncate, r"manifest\.json is not valid JSON"),
        ("manifest.json", lambda path: path.write_text('{"format": 2}'), "format 2 is not 1"),
    ],
)
def test_damage_is_named_and_changes_nothing(tmp_path, name, damage, sentence):
    manager = CheckpointManager(tmp_path, limit=1)
    path = manager.save(3, make_tensors(), {"long": "x" * 100})
    damage(path / name)
    targets = blank_like(make_tensors())
    with pytest.raises(UserError, match=sentence):
        load_checkpoint(path, targets)
    with pytest.raises(UserError, match=sentence):
        read_meta(path)
    assert not any(tensor.any() for tensor in targets.values())


def test_other_tensors_are_refused_by_name(tmp_path):
    manager = CheckpointManager(tmp_path, limit=1)
    path = manager.save(3, make_tensors(), {})

    def load(changes, sentence):
        targets = {
            name: tensor for name, tensor in {**blank_like(make_tensors()), **changes}.items() if tensor is not None
        }
        with pytest.raises(UserError, match=sentence):
            load_checkpoint(path, targets)
        assert not any(tensor.any() for tensor in targets.values())

    load({"model/bf16": None}, "model/bf16 is in the checkpoint only")
    load({"model/lora_A": torch.zeros(3)}, "model/lora_A is not in the checkpoint")
    load(
        {"model/weight": torch.zeros(32, 64)},
        r"model/weight is torch.float32 \[64, 32\] in the checkpoint and torch.float32 \[32, 64\]",
    )
    load(
        {"model/bf16": torch.zeros(33)},
        r"model/bf16 is torch.bfloat16 \[33\] in the checkpoint and torch.float32 \[33\]",
    )
    load({f"extra/{i}": torch.zeros(1) for i in range(8)}, "extra/0 .*; extra/1 .*; extra/2 .*; and 5 more")


def test_compatibility():
    saved = json.loads(
        json.dumps({"hidden_size": 64, "layers": (1, 2), "recipe": "delayed", "optimizer": "adamw_fp32"})
    )
    check_compatible(saved, {"hidden_size": 64, "layers": (1, 2), "recipe": "delayed", "optimizer": "adamw_fp32"})
    changed = {"hidden_size": 64, "layers": (1, 2), "recipe": "current", "optimizer": "adamw_fp32"}
    with pytest.raises(UserError, match="recipe was 'delayed' and is 'current'"):
        check_compatible(saved, changed)
    other = {"hidden_size": 128, "layers": (1, 2), "recipe": "delayed", "rope_theta": 1e4}
    with pytest.raises(UserError) as caught:
        check_compatible(saved, other)
    for phrase in (
        "hidden_size was 64 and is 128",
        "optimizer was 'adamw_fp32' and is absent",
        "rope_theta was absent and is 10000.0",
    ):
        assert phrase in str(caught.value)
    assert "recipe" not in str(caught.value)


# Random states


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]


@pytest.mark.parametrize("odd_number_of_gauss", [False, True])
def test_random_states_round_trip(tmp_path, odd_number_of_gauss):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    if odd_number_of_gauss:  # these generators make normal numbers in pairs and keep the second
        random.gauss(0, 1), np.random.randn()
    manager = CheckpointManager(tmp_path, limit=1)
    manager.save(1, rng_state(rank=3), {})
    want = [draw() for _ in range(3)]
    targets = rng_state(rank=3)
    load_checkpoint(manager.find("latest"), targets)
    restore_rng_state(targets, rank=3)
    assert [draw() for _ in range(3)] == want


def test_random_states_of_other_ranks_may_stay_in_the_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path, limit=1)
    manager.save(1, {"weight": torch.ones(2), **rng_state(rank=0), **rng_state(rank=1)}, {})
    targets = {"weight": torch.zeros(2), **rng_state(rank=1)}
    load_checkpoint(manager.find("latest"), targets)
    assert torch.equal(targets["weight"], torch.ones(2))


# Kills


NUM_TENSORS, ELEMENTS = 6, 1_000_000  # 24 MB


def state_at(step):
    return {f"tensor_{i}": torch.full((ELEMENTS,), float(step * 10 + i)) for i in range(NUM_TENSORS)}


def resume_and_save_forever(output_dir, connection):
    """A training run reduced to its checkpoints: resume from the latest, then save one step after the other."""
    torch.set_num_threads(1)
    manager = CheckpointManager(output_dir, limit=2)
    manager.clean_up()
    step = 0
    if (manager.folder / "latest").exists():
        tensors = blank_like(state_at(0))
        step = load_checkpoint(manager.find("latest"), tensors)["step"]
        assert all(torch.equal(tensors[name], want) for name, want in state_at(step).items())
    connection.send(step)
    while True:
        step += 1
        manager.save(step, state_at(step), {"value": step})
        connection.send(step)


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    rng = random.Random(0)
    manager = CheckpointManager(tmp_path, limit=2)
    last_reported, kills_inside_a_save = 0, 0
    for kill in range(60):
        if kill >= 8 and kills_inside_a_save:
            break
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=resume_and_save_forever, args=(str(tmp_path), sender), daemon=True)
        process.start()
        sender.close()
        assert receiver.poll(60), "the process did not come up"
        resumed_at = receiver.recv()
        assert resumed_at >= last_reported
        if kill == 0:
            assert receiver.poll(60), "no first checkpoint"
        time.sleep(rng.uniform(0.0, 0.4))
        process.kill()
        process.join()
        assert process.exitcode == -9
        last_reported = max(last_reported, resumed_at)
        try:
            while receiver.poll():
                last_reported = max(last_reported, receiver.recv())
        except EOFError:
            pass
        kills_inside_a_save += any(name.startswith(".tmp-step-") for name in names_in(manager))

        path = manager.find("latest")
        tensors = blank_like(state_at(0))
        meta = load_checkpoint(path, tensors)
        assert meta["step"] == meta["value"] >= last_reported
        assert all(torch.equal(tensors[name], want) for name, want in state_at(meta["step"]).items())
        complete = [name for name in names_in(manager) if name.startswith("step-")]
        assert len(complete) <= 3, "two, and one more when the kill fell between a save and the deletion of the oldest"
    assert kills_inside_a_save >= 1
    assert last_reported > 1
    manager.clean_up()
    assert not [name for name in names_in(manager) if name.startswith(".")]


def interrupt_while_saving(output_dir, connection):
    manager = CheckpointManager(output_dir, limit=2)
    try:
        step = 0
        while True:
            step += 1
            manager.save(step, state_at(step), {})
            connection.send(step)
    except KeyboardInterrupt:
        connection.send("interrupted")
        connection.send(names_in(manager))


@pytest.mark.slow
def test_ctrl_c_during_a_save_is_an_interrupt_and_cleans_up(tmp_path):
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=interrupt_while_saving, args=(str(tmp_path), sender), daemon=True)
    process.start()
    sender.close()
    assert receiver.poll(60) and receiver.recv() == 1
    os.kill(process.pid, signal.SIGINT)
    messages = []
    while not messages or messages[-1] != "interrupted":
        assert receiver.poll(60)
        messages.append(receiver.recv())
    names = receiver.recv()
    process.join()
    assert process.exitcode == 0
    assert not [name for name in names if name.startswith(".tmp")]
    CheckpointManager(tmp_path, limit=2).find("latest")


# Several ranks


def save_sharded(output_dir, rendezvous, rank):
    """One of two ranks: saves half of a sharded tensor, a replicated one and its own random state, and loads them
    again.
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
        if step == 1:
            manager.save_in_background(step, tensors, {"from_rank": rank})
        else:
            manager.save(step, tensors, {"from_rank": rank})
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert load_checkpoint(manager.find("latest"), targets) == {"from_rank": 0, "step": 2}
    assert torch.equal(targets["sharded"].full_tensor(), tensors["sharded"].full_tensor())
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors if name != "sharded")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_save_what_one_can_read(tmp_path):
    output_dir = str(tmp_path / "run")
    ranks = [
        CONTEXT.Process(target=save_sharded, args=(output_dir, str(tmp_path / "rendezvous"), rank), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    manager = CheckpointManager(output_dir, limit=1)
    assert names_in(manager) == ["latest", "step-00000002"]
    targets = {"sharded": torch.zeros(5, 2), "replicated": torch.zeros(3)}
    load_checkpoint(manager.find("latest"), targets)
    assert torch.equal(targets["sharded"], torch.arange(10.0).reshape(5, 2) * 2)
    assert torch.equal(targets["replicated"], torch.full((3,), 2.0))


# Full disks


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount command")
@pytest.mark.parametrize(
    "too_much",
    [
        pytest.param({"weight": torch.zeros(5_000_000)}, id="seen-beforehand"),
        # The numbers are few but each tensor takes more than a kilobyte of file, so the disk fills in the middle of a
        # save.
        pytest.param({f"weight_{i}": torch.zeros(1) for i in range(6000)}, id="during-the-save"),
    ],
)
def test_full_disk(small_disk, too_much):
    manager = CheckpointManager(small_disk, limit=2)
    good = {"weight": torch.arange(500_000.0)}
    path = manager.save(1, good, {})
    sentence = r"checkpoint .*step-00000002 needs [\d.]+ MiB and .* \(or quota\) is full, with [\d.]+ MiB free.*intact"
    with pytest.raises(UserError, match=sentence):
        manager.save(2, too_much, {})
    assert names_in(manager) == ["latest", "step-00000001"]
    targets = blank_like(good)
    load_checkpoint(manager.find("latest"), targets)
    assert torch.equal(targets["weight"], good["weight"])
    assert manager.save(3, good, {}) != path, "a save that fits works again"


def test_file_size_limit(tmp_path):
    """The same on machines where nothing can be mounted: the kernel refuses to let a file grow."""
    manager = CheckpointManager(tmp_path, limit=2)
    manager.save(1, make_tensors(), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(UserError, match="step-00000002 needs .*file size limit"):
            manager.save(2, {"weight": torch.zeros(1_000_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(manager) == ["latest", "step-00000001"]
    load_checkpoint(manager.find("latest"), blank_like(make_tensors()))


def test_other_errors_keep_their_type(tmp_path):
    manager = CheckpointManager(tmp_path, limit=2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        manager.save(1, make_tensors(), {"bad": object()})
    assert names_in(manager) == []
