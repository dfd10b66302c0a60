"""The table of operators that look at an operand's shape alone, held to ATen's CUDA kernels."""

from __future__ import annotations

import pytest
import torch

from tests.autodiff.pooling import CALLS, blank_operand_gradients


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
def test_backward_reads_its_operand_for_the_shape_alone(name, layout):
    x = torch.randn(CALLS[name][1], device="cuda")
    if layout is torch.channels_last:
        if x.dim() != 4:
            pytest.skip("channels-last is of four dimensions")
        x = x.contiguous(memory_format=layout)
    blank, given = blank_operand_gradients(name, x)
    torch.testing.assert_close(blank, given)
