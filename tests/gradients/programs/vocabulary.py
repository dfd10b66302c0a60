"""The statements that a random program may hold, as text with placeholders.

Placeholders are filled by `generate.Drawer`, by name:
a          the operand that the statement is about, a floating tensor
b, s       another that broadcasts with a; one of a's shape
onto, same one that may be written into a; the same without broadcasting
mask       booleans that broadcast with a
c, small   a constant; one near 0.3
dim, dims  a dimension of a (-1 if there is none), some of them; keep: True or False
perm, wide an order of a's dimensions; the arguments that expand a new dimension dim
index, start, half: a position, a start and half the size, along dim
rows, distinct, picks, firsts: indices along dim, with and without repeats; as gather wants them;
           along the first dimension
weight, matrix, vector, bias, kernel, gain, shift, ids: operands of a layer that takes a
target, classes: what a loss compares a with; buffer: a buffer

Every statement is tame: its slope is bounded for operands of moderate size, and the generator looks
at what it gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """One statement's text and what its operand must be.

    ndim: at least so many dimensions, at most `most`. kink: where its derivative jumps: "0" for
    operands near zero, "max" for ties along dim, or the bounds of a clamp, by comma. within: the
    operand's largest size. size: least size of `dim`. half: whether half types may go in.
    """

    text: str
    ndim: int = 0
    most: int = 5
    kink: str = ""
    within: float = 6.0
    size: int = 1
    half: bool = True


def _forms(text: str, **facts: object) -> list[Form]:
    return [Form(line.strip(), **facts) for line in text.strip().splitlines()]  # type: ignore[arg-type]


UNARY = [
    *_forms("""
        torch.tanh({a})
        torch.sigmoid({a})
        torch.sin({a})
        torch.cos({a})
        {a}.sin() * {a}.cos()
        functional.softplus({a})
        functional.gelu({a})
        functional.gelu({a}, approximate="tanh")
        functional.silu({a})
        functional.mish({a})
        functional.logsigmoid({a})
        torch.erf({a})
        torch.atan({a})
        torch.asinh({a})
        torch.exp(-{a}.square())
        torch.exp({a}.tanh() * 0.5)
        torch.log1p({a}.square())
        torch.sqrt({a} * {a} + {small})
        torch.rsqrt({a} * {a} + 0.7)
        ({a} * {a} + 1.0).reciprocal()
        1.0 / (1.5 + {a}.square())
        torch.expm1({a}.tanh() * 0.4)
        torch.special.expit({a} * {c})
        -{a}
        {a} * {c}
        {a} * {c} + {c}
        {a} / 1.7
        {c} - {a}
        {a} + {small}
        2.0 ** ({a}.tanh())
        ({a}.square() + 0.5).log()
        ({a}.square() + 0.5) ** 0.75
        torch.sinh({a}.tanh())
        torch.nan_to_num({a})
        {a}.clone()
        {a}.contiguous()
    """),
    *_forms("""
        {a}.square()
        {a} * {a}
        {a}.pow(2)
        {a} ** 3 * 0.3
        torch.exp({a} * 0.7)
        torch.cosh({a} * 0.6)
    """, within=2.5),
    *_forms("""
        torch.relu({a})
        torch.abs({a})
        functional.leaky_relu({a}, {small})
        functional.elu({a} * 1.0)
        functional.selu({a})
        functional.celu({a}, 1.3)
        functional.softsign({a})
        {a} * ({a} > 0)
        torch.where({a} > 0, {a}, {a} * {small})
        {a}.sign() * {a}.square()
    """, kink="0", half=False),
    *_forms("""
        torch.clamp({a}, -0.8, 0.9)
        {a}.clamp(min=-0.8)
        {a}.clamp_max(0.9)
        functional.hardtanh({a}, -0.8, 0.9)
        functional.threshold({a}, 0.9, -0.8)
    """, kink="-0.8,0.9", half=False),
    *_forms("""
        functional.hardsigmoid({a})
        functional.hardswish({a})
        functional.relu6({a})
    """, kink="-3.0,0.0,3.0,6.0", half=False),
]  # fmt: skip

BINARY = [
    *_forms("""
        {a} + {b}
        {b} + {a}
        {a} - {b}
        {b} - {a}
        {a} * {b}
        torch.add({a}, {b}, alpha={small})
        torch.sub({b}, {a}, alpha={c})
        {a} * torch.sigmoid({b})
        {a}.tanh() * {b} + {a}
        {a} / ({b} * {b} + 1.0)
        {a} / (1.2 + {b}.sigmoid())
        torch.atan2({a}, {b}.square() + 1.0)
        torch.logaddexp({a}, {b})
        torch.lerp({a}, {s}, {small})
        torch.lerp({a}, {s}, torch.sigmoid({a}))
        torch.addcmul({a}, {s}, {b}, value={small})
        torch.addcdiv({a}, {s}, {b} * {b} + 1.0)
        torch.where({mask}, {a}, {b})
        torch.where({mask}, {a} * {c}, {b}.sin())
        torch.where({mask}, {a}, {c})
        {a}.masked_fill({mask}, {c})
        {a} * {mask}
        {a} + {mask}.to({a}.dtype) * {b}
        ({a}.square() + 0.5) ** {b}.tanh()
        torch.xlogy({a}, {b}.square() + 0.8)
        {a} + {b}.detach() * {small}
        {a} * {b}.mean()
        {a} + {b}.sum(-1, keepdim=True) * 0.3
    """),
    *_forms("""
        torch.hypot({a}, {b}.square() + 0.6)
        torch.stack([{a}, {s}]).mean(0)
        torch.outer({a}.flatten(), {b}.flatten()).sum(1).mul({small})
        functional.mse_loss({a}, {s}, reduction="none")
        functional.smooth_l1_loss({a}, {s} * 0.3, reduction="none")
    """),
    *_forms("""
        torch.maximum({a}, {b})
        torch.minimum({a}, {b})
        torch.where({a} > {b}, {a}, {b} * {small})
        torch.fmax({a}, {b})
    """, kink="b", half=False),
]  # fmt: skip

VIEW = [
    *_forms("""
        {a}.reshape(-1)
        {a}.flatten()
        {a}.unsqueeze({dim})
        {a}.unsqueeze(-1)
        {a}.unsqueeze(0).expand(2, *{a}.shape)
        {a}.permute({perm})
        {a}.transpose({dim}, -1)
        {a}.movedim({dim}, 0)
        {a}.flip({dim})
        {a}.roll(1, {dim})
        {a}.select({dim}, {index})
        {a}.narrow({dim}, {start}, {a}.shape[{dim}] - {start})
        {a}[..., {start}:]
        {a}[..., -1]
        {a}[0]
        {a}[None, ...]
        {a}.squeeze()
        {a}.unsqueeze({dim}).expand({wide})
        {a}.repeat_interleave(2, {dim})
        {a}.view({a}.shape)
        {a}.clone().view(-1)
    """, ndim=1),
    *_forms("""
        {a}[..., ::2]
        {a}[1:]
        {a}[:-1]
        {a}.chunk(2, {dim})
        {a}.split({half}, {dim})
        {a}.unfold({dim}, 2, 1)
        {a}.narrow({dim}, 0, 2)
        {a}.tensor_split(2, {dim})
    """, ndim=1, size=2),
    *_forms("""
        {a}.mT
        {a}.flatten(-2)
        {a}.flatten(0, 1)
        {a}.diagonal()
        {a}.diagonal(offset=1, dim1=0, dim2=-1)
        {a}.tril()
        {a}.triu(1) + {a}
        {a}[:, {index}]
        {a}[:, None]
        {a}[..., 0, :]
        {a}.reshape({a}.shape[1], -1)
        {a}.as_strided(({a}.shape[-1],), (1,))
        {a}.transpose(0, 1).reshape(-1)
        {a}.swapaxes(0, -1)
        {a}.unflatten({dim}, (-1, 1))
        {a}.view_as({a} * 1.0)
    """, ndim=2, size=2),
    *_forms("{a}.unbind({dim})", ndim=2),
    *_forms("{a}.t().contiguous()", ndim=2, most=2),
    *_forms("{a}.expand(3)\n{a}.reshape(1, 1)\n{a}.view(1)\n{a}.expand(2, 5)", most=0),
]  # fmt: skip

REDUCE = [
    *_forms("""
        {a}.sum({dims}, keepdim={keep}) * 0.4
        {a}.mean({dims}, keepdim={keep})
        {a}.square().mean({dims}, keepdim={keep})
        torch.logsumexp({a}, {dims}, keepdim={keep})
        {a}.sum()
        {a}.mean()
        {a} - {a}.mean({dim}, keepdim=True)
        {a}.cumsum({dim}) * 0.5
        {a} * torch.rsqrt({a}.square().mean({dim}, keepdim=True) + 0.1)
        {a}.tanh().prod({dim}, keepdim={keep}) + {a}.mean({dim}, keepdim={keep})
        torch.linalg.vector_norm({a}, dim={dims}, keepdim={keep})
        {a}.norm(dim={dim}, keepdim={keep})
        {a}.sum_to_size({a}.shape[-1:]) * 0.4
        functional.normalize({a}, dim={dim}, eps=0.1)
    """, ndim=1),
    *_forms("""
        {a}.amax({dim}, keepdim={keep})
        {a}.amin({dim}, keepdim={keep})
        {a}.max({dim}).values
        {a}.min({dim}, keepdim={keep}).values
        {a}.sort({dim}).values
        {a}.topk(2, {dim}).values
        {a} - {a}.amax({dim}, keepdim=True).detach()
    """, ndim=1, kink="max", half=False, size=2),
    *_forms("""
        {a}.var({dim}, keepdim={keep})
        {a}.std({dim}, keepdim={keep})
        {a}.var({dims}, correction=0, keepdim={keep})
        ({a} - {a}.mean({dim}, keepdim=True)) / ({a}.std({dim}, keepdim=True) + 0.3)
    """, ndim=1, size=3),
]  # fmt: skip

NORM = [
    *_forms("""
        {a}.softmax({dim})
        torch.softmax({a} * {c}, {dim})
        functional.log_softmax({a}, {dim})
        {a}.softmax({dim}, dtype=torch.float32)
        functional.softmin({a}, {dim})
        functional.layer_norm({a}, {a}.shape[-1:])
        functional.layer_norm({a}, {a}.shape[-1:], {gain}, {shift})
        functional.layer_norm({a}, {a}.shape[-1:], {gain})
        functional.rms_norm({a}, {a}.shape[-1:], {gain}, eps=1e-3)
        functional.glu(torch.cat([{a}, {a}], -1), -1)
    """, ndim=1, size=3),
    *_forms("""
        functional.instance_norm({a}.reshape(1, {a}.shape[0], -1))
        functional.group_norm({a}.reshape(1, {a}.shape[0], -1), 1)
        functional.batch_norm({a}.contiguous(), None, None, None, None, True)
    """, ndim=2, size=4, half=False),
]  # fmt: skip

GATHER = [
    *_forms("""
        {a}.index_select({dim}, {rows})
        torch.gather({a}, {dim}, {picks})
        {a}.take_along_dim({picks}, {dim})
        {a}[{firsts}]
        {a}.index_add({dim}, {rows}, {a}.index_select({dim}, {rows}) * {small})
        {a}.scatter_add({dim}, {picks}, {a}.gather({dim}, {picks}).sin())
        {a}.index_copy({dim}, {distinct}, {a}.index_select({dim}, {distinct}).tanh())
        {a}.index_put(({firsts},), {a}[{firsts}] * {small}, accumulate=True)
        {a}.index_fill({dim}, {distinct}, {c})
        torch.zeros_like({a}).index_add({dim}, {rows}, {a}.index_select({dim}, {rows})) + {a} * 0.5
        {a} + {a}.new_ones(()) * {small}
    """, ndim=1),
    *_forms("""
        functional.embedding({ids}, {a})
        functional.embedding({ids}, {a}, padding_idx=0)
    """, ndim=2, most=2),
]  # fmt: skip

CONTRACT = [
    *_forms("""
        functional.linear({a}, {weight})
        functional.linear({a}, {weight}, {bias})
        {a} @ {matrix}
        torch.matmul({a}, {matrix}) * {c}
        {a} @ {vector} * 0.4
        torch.einsum("...i,oi->...o", {a}, {weight})
    """, ndim=1),
    *_forms("""
        {a} @ {a}.mT * 0.2
        torch.einsum("...ij,...kj->...ik", {a}, {s}) * 0.2
    """, ndim=2),
    *_forms("""
        torch.addmm({bias}, {a}, {weight}.t(), beta={c})
        torch.mm({a}, {matrix})
        functional.conv1d({a}.unsqueeze(0), {kernel}).squeeze(0)
    """, ndim=2, most=2, size=3),
    *_forms("""
        torch.bmm({a}, {s}.mT) * 0.2
        torch.baddbmm({a} @ {a}.mT * 0.2, {a}, {s}.mT, alpha=0.2)
        functional.scaled_dot_product_attention({a}, {s}, {s}.tanh())
    """, ndim=3, most=3, size=2),
    *_forms("torch.dot({a}, {s}) * 0.2", ndim=1, most=1),
]  # fmt: skip

JOIN = [
    *_forms("""
        torch.cat([{a}, {s}], {dim})
        torch.cat([{a} * {small}, {a}.sin(), {s}], {dim})
        torch.stack([{a}, {s}], {dim})
        torch.cat([{a}[..., {start}:], {a}[..., :{start}].tanh()], -1)
        functional.pad({a}, (1, 0))
        functional.pad({a}, (1, 2), value={c})
        torch.cat([-{a}[..., 1:], {a}[..., :1]], -1) * {b} + {a}
    """, ndim=1),
    *_forms("""
        functional.pad({a}, (0, 1, 1, 0))
        torch.stack({a}.unbind(0), -1)
        torch.vstack([{a}, {s}])
    """, ndim=2),
]  # fmt: skip

CAST = _forms("""
    {a}.to(torch.bfloat16)
    {a}.bfloat16().float()
    {a}.to(torch.float32)
    {a}.double()
    {a}.to(torch.float64)
    {a}.half()
    {a}.float() * {b}
    {a}.to(torch.float16).to(torch.float32)
    {a}.type_as({b})
    ({a} * {c}).to(torch.bfloat16)
