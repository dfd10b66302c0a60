"""torch's own table of operators with their samples, which it ships as an internal."""

from __future__ import annotations

import importlib.util
import sys
import unittest
import warnings
from types import ModuleType

if importlib.util.find_spec("expecttest") is None:
    # torch's module takes one base class of tests from it, which nothing here uses
    sys.modules["expecttest"] = ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

with warnings.catch_warnings():  # it imports what torch itself calls deprecated
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import (
        BinaryUfuncInfo,
        ReductionOpInfo,
        UnaryUfuncInfo,
    )

__all__ = ["BinaryUfuncInfo", "ReductionOpInfo", "UnaryUfuncInfo", "invocations", "op_db"]
