"""--push_to_hub: what reaches the hub, and what a user is told where nothing does. The client is huggingface_hub's."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import PeftConfig

from llm_fp8.config.parser import parse_config
from llm_fp8.utils.errors import UserError
from tests.support.hub_server import TOKEN, Hub, Repo, served
from tests.support.launches import ROOT, torchrun
from tests.support.small import summary_json

AT_THE_HUB = str(ROOT / "tests" / "support" / "at_the_hub.py")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served() as hub:
        yield hub


@pytest.fixture
def options(small_run, tmp_path) -> list[str]:
    return [*small_run, "--max_steps=2", "--push_to_hub", f"--output_dir={tmp_path / 'run'}"]


def run_at(hub: Hub, home: Path, *words: str, token: str | None = TOKEN, **more: str):
    """Run a command as a process whose user is logged in at `hub`."""
    environment = hub.environment(home, token) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
    given = {"cwd": home, "env": environment, "stdin": subprocess.DEVNULL}
    return subprocess.run(words, capture_output=True, text=True, **given)


@pytest.fixture
def train_here(hub, warm_python, tmp_path):
    """A function: run train_fp8.py so."""

    def run(*options: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run_at(hub, tmp_path, warm_python, AT_THE_HUB, str(ROOT / "train_fp8.py"), *options, **more)

    return run


@pytest.fixture
def two_train_here(hub, warm_python, tmp_path):
    """A function: run train_multi_gpu.py so, in two processes under torchrun."""

    def run(*options: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        command = [*torchrun(python=warm_python), AT_THE_HUB, str(ROOT / "train_multi_gpu.py")]
        return run_at(hub, tmp_path, *command, *options, "--batch_size=4", token=token)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_export_is_uploaded_to_a_new_repository(hub, tmp_path, options):
    """By the script as a user starts it."""
    done = run_at(hub, tmp_path, sys.executable, str(ROOT / "train_fp8.py"), *options, "--hub_private")
    assert done.returncode == 0, done.stderr
    (name,) = hub.repos
    repo = hub.repos[name]
    assert name == "me/run" and repo.private and repo.files == contents(tmp_path / "run" / "final")
    assert f"uploaded: {hub.url}/me/run/commit/1" in done.stdout.splitlines()
    card = repo.files["README.md"].decode()
    assert "| certificate | none |\n" in card and "| precision | fp32 |\n" in card
    assert "train_fp8.py" in card and "--push_to_hub" in card and "license" not in card


def test_what_an_earlier_upload_left(hub, tmp_path, options, train_here):
    """Loaders would take model.safetensors of before for the model; what the user put there stays."""
    earlier = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}", "config.json": b"{}"}
    repo = hub.repos["me/mine"] = Repo(files={**earlier, "LICENSE": b"mine", ".gitattributes": b"x"})
    done = train_here(*options, "--hub_model_id=me/mine")
    assert done.returncode == 0, done.stderr
    kept = {"LICENSE": b"mine", ".gitattributes": b"x"}
    assert repo.files == {**contents(tmp_path / "run" / "final"), **kept}


def test_an_adapter_is_uploaded_by_the_main_rank_alone(hub, tmp_path, options, two_train_here):
    done = two_train_here(*options, "--lora_rank=2")
    assert done.returncode == 0, done.stderr
    files = hub.repos["me/run"].files
    assert files == contents(tmp_path / "run" / "final") and "model.safetensors" not in files
    assert PeftConfig.from_pretrained(str(tmp_path / "run" / "final")).r == 2 and "adapter_model.safetensors" in files
    for once in ("GET /api/whoami-v2", "POST /api/repos/create", "POST /api/models/me/run/commit/main"):
        assert hub.requests.count(once) == 1


def test_a_hub_that_is_gone_after_the_training(hub, tmp_path, options, train_here):
    hub.leaves_before_upload = True
    done = train_here(*options)
    final = tmp_path / "run" / "final"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    sentence = done.stderr.splitlines()[-1]
    start, _, command = sentence.rpartition(" Upload it with: ")
    assert start.startswith(f"error: the run is finished and {final} is complete, but the upload to me/run failed (")
    assert summary_json(tmp_path / "run")["exported"] == str(final) and not hub.repos["me/run"].files

    hub.is_gone = hub.leaves_before_upload = False
    hf, *words = shlex.split(command)
    environment = hub.environment(tmp_path)
    subprocess.run([Path(sys.executable).parent / hf, *words], cwd=tmp_path, env=environment, check=True)
    assert hub.repos["me/run"].files == contents(final)


def refused(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """The sentence, after checking that nothing was trained."""
    assert done.returncode == 2 and not (folder / "metrics.jsonl").exists(), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))


def test_a_wrong_token_is_refused_before_the_run_on_all_ranks(hub, tmp_path, options, two_train_here):
    done = two_train_here(*options, token="hf_wrong")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(said) == 1  # torchrun's code
    assert said[0].startswith("error: --push_to_hub to run, the output folder's name: the hub does not accept this")
    assert "HF_TOKEN" in said[0] and "exitcode  : 2" in done.stderr and not hub.repos
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_the_network(hub, tmp_path, options, train_here):
    sentence = refused(train_here(*options, HF_HUB_OFFLINE="1"), tmp_path / "run")
    assert sentence.startswith("error: --push_to_hub needs the Hugging Face hub, and HF_HUB_OFFLINE")
    assert not hub.requests


REFUSED = {
    "no login": (
        [],
        None,
        "--push_to_hub: there is no Hugging Face login on this machine; run 'hf auth login', or set HF_TOKEN",
    ),
    "another's name": (["--hub_model_id=you/x"], TOKEN, "--hub_model_id you/x: this login cannot write there (403"),
    "read-only": (["--hub_model_id=me/read"], TOKEN, "--hub_model_id me/read: this login cannot write there (403"),
    "public": (["--hub_model_id=me/public", "--hub_private"], TOKEN, "--hub_private: me/public exists and is public;"),
    "no name": (["--hub_model_id=a b"], TOKEN, "--hub_model_id a b: this is no name of a repository ("),
}
"""Options and token -> how the sentence begins."""


def test_what_the_hub_does_not_take_is_known_before_the_run(hub, tmp_path):
    """In one process, one after the other; the last finds nobody at the hub's address."""
    hub.repos |= {"me/read": Repo(writable=False), "me/public": Repo(), "you/x": Repo(writable=False)}
    code = """
import json, os, sys
from llm_fp8.config.parser import parse_config
from llm_fp8.train.hub import prepare_hub_repo
from llm_fp8.utils.errors import UserError

for options, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        print(prepare_hub_repo(parse_config(["--push_to_hub", "--output_dir=x", *options]).run))
    except UserError as error:
        print(error)
"""
    cases = json.dumps([case[:2] for case in REFUSED.values()])
    run = [sys.executable, "-c", code]
    environment = hub.environment(tmp_path)
    done = subprocess.run([*run, cases], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for sentence, (_, _, start) in zip(done.stdout.splitlines(), REFUSED.values(), strict=True):
        assert sentence.startswith(start)
    alone = json.dumps([[[], TOKEN]])
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = subprocess.run([*run, alone], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "the hub at http://127.0.0.1:9 was not reached (" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--push_to_hub", "--no_export"], "--push_to_hub uploads final/, which --no_export does not write"),
        (["--hub_model_id=x"], "--hub_model_id and --hub_private have no effect without --push_to_hub"),
        (["--hub_private_repo"], "--hub_model_id and --hub_private have no effect without --push_to_hub"),
    ],
)
def test_what_cannot_take_effect_is_refused(argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_config(argv)
