"""Builds an object like a finished profile of torch's profiler, with chosen kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch

STARTED_NS = 1_790_000_000_000_000_000
"""Start of the recording in `finished_profile`, in nanoseconds since 1970 as in torch's profiler."""


def finished_profile(*kernels: tuple[str, float, float], annotations: tuple[tuple[str, float, float], ...] = ()):
    """Return a profile with a host event and with `kernels` and `annotations`: (name, start, end), in microseconds."""
    cuda, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    rows = [(*kernel, cuda, False) for kernel in kernels] + [(*annotation, cuda, True) for annotation in annotations]
    rows.append(("cudaLaunchKernel", 0, 10_000_000, host, False))
    events = [
        SimpleNamespace(
            name=lambda name=name: name,
            start_ns=lambda start=start: STARTED_NS + round(1000 * start),
            end_ns=lambda end=end: STARTED_NS + round(1000 * end),
            device_type=lambda device=device: device,
            is_user_annotation=lambda is_annotation=is_annotation: is_annotation,
        )
        for name, start, end, device, is_annotation in rows
    ]
    results = SimpleNamespace(events=lambda: events, trace_start_ns=lambda: STARTED_NS)
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
