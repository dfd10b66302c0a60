"""One attempt at a random program: statements drawn one by one, each run as it is drawn."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.gradients.programs.around import (
    block_places,
    compile_options,
    taste_of,
    update_of,
    with_masks,
    with_odd_parameters,
)
from tests.gradients.programs.drawer import MOST_ELEMENTS, Drawer, Taste
from tests.gradients.programs.tree import (
    Block,
    BlockKind,
    Line,
    Program,
    Statement,
    tidy,
)
from tests.gradients.programs.vocabulary import CANCELLING, GROUPS, TERM, TRACK, Form
from tests.gradients.programs.world import Invalid, World, block_of

# odd ones, and ones that fill no block; 33 and 130 cross a power of two, 1 broadcasts
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 33)
LARGE = (130, 260, 523)
SMALL = 10_000
"""Seeds below are of small programs, which compile in half the time: many of those for CI."""
LEAST, MOST = 0.02, 8.0
"""Root mean square of a value: below, the next rounding is all there is; above, slopes grow."""


class _Generation:
    """One attempt."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        self.seed, self.rng = seed, rng
        self.world = World(seed)
        self.drawer = Drawer(rng, self.world, taste_of(rng))
        self.body: list[Line] = []
        self.block: list[Statement] = []
        self.kind: BlockKind | None = None
        self.unused: list[str] = []
        self.cancels = rng.random() < 0.4

    @property
    def taste(self) -> Taste:
        return self.drawer.taste

    def program(self) -> Program:
        rng = self.rng
        self._first_leaves()
        wanted = rng.choice(
            (1, 2, 2, 3, 3, 4, 5) if self.seed < SMALL else (3, 4, 5, 6, 7, 8, 9, 10, 12)
        )
        places = block_places(rng, wanted, self.taste)
        made = tries = 0
        while made < wanted and tries < 12 * wanted:
            tries += 1
            if made in places:
                self._in_block(places.pop(made))
            made += self._statement()
        if self.taste.buffers:
            self._attempt(rng.choice(TRACK), rng.choice(self.drawer.floats()), None)
        losses = self._losses()
        program = Program(
            self.seed,
            tuple(self.drawer.leaves),
            tuple(self.body),
            losses,
            not self.cancels,
            self._outputs(),
            update_of(rng, len(losses)),
            compile_options(rng),
        )
        return with_masks(tidy(with_odd_parameters(rng, program)))

    def _first_leaves(self) -> None:
        rng, dims = self.rng, self.rng.choice((1, 2, 2, 2, 3, 3))
        shape = [rng.choice(SIZES) for _ in range(dims)]
        if rng.random() < 0.08:
            shape[rng.randrange(dims)] = rng.choice(LARGE)
        while torch.Size(shape).numel() > MOST_ELEMENTS:
            shape[shape.index(max(shape))] //= 2
        names = [self.drawer.leaf("input", shape), self.drawer.leaf("parameter", shape)]
        # the first statement joins them, so that a gradient flows
        first = Statement(
            (self.drawer.name("v"),), rng.choice(("{} * {}", "{} + {}")).format(*names)
        )
        self._commit(first, None)

    # statements

    def _statement(self, kind: BlockKind | None = None) -> int:
        rng = self.rng
        weights = [weight for weight, _ in GROUPS.values()]
        ((_, forms),) = rng.choices(list(GROUPS.values()), weights)
        form, name = rng.choice(forms), self._operand()
        return int(self._attempt(form, name, kind))

    def _operand(self) -> str:
        rng = self.rng
        floats = self.drawer.floats()
        fresh = [name for name in self.unused if name in floats]
        if fresh and rng.random() < 0.75:
            return rng.choice(fresh[-3:])
        return rng.choice(floats)

    def _attempt(self, form: Form, name: str, kind: BlockKind | None) -> bool:
        """Add the form about a value, if it fits; whether it did."""
        before = len(self.drawer.leaves)
        try:
            self._admit(form, name)
            text = self.drawer.fill(form, name)
            written = self._written(form, text)
            if written and not self._writes(written):
                raise Invalid("it may not be written")
            targets = () if written else (self.drawer.name("v"),)
            self._commit(self._split(Statement(targets, text), kind), kind)
        except Invalid:
            self.drawer.take_back(before)
            return False
        return True

    def _admit(self, form: Form, name: str) -> None:
        value: Tensor = self.world.values[name]
        half = value.dtype in (torch.bfloat16, torch.float16)
        if not form.ndim <= value.dim() <= form.most or (half and not form.half):
            raise Invalid("the operand has another form")
        if "dropout" in form.text and not self.taste.dropout:
            raise Invalid("no dropout here")
        if not self.taste.half and ("16" in form.text or "half()" in form.text):
            raise Invalid("no half types here")
        if form.kink and self.taste.half:
            raise Invalid("rounding to a half type would decide at the kink")
        if value.numel() and float(value.detach().double().abs().max()) > form.within:
            raise Invalid("the operand is too large")

    @staticmethod
    def _written(form: Form, text: str) -> str:
        """The name that a statement writes to, or ""."""
        if form in GROUPS["write"][1] or form in TRACK:
            if "inplace" in text or text.startswith("functional."):
                return text.partition("(")[2].partition(",")[0].partition(")")[0]
            return text.partition(".")[0].partition("[")[0]
        return ""

    def _writes(self, name: str) -> bool:
        if self.kind in ("checkpoint", "checkpoint_reentrant"):
            own = {target for statement in self.block for target in statement.targets}
            if name not in own:
                return False
        return self.world.writable(name)

    def _split(self, statement: Statement, kind: BlockKind | None) -> Statement:
        """The statement with a target for each tensor that it gives."""
        if not statement.targets:
            return statement
        (value,) = self.world.run(statement, kind)
        if isinstance(value, Tensor):
            return statement
        count = len(value)
        del self.world.values[statement.targets[0]]
        if not 2 <= count <= 4:
            raise Invalid("too many or too few results")
        more = tuple(self.drawer.name("v") for _ in range(count - 1))
        return Statement((*statement.targets, *more), statement.text)

    def _commit(self, statement: Statement, kind: BlockKind | None) -> None:
        try:
            for value in self.world.run(statement, kind):
                self._check(value)
            if not statement.targets:
                for name in self.drawer.floats():
                    self._check(self.world.values[name])
        except Invalid:
            for name in statement.targets:
                self.world.values.pop(name, None)
            if not statement.targets:
                self._replay()
            raise
        (self.body if self.kind is None else self.block).append(statement)
        self.unused = [name for name in self.unused if name not in statement.uses]
        self.unused += statement.targets

    @staticmethod
    def _check(value: Tensor) -> None:
        if not 1 <= value.numel() <= MOST_ELEMENTS or value.dim() > 5:
            raise Invalid("of no use")
        if value.is_floating_point():
            wide = value.detach().double()
            size = float(wide.square().mean().sqrt())
            if not LEAST <= size <= MOST or not float(wide.abs().max()) < 10 * MOST:
                raise Invalid("too small, too large, or not finite")

    def _replay(self) -> None:
        body = [*self.body]
        if self.block:
            assert self.kind is not None
            body.append(Block(self.kind, tuple(self.block)))
        self.world.play(self.drawer.leaves, body)

    # blocks

    def _in_block(self, kind: BlockKind) -> None:
        """A few statements in a block of this kind, if what comes of them can be used."""
        before = set(self.world.values)
        self.kind, self.block = kind, []
        for _ in range(8):
            self._statement(kind)
            if len(self.block) >= self.rng.randint(2, 4):
                break
        body, self.kind, self.block = self.block, None, []
        leaves = {leaf.name for leaf in self.drawer.leaves}
        inside = [name for name in self.world.values if name not in before | leaves]
        try:
            self._close(kind, body, inside, before | leaves)
        except Invalid:
            self.world.forget(set(inside))
            self.unused = [name for name in self.unused if name not in inside]
            self._replay()

    def _close(
        self, kind: BlockKind, body: list[Statement], inside: list[str], outside: set[str]
    ) -> None:
        if not kind.startswith("checkpoint"):
            if not body:
                raise Invalid("nothing came of it")
            self.body.append(Block(kind, tuple(body)))
            return
        values = self.world.values
        taken = {values[name].untyped_storage().data_ptr() for name in outside}
        useful = [
            name
            for name in inside
            if values[name].requires_grad and values[name].untyped_storage().data_ptr() not in taken
        ]
        if not useful:
            raise Invalid("a checkpoint that gives nothing new")
        results = useful[-self.rng.randint(1, 2) :]
        block = block_of(kind, body, self.world, results)
        if not any(values[name].requires_grad for name in block.arguments):
            raise Invalid("a checkpoint of nothing that learns")
        self.world.protect([*block.arguments, *results])
        self.world.forget(set(inside) - set(results))
        self.unused = [name for name in self.unused if name in values]
        self.body.append(block)

    # what the step does with the values

    def _losses(self) -> tuple[tuple[str, ...], ...]:
        """Terms, one statement each, of one or two losses."""
        values = self.world.values
        learned = [name for name in self.drawer.floats() if values[name].requires_grad]
        roots = [name for name in learned if name in self.unused] or learned[-1:]
        self.rng.shuffle(roots)
        terms: list[str] = []
        for name in roots[:3]:
            for _ in range(12):
                if self._term(self.rng.choice(CANCELLING if self.cancels else TERM), name):
                    terms.append(self.body[-1].targets[0])
                    break
        if not terms:
            raise Invalid("no loss")
        if len(terms) > 1 and self.rng.random() < 0.3:
            return (terms[0],), tuple(terms[1:])
        return (tuple(terms),)

    def _term(self, form: Form, name: str) -> bool:
        before = len(self.drawer.leaves)
        try:
            self._admit(form, name)
            term = Statement((self.drawer.name("t"),), self.drawer.fill(form, name))
            (value,) = self.world.run(term)
            if (
                value.dim()
                or not value.requires_grad
                or not LEAST / 20 < abs(float(value.detach())) < MOST
            ):
                raise Invalid("no loss")
        except Invalid:
            self.drawer.take_back(before)
            return False
        self.body.append(term)
        return True

    def _outputs(self) -> tuple[str, ...]:
        """Values that the step returns; a view of a parameter would show the update's result."""
        values = self.world.values
        parameters = {
            values[leaf.name].untyped_storage().data_ptr()
            for leaf in self.drawer.leaves
            if leaf.kind == "parameter"
        }
        known = [
            name
            for name, value in values.items()
            if isinstance(value, Tensor)
            and name[0] in "vxb"
            and value.untyped_storage().data_ptr() not in parameters
        ]
        return tuple(self.rng.sample(known, min(len(known), self.rng.choice((0, 1, 1, 2, 3)))))


def sketch(seed: int, attempt: int = 0) -> Program:
    """A program that ran eagerly, forward, once. Raises Invalid if the attempt comes to nothing."""
    return _Generation(seed, random.Random(f"{seed}/{attempt}")).program()
