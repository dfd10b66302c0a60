"""Fills a form's placeholders with operands, dimensions and numbers that fit its first operand."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.gradients.programs.tree import Leaf, LeafKind
from tests.gradients.programs.vocabulary import Form
from tests.gradients.programs.world import Invalid, World

PLACEHOLDER = re.compile(r"{(\w+)}")
MOST_ELEMENTS = 1500
MOST_PARAMETERS = 5
MARGIN = 1e-3
"""How far from a kink an operand must be, so that rounding doesn't decide on which side it is."""


@dataclass(slots=True)
class Taste:
    """What one program may hold. dtypes: of new leaves, as often as listed."""

    dtypes: Sequence[str] = ("float32",)
    half: bool = False
    dropout: bool = False
    buffers: bool = False


@dataclass(slots=True)
class Drawer:
    """Draws operands out of a world, and makes leaves where none fits.

    hidden: names that must not be used at the moment.
    """

    rng: random.Random
    world: World
    taste: Taste
    leaves: list[Leaf] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def fill(self, form: Form, name: str) -> str:
        """The form's text about the value `name`. Raises Invalid where nothing fits."""
        return _Filling(self, form, name).text()

    def name(self, letter: str) -> str:
        """A new name."""
        number = self.counts.get(letter, 0)
        self.counts[letter] = number + 1
        return f"{letter}{number}"

    def leaf(self, kind: LeafKind, shape: Sequence[int], dtype: str = "", **facts: object) -> str:
        """Make a leaf and return its name; parameters beyond the most become inputs."""
        if kind == "parameter" and sum(x.kind == kind for x in self.leaves) >= MOST_PARAMETERS:
            kind = "input"
        leaf = Leaf(
            self.name({"parameter": "p", "input": "x", "buffer": "b"}[kind]),
            kind,
            tuple(shape),
            dtype or self.rng.choice(self.taste.dtypes),
            **facts,  # type: ignore[arg-type]
        )
        if leaf.is_float and len(shape) > 1 and self.rng.random() < 0.08:
            leaf = Leaf(leaf.name, kind, leaf.shape, leaf.dtype, leaf.init, layout="permuted")
        self.leaves.append(leaf)
        self.world.add(leaf)
        return leaf.name

    def take_back(self, count: int) -> None:
        """Keep the first leaves only."""
        for leaf in self.leaves[count:]:
            self.world.values.pop(leaf.name)
        del self.leaves[count:]

    def floats(self) -> list[str]:
        """Names of floating values, oldest first."""
        return [
            name
            for name, value in self.world.values.items()
            if isinstance(value, Tensor) and value.is_floating_point() and name not in self.hidden
        ]


