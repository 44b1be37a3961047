"""The benchmark of grouped GEMMs: casts to fp8 and the places of the experts' rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.grouped_gemms import cast, placed


@pytest.mark.parametrize(("rows", "columns"), [(1, 512), (1, 128), (128, 128)])
def test_cast_values_times_their_scales_are_the_weights(rows, columns):
    weights = torch.randn(3, 256, 512) * torch.logspace(-3, 3, 3)[:, None, None]
    quantised, scales = cast(weights, rows, columns)
    assert scales.shape == (3, 256 // rows, 512 // columns)
    product = quantised.float() * scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    torch.testing.assert_close(product, weights, rtol=2**-4, atol=1e-3 * float(scales.max()))


def test_rows_of_an_expert_begin_at_a_multiple():
    places, expert_of = placed(torch.tensor([3, 0, 5]), 4)
    assert places.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert expert_of.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1]
