"""Whether processes of tests can be forked from one that has its imports; without a GPU the attempt to use one fails, and says why."""

from __future__ import annotations

import os

import torch

from tests import forking


def test_what_stands_in_the_way_is_said_and_remembered(monkeypatch):
    for name in (forking._TRIED, "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(forking, "_has_gpu", lambda: True)
    in_the_way = forking.try_to_fork()
    if torch.cuda.is_available():
        assert in_the_way is None or "CUDA" in in_the_way
    else:
        assert in_the_way is not None and ("CUDA" in in_the_way or "NVIDIA" in in_the_way)
    assert os.environ[forking._TRIED] == str(int(in_the_way is None))


def test_beside_a_gpu_it_must_have_been_tried(monkeypatch):
    monkeypatch.setattr(forking, "_has_gpu", lambda: True)
    for tried, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(forking._TRIED, tried)
        assert forking.can_fork() == expected
    monkeypatch.setattr(forking, "_has_gpu", lambda: False)
    assert forking.can_fork() and forking.try_to_fork() is None