class _Filling:
    """One form being filled: dimensions are drawn once and kept."""

    def __init__(self, drawer: Drawer, form: Form, name: str) -> None:
        self.drawer, self.rng, self.form, self.name = drawer, drawer.rng, form, name
        self.value: Tensor = drawer.world.values[name]
        self.drawn: dict[str, str] = {"a": name}

    def text(self) -> str:
        def replace(match: re.Match[str]) -> str:
            what = match[1]
            if what in ("c", "small"):  # each constant anew
                return getattr(self, what)()
            return self.draw(what)

        text = PLACEHOLDER.sub(replace, self.form.text)
        if self._distance() < MARGIN:
            raise Invalid("too near a kink")
        return text

    def _distance(self) -> float:
        """How far the operand is from a kink of the form."""
        value, kink = self.value.detach().double(), self.form.kink
        if not kink:
            return 1.0
        if kink == "max":
            ordered = value.sort(int(self.draw("dim"))).values
            gaps = ordered.diff(dim=int(self.draw("dim")))
        elif kink == "b":
            gaps = value - self.drawer.world.values[self.draw("b")].detach()
        else:
            gaps = torch.cat([(value - float(place)).flatten() for place in kink.split(",")])
        return float(gaps.abs().min()) if gaps.numel() else 1.0

    def draw(self, what: str) -> str:
        """A placeholder's text, the same each time."""
        if what not in self.drawn:
            draw: Callable[[], str] = getattr(self, what)
            self.drawn[what] = draw()
        return self.drawn[what]

    # numbers

    def c(self) -> str:
        return f"{self.rng.choice((-1, 1)) * self.rng.randint(5, 15) / 10}"

    def small(self) -> str:
        return f"{self.rng.randint(2, 5) / 10}"

    def keep(self) -> str:
        return str(self.rng.random() < 0.4)

    # dimensions

    def dim(self) -> str:
        sizes = self.value.shape
        fitting = [i for i, size in enumerate(sizes) if size >= self.form.size]
        if not fitting:
            raise Invalid("no dimension is large enough")
        dim = self.rng.choice(fitting)
        return str(dim if self.rng.random() < 0.6 else dim - len(sizes))

    def dims(self) -> str:
        count = self.rng.randint(1, self.value.dim())
        chosen = sorted(self.rng.sample(range(self.value.dim()), count))
        if self.form.size > torch.Size(self.value.shape[i] for i in chosen).numel():
            raise Invalid("too few elements")
        return str(chosen[0] if len(chosen) == 1 else tuple(chosen))

    @property
    def extent(self) -> int:
        return self.value.shape[int(self.draw("dim"))]

    def perm(self) -> str:
        order = list(range(self.value.dim()))
        self.rng.shuffle(order)
        return ", ".join(map(str, order))

    def wide(self) -> str:
        dim = int(self.draw("dim")) % (self.value.dim() + 1)
        sizes = [-1] * (self.value.dim() + 1)
        if int(self.draw("dim")) < 0:
            dim = self.value.dim() + 1 + int(self.draw("dim"))
        sizes[dim] = self.rng.choice((2, 3))
        return ", ".join(map(str, sizes))

    def index(self) -> str:
        return str(self.rng.choice((0, -1, self.extent // 2)))

    def start(self) -> str:
        return str(1 if "dim" not in self.drawn or self.extent > 1 else 0)

    def half(self) -> str:
        return str((self.extent + 1) // 2)

    # operands like a

    def b(self) -> str:
        if self.rng.random() < 0.35:
            return self._broadcast_leaf()
        fitting = [name for name in self.drawer.floats() if self._broadcasts(name)]
        if not fitting or fitting == [self.name]:
            return self._broadcast_leaf()
        return self.rng.choice(fitting[-6:])

    def s(self) -> str:
        values = self.drawer.world.values
        fitting = [
            name
            for name in self.drawer.floats()
            if values[name].shape == self.value.shape and values[name].dtype == self.value.dtype
        ]
        others = [name for name in fitting if name != self.name]
        if others and self.rng.random() < 0.6:
            return self.rng.choice(others)
        return self.drawer.leaf(self._kind(), self.value.shape, self._dtype())

    def onto(self) -> str:
        values = self.drawer.world.values
        fitting = [
            name
            for name in self.drawer.floats()
            if _expands(values[name].shape, self.value.shape)
            and values[name].untyped_storage().data_ptr() != self._storage
        ]
        if fitting and self.rng.random() < 0.6:
            return self.rng.choice(fitting[-6:])
        return self.drawer.leaf(self._kind(), self._narrowed())

    def onto0(self) -> str:
        return self.drawer.leaf(self._kind(), self.value.shape[1:])

    def same(self) -> str:
        return self.drawer.leaf(self._kind(), self.value.shape, self._dtype())

    def target(self) -> str:
        return self.drawer.leaf("input", self.value.shape, self._dtype())

    @property
    def _storage(self) -> int:
        return self.value.untyped_storage().data_ptr()

    def _dtype(self) -> str:
        return str(self.value.dtype).removeprefix("torch.")

    def _kind(self) -> LeafKind:
        return self.rng.choice(("parameter", "parameter", "input"))

    def _broadcasts(self, name: str) -> bool:
        try:
            shape = torch.broadcast_shapes(self.drawer.world.values[name].shape, self.value.shape)
        except RuntimeError:
            return False
        return torch.Size(shape).numel() <= MOST_ELEMENTS and len(shape) <= 4

    def _broadcast_leaf(self) -> str:
        shape = list(self._narrowed())
        if self.value.dim() < 3 and self.value.numel() < 200 and self.rng.random() < 0.2:
            shape = [2, *(1 for _ in range(self.value.dim() - len(shape))), *shape]
        return self.drawer.leaf(self._kind(), shape)

    def _narrowed(self) -> tuple[int, ...]:
        """A shape that broadcasts to a's."""
        shape = list(self.value.shape)
        how = self.rng.random()
        if how < 0.35 or not shape:
            return tuple(shape)
        if how < 0.65:
            return tuple(shape[self.rng.randint(1, len(shape)) :])
        if how < 0.7:
            return ()
        kept = [size if self.rng.random() < 0.6 else 1 for size in shape]
        return tuple(kept)

    # masks and indices

    def mask(self) -> str:
        shape = self._narrowed()
        init = "torch.rand({shape}) < 0.6"
        return self.drawer.leaf("input", shape, "bool", init=init)

    def _indices(self, shape: Sequence[int], high: int) -> str:
        return self.drawer.leaf(
            "input", shape, "int64", init="torch.randint({high}, ({shape},))", high=high
        )

    def rows(self) -> str:
        return self._indices((self.rng.choice((2, 3, 5)),), self.extent)

    def firsts(self) -> str:
        return self._indices((self.rng.choice((2, 3, 5)),), self.value.shape[0])

    def _distinct(self, high: int) -> str:
        return self.drawer.leaf(
            "input",
            (self.rng.randint(1, high),),
            "int64",
            init="torch.randperm({high})[:{shape}]",
            high=high,
        )

    def distinct(self) -> str:
        return self._distinct(self.extent)

    def distinct0(self) -> str:
        return self._distinct(self.value.shape[0])

    def picks(self) -> str:
        shape = list(self.value.shape)
        shape[int(self.draw("dim"))] = self.rng.randint(1, 3)
        return self._indices(shape, self.extent)

    def ids(self) -> str:
        shape = self.rng.choice(((3,), (2, 4), (5,)))
        return self._indices(shape, self.value.shape[0])

    def classes(self) -> str:
        return self._indices((self.value.shape[0],), self.value.shape[1])

    # layers

    def _layer(self, *shape: int, init: str = "torch.randn({shape}) * 0.4") -> str:
        return self.drawer.leaf("parameter", shape, self._dtype(), init=init)

    @property
    def _out(self) -> int:
        if "_out" not in self.drawn:
            self.drawn["_out"] = str(self.rng.choice((1, 3, 4, 5, 7)))
        return int(self.drawn["_out"])

    def weight(self) -> str:
        return self._layer(self._out, self.value.shape[-1])

    def matrix(self) -> str:
        return self._layer(self.value.shape[-1], self._out)

    def vector(self) -> str:
        return self._layer(self.value.shape[-1])

    def bias(self) -> str:
        return self._layer(self._out)

    def kernel(self) -> str:
        return self._layer(self._out, self.value.shape[0], 2)

    def gain(self) -> str:
        return self._layer(self.value.shape[-1], init="torch.randn({shape}) * 0.3 + 1.0")

    def shift(self) -> str:
        return self._layer(self.value.shape[-1])

    def buffer(self) -> str:
        known = [leaf.name for leaf in self.drawer.leaves if leaf.kind == "buffer"]
        if known:
            return self.rng.choice(known)
        return self.drawer.leaf("buffer", (self.rng.choice((1, 3, 5)),), "float32")


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, to) == to
    except RuntimeError:
        return False
