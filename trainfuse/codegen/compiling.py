"""Options of Triton's compiler that a kernel's text asks for; imports nothing, for the workers."""

from __future__ import annotations


def assertions(source: str) -> dict[str, bool]:
    """Options that keep the checks of a text that has any: Triton drops them otherwise.

    Its own checks of integer overflow stay off: they come with the same option, in every addition.
    """
    return {"debug": True, "sanitize_overflow": False} if "device_assert(" in source else {}
