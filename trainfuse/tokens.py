"""The grammar of TRAINFUSE_DISABLE, _ENABLE and _DUMP: `token,token(arg,arg)`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from trainfuse.errors import BadTokenList

_EXAMPLE = "fallback,op(aten.add)"


@dataclass(frozen=True, slots=True)
class Token:
    """One token and what stands in its parentheses."""

    name: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({','.join(self.args)})" if self.args else self.name


def parse(source: str, text: str) -> tuple[Token, ...]:
    """Tokens of one list, in order.

    source: the variable's name, for errors. Raises BadTokenList for unbalanced parentheses and
    text after a closing one; empty entries are ignored, as a trailing comma is.
    """
    tokens: list[Token] = []
    for entry in _entries(source, text):
        name, opened, rest = entry.partition("(")
        if not opened:
            tokens.append(Token(name))
            continue
        if not rest.endswith(")"):
            raise _bad(source, text, f"text after the ')' of {name!r}")
        args = tuple(arg.strip() for arg in rest[:-1].split(",") if arg.strip())
        tokens.append(Token(name.strip(), args))
    return tuple(tokens)


def _entries(source: str, text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    entries, depth, start = [], 0, 0
    for position, char in enumerate(text + ","):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "," and (depth == 0 or position == len(text)):
            entries.append(text[start:position].strip())
            start = position + 1
        if depth not in (0, 1):
            raise _bad(source, text, "parentheses don't match")
    if depth:
        raise _bad(source, text, "parentheses don't match")
    return [entry for entry in entries if entry]


def _bad(source: str, text: str, reason: str) -> BadTokenList:
    return BadTokenList(source=source, text=text, reason=reason, example=_EXAMPLE)


def near(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` for an error message, or nothing when no name is close."""
    matches = difflib.get_close_matches(name, list(valid), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
