"""Operators and calls of op_db that aren't compared, each with its reason."""

from __future__ import annotations

import torch

from tests.gradients.op_db.calls import Call
from tests.gradients.op_db.samples import OPERATORS, Operator

UNTRACEABLE = frozenset({"view_copy", "torch.ops.aten._efficient_attention_forward"})
"""Operators that torch itself, whatever the backend, may have no shape of where eager has one:
torch 2.11's view_copy takes an input with gaps for one that can't be viewed, and the gradient of
attention with a scale gets two of them."""

LAID_OUT_OTHERWISE = {
    **dict.fromkeys(
        "nn.functional.batch_norm native_batch_norm _native_batch_norm_legit copysign "
        "div.floor_rounding native_dropout_backward stft".split(),
        "torch's fake tensors keep its operand's layout, or don't, where kernels do not",
    ),
    **dict.fromkeys(
        "fft.fft2 fft.fftn fft.ifft2 fft.ifftn".split(), "on torch 2.11 alone, not on 2.14"
    ),
}
"""Operators of which a region's results may have other strides than eager's, and why, where the
operands are permuted in memory. Their values are eager's all the same."""
ROWS_ONLY = frozenset({"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"})
"""Operators that read other operands as if they were rows: eager's own result is far from fp64."""


def reason(operator: Operator, dtype: torch.dtype, device: str = "cpu") -> str | None:
    """Why an operator isn't compared, as op_db itself has it, or None."""
    if operator.takes(dtype, device):
        return None
    kind = torch.device(device).type
    types = operator.types(kind)
    if not types:
        return f"torch differentiates it in no type on {kind}"
    if all(one.is_complex for one in types):
        return "it takes complex numbers only"
    return f"torch has no {str(dtype).removeprefix('torch.')} derivative of it on {kind}"


def excluded(dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, str]:
    """Every operator that isn't compared, and why."""
    reasons = ((name, reason(op, dtype, device)) for name, op in OPERATORS.items())
    return {name: why for name, why in reasons if why is not None}


def stock_error(call: Call) -> str | None:
    """Why torch can't trace a call, as torch.compile that computes nothing itself has it, or None.

    Asked only of operators that are named above.
    """
    if call.name not in UNTRACEABLE:
        return None
    try:
        torch.compile(call.function(), backend="aot_eager")(*call.fresh())
    except (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.BackendCompilerFailed) as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return None
