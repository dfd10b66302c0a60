"""Check operators, and write docs/op-coverage.md: `python -m tests.gradients.op_db`.

With names of operators each is checked by itself, every sample, alone and as a training step:
`python -m tests.gradients.op_db softmax sum --dtype bfloat16 --device cuda`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def check(name: str) -> tuple[str, object]:
    """One operator's row, or what is wrong with it."""
    from tests.gradients.op_db import coverage, suite
    from tests.gradients.op_db.samples import OPERATORS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        explanation = suite.check_all(suite.calls_of(OPERATORS[name]), suite.check_alone)
    except Exception as error:
        return name, f"{type(error).__name__}: {error}"
    return name, coverage.row_of(name, explanation)


def write_table() -> int:
    """Write the table unless something is wrong; returns the exit status."""
    from tests.gradients.op_db import coverage, exclusions
    from tests.gradients.op_db.samples import OPERATORS

    excluded = exclusions.excluded()
    names = [name for name in OPERATORS if name not in excluded]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = dict(pool.imap_unordered(check, names, chunksize=4))
    rows = {name: row for name, row in found.items() if isinstance(row, coverage.Row)}
    for name in sorted(found.keys() - rows.keys()):
        print(f"{name}: {found[name]}", file=sys.stderr)
    if len(rows) < len(found):
        return 1
    coverage.DOCUMENT.write_text(coverage.render(rows, excluded))
    print(f"{coverage.DOCUMENT}: {len(rows)} operators")
    return 0


def check_one(name: str, dtype: torch.dtype, device: str) -> int:
    """Check every small sample of one operator, and print what is wrong; returns how many are."""
    from tests.gradients.op_db import suite
    from tests.gradients.op_db.calls import scattered
    from tests.gradients.op_db.samples import EVERY, OPERATORS

    operator, wrong = OPERATORS[name], 0
    samples = [c for c in operator.samples(dtype, device) if c.elements <= EVERY]
    gaps = [other for call in samples if (other := scattered(call)) is not None]
    calls = [*suite.calls_of(operator, dtype, device), *samples, *gaps]
    for kind in (suite.check_alone, suite.check_step):
        for call in suite.able(calls, kind):
            for _, problems in suite.blame([call], kind):
                wrong += 1
                print(f"{kind.__name__} {call}: {'; '.join(problems)}")
    print(f"{name}: {wrong} wrong")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """The whole table, or the operators that are named; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gradients.op_db", description=__doc__)
    parser.add_argument("names", nargs="*", help="operators, as the table has them")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    if not given.names:
        return write_table()
    warnings.simplefilter("ignore")
    dtype = getattr(torch, given.dtype)
    return int(sum(check_one(name, dtype, given.device) for name in given.names) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
