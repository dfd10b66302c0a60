"""Reentrant checkpoints: which parameters get gradients, zeros or none at all, as in eager."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainfuse
from tests.capture.scenarios import assert_like_eager, batch, seen, state_of

WIDTH = 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "weight decay": {"weight_decay": 0.3},
    "momentum": {"momentum": 0.9},
}


class Pair(nn.Module):
    """Three layers for a stretch, of which a loss need not use all."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.forward_ = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_(self, x)


def again(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True, **options)


def second_unused(m: Pair, x: Tensor) -> Tensor:
    return again(lambda h: (m.a(h), m.b(h)), m.first(x))[0]


def first_unused(m: Pair, x: Tensor) -> Tensor:
    return again(lambda h: (m.a(h), m.b(h)), m.first(x), preserve_rng_state=False)[1]


def none_used(m: Pair, x: Tensor) -> Tensor:
    h = m.first(x)
    return h + again(lambda h: (m.a(h), m.b(h)), h)[0].detach()


def no_differentiable_argument(m: Pair, x: Tensor) -> Tensor:
    return m.b(again(lambda x: m.a(m.first(x)), x))


def one_differentiable_argument_unused(m: Pair, x: Tensor) -> Tensor:
    return again(lambda x, _: m.a(x), x, m.first(x)) + 0 * m.b(x)


def argument_in_a_list(m: Pair, x: Tensor) -> Tensor:
    return again(lambda hs: m.a(hs[0]), [m.first(x)]) + m.b(x)


def results_in_a_list(m: Pair, x: Tensor) -> Tensor:
    h = m.first(x)
    return again(lambda h: [m.a(h)], h)[0] + m.b(h)


def results_in_a_dictionary(m: Pair, x: Tensor) -> Tensor:
    h = m.first(x)
    return again(lambda h: {"a": m.a(h), "b": (h,)}, h)["a"] + m.b(h)


def list_within_a_tuple(m: Pair, x: Tensor) -> Tensor:
    h = m.first(x)
    a, (b,) = again(lambda h: (m.a(h), [m.b(h)]), h)
    return a * b


class Both(NamedTuple):
    a: Tensor
    b: Tensor


class Named(OrderedDict[str, Tensor]):
    """As libraries of models return."""

    @property
    def a(self) -> Tensor:
        return self["a"]


def results_in_a_named_tuple(m: Pair, x: Tensor) -> Tensor:
    return again(lambda h: Both(m.a(h), m.b(h)), m.first(x))[0]


def named_tuple_without_history(m: Pair, x: Tensor) -> Tensor:
    return again(lambda x: Both(m.a(x), m.b(x)), x)[0] + m.first(x)


def named_tuple_within_a_tuple(m: Pair, x: Tensor) -> Tensor:
    h = m.first(x)
    a, both = again(lambda h: (m.a(h), Both(m.b(h), h)), h)
    return a * both.a


def results_in_a_class_of_dictionaries(m: Pair, x: Tensor) -> Tensor:
    h = m.first(x)
    return again(lambda h: Named(a=m.a(h)), h).a + m.b(h)


def indices_too(m: Pair, x: Tensor) -> Tensor:
    _, places, flag, a = again(lambda h: (m.b(h), h.argmax(1), h > 0, m.a(h)), m.first(x))
    return a * places[:, None] * flag


def detached_within(m: Pair, x: Tensor) -> Tensor:
    a, quiet, _ = again(lambda h: (m.a(h), m.b(h).detach(), m.b(h)), m.first(x))
    return a * quiet


def written_after(m: Pair, x: Tensor) -> Tensor:
    a, b = again(lambda h: (m.a(h), m.b(h)), m.first(x))
    b.mul_(2)
    a.add_(1).relu_()
    return a


def argument_returned(m: Pair, x: Tensor) -> Tensor:
    h, _ = again(lambda h: (h, m.a(h)), m.first(x))
    return h + 0 * m.b(x)


def nested(m: Pair, x: Tensor) -> Tensor:
    def inner(h: Tensor) -> tuple[Tensor, Tensor]:
        return m.a(h), m.b(h).exp()

    return again(lambda h: again(inner, h)[0].sin(), m.first(x))


def nested_without_an_argument(m: Pair, x: Tensor) -> Tensor:
    return again(lambda h: m.b(h) + again(m.a, x), m.first(x))


def within_an_ordinary_one(m: Pair, x: Tensor) -> Tensor:
    def outer(h: Tensor) -> Tensor:
        return again(lambda h: (m.a(h), m.b(h)), h)[0]

    return checkpoint(outer, m.first(x), use_reentrant=False)


def by_default(m: Pair, x: Tensor) -> Tensor:
    return checkpoint(lambda h: (m.a(h), m.b(h)), m.first(x))[0]


def not_finite(m: Pair, x: Tensor) -> Tensor:
    """Zeros times infinity."""
    return again(lambda h: (m.a(h), (m.b(h) * 0).sqrt()), m.first(x))[0]


OWN_CONTAINERS = [results_in_a_class_of_dictionaries]
"""What only eager can give back as it is."""
FORWARDS = [
    second_unused, first_unused, none_used, no_differentiable_argument,
    one_differentiable_argument_unused, argument_in_a_list, results_in_a_list,
    results_in_a_dictionary, results_in_a_named_tuple, named_tuple_without_history,
    list_within_a_tuple, indices_too, detached_within, written_after, argument_returned, nested,
    nested_without_an_argument, within_an_ordinary_one, by_default, not_finite,
    named_tuple_within_a_tuple, *OWN_CONTAINERS,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:None of the inputs")
@pytest.mark.covers("S checkpoint")
@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_gradients_are_there_where_eager_s_are(forward, optimizer, capture):
    def scenario(compile_):
        torch.manual_seed(3)
        model = Pair(forward)
        update = torch.optim.SGD(model.parameters(), lr=0.1, **OPTIMIZERS[optimizer])

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            update.step()
            return loss.detach()

        compiled = step
        if capture == "whole":
            compiled = compile_(step)
        else:
            compile_(model)
        calls = []
        for i in range(3):
            update.zero_grad()
            loss = compiled(batch(i)[0])
            calls.append((seen(loss), state_of(model, update, grads=True)))
        return calls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (compiled,) = assert_like_eager(scenario, "triton")
    report = compiled.explain() if capture == "whole" else trainfuse.explain(compiled)
    whole = capture == "whole" and forward not in OWN_CONTAINERS
    assert report.capture == ("whole_step" if whole else "regions")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": lambda v: v[..., ::2],
    "transposed": lambda v: v.t(),
    "transposed, with gaps": lambda v: v[::2].t(),
    "expanded": lambda v: v[:, :1].expand(-1, 3),
    "windows": lambda v: v.unfold(1, 3, 1),
}


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
@pytest.mark.covers("S checkpoint")
@pytest.mark.parametrize("capture", ["whole", "regions"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_among_the_results_keep_their_strides(name: str, capture: str) -> None:
    def scenario(compile_: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        view = VIEWS[name]
        model = Pair(lambda m, x: again(lambda h: (m.a(h), view(m.b(h))), m.first(x)))

        def step(x: Tensor) -> Tensor:
            a, v = model(x)
            (a.square().mean() + v.sin().mean()).backward()
            return v.detach()

        compiled = compile_(step if capture == "whole" else model)
        run = compiled if capture == "whole" else step
        result = run(batch(1)[0])
        return seen(result, [p.grad for p in model.parameters()]), result.stride()

    assert_like_eager(scenario, "triton")