""")

OTHER = [
    *_forms("{a}.detach()\n{a}.detach().clone()\n{a} * {a}.detach().sigmoid()"),
    *_forms("functional.dropout({a}, 0.3)\nfunctional.dropout({a}, 0.6) + {a}", ndim=1),
]

WRITE = [
    *_forms("""
        {a}.add_({c})
        {a}.mul_({c})
        {a}.tanh_()
        {a}.sigmoid_()
        {a}.neg_()
        {a}.sin_()
        {a}.add_({onto})
        {a}.mul_({onto})
        {a}.sub_({onto}, alpha={small})
        {a}.copy_({onto})
        {a}.addcmul_({onto}, {onto}, value={small})
        {a}.lerp_({same}, {small})
        {a}.masked_fill_({mask}, {c})
        {a}.fill_({c})
        {a}.zero_().add_({onto})
        {a}.div_(1.7)
        {a}.square_()
    """),
    *_forms("""
        {a}.relu_()
        {a}.abs_()
        functional.relu({a}, inplace=True)
        functional.leaky_relu_({a}, {small})
    """, kink="0", half=False),
    *_forms("{a}.clamp_(-0.8, 0.9)", kink="-0.8,0.9", half=False),
    *_forms("""
        {a}[..., 0] = {c}
        {a}[..., {start}:] += {small}
        {a}[..., {start}:].mul_({c})
        {a}[..., -1].tanh_()
        {a}[0].copy_({onto0})
        {a}.select({dim}, {index}).sin_()
        {a}.narrow({dim}, {start}, {a}.shape[{dim}] - {start}).mul_({c})
        {a}.transpose({dim}, -1).add_({small})
        {a}[{distinct0}] = {c}
        {a}.index_fill_({dim}, {distinct}, {c})
        {a}.index_add_({dim}, {rows}, {a}.detach().index_select({dim}, {rows}) * {small})
        {a}.index_put_(({firsts},), {a}.detach()[{firsts}] * {small}, accumulate=True)
        {a}.scatter_add_({dim}, {picks}, {a}.detach().gather({dim}, {picks}) * {small})
        {a}.scatter_({dim}, {picks}, {c})
        {a}[{mask}] = {c}
        {a}.unsqueeze(0)[..., 0].mul_({c})
        {a}.view(-1).mul_({c})
    """, ndim=1),
]  # fmt: skip

# Into a buffer, under no_grad or from detached values.
TRACK = _forms("""
    {buffer}.mul_(0.9).add_({a}.detach().mean(), alpha=0.1)
    {buffer}.add_({small})
    {buffer}.lerp_({a}.detach().mean().to({buffer}.dtype), {small})
    {buffer}.copy_({buffer} * 0.5 + {small})
    {buffer}[0].add_({a}.detach().amax().to({buffer}.dtype))
