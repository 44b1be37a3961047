"""Norms use cuDNN only if Transformer Engine has no kernel tuned for their width."""

from __future__ import annotations

import pytest

from llm_fp8.precision.te import VARIABLES, choose_norm_backend


@pytest.mark.parametrize(
    ("width", "major", "environ", "expected"),
    [
        (3072, 9, {}, dict.fromkeys(VARIABLES, "1")),
        (5120, 9, {}, dict.fromkeys(VARIABLES, "1")),
        (4096, 9, {}, {}),
        (896, 9, {}, {}),
        (3072, 10, {}, {}),
        (3072, 9, {VARIABLES[0]: "0"}, {VARIABLES[0]: "0", VARIABLES[1]: "1"}),
    ],
)
def test_widths_without_a_tuned_kernel_use_cudnn_on_hopper(width, major, environ, expected):
    choose_norm_backend(width, major, environ)
    assert environ == expected