""")

# Sums of positive terms lose nothing by cancellation, so their value may be compared.
TERM = [
    *_forms("""
        {a}.square().mean()
        {a}.square().sum() * 0.1
        functional.softplus({a}).mean()
        ({a} * {a}).mean()
        {a}.sigmoid().sum() * 0.2
        functional.mse_loss({a}, {target})
        functional.smooth_l1_loss({a}, {target})
        functional.huber_loss({a}.float(), {target}.float(), delta=0.9)
        torch.linalg.vector_norm({a})
        functional.binary_cross_entropy_with_logits({a}, {target}.sigmoid())
    """),
    *_forms("""
        functional.cross_entropy({a}, {classes})
        functional.nll_loss({a}.log_softmax(-1), {classes})
        functional.cross_entropy({a}, {classes}, label_smoothing=0.1)
        functional.cross_entropy({a}, {classes}, ignore_index=0, reduction="sum") * 0.1
    """, ndim=2, most=2, size=3),
]  # fmt: skip

# These cancel: only their gradients are compared.
CANCELLING = [
    *_forms("""
        {a}.mean()
        {a}.sin().mean()
        {a}.sum() * 0.2
        ({a} * {target}).mean()
        ({a} * {target}).sum() * 0.1
        {a}.logsumexp(tuple(range({a}.dim()))) * 0.3
        {a}.float().tanh().mean() * 2.0
    """),
    *_forms("""
        functional.kl_div({a}.log_softmax(-1), {target}.softmax(-1), reduction="batchmean")
        functional.cosine_similarity({a}, {target}, dim=-1, eps=0.1).mean()
    """, ndim=2, most=2, size=3),
]  # fmt: skip

GROUPS: Mapping[str, tuple[float, list[Form]]] = {
    "unary": (22, UNARY),
    "binary": (22, BINARY),
    "view": (17, VIEW),
    "write": (11, WRITE),
    "reduce": (11, REDUCE),
    "norm": (7, NORM),
    "gather": (7, GATHER),
    "contract": (8, CONTRACT),
    "join": (6, JOIN),
    "cast": (5, CAST),
    "other": (5, OTHER),
}
"""Kinds of statement, with how often each is drawn."""
