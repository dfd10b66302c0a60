"""python -m tests.gradients.programs --start 0 --count 20000 --jobs 2 [--device cuda]"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tests.gradients.programs.jobs import CHUNK, CHUNKS, prepare, run_chunk

if TYPE_CHECKING:
    from tests.gradients.programs.run import Outcome


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gradients.programs", description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="folder for the shrunk failures")
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds a failure, 0 for none")
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    return parser.parse_args()


def main() -> int:
    """Run a range of seeds, print failures as they come and a summary.

    1 if any failed, or too few were fused.
    """
    asked = _arguments()
    prepare(asked.device)
    from tests.gradients.programs.generate import generate
    from tests.gradients.programs.render import render
    from tests.gradients.programs.run import Tally

    end = asked.start + asked.count
    if asked.show:
        for seed in range(asked.start, end):
            print(render(generate(seed, asked.device).program, asked.device))
        return 0
    chunk = max(1, min(CHUNK, -(-asked.count // asked.jobs)))
    tasks = deque(
        (start, min(chunk, end - start), asked.device, asked.shrink)
        for start in range(asked.start, end, chunk)
    )
    tally, began = Tally(), time.monotonic()
    done: SimpleQueue[Future[list[Outcome]]] = SimpleQueue()
    with ThreadPoolExecutor(asked.jobs) as threads:
        chunks = len(tasks)
        for _ in range(asked.jobs):
            threads.submit(_run, tasks, done)
        for _ in range(chunks):
            try:
                outcomes = done.get().result()
            except BaseException:  # the harness's own: not after all other chunks
                tasks.clear()
                raise
            tally.add(outcomes)
            for outcome in outcomes:
                if outcome.verdict.failed:
                    _show(outcome, asked.out)
            minutes = (time.monotonic() - began) / 60
            print(f"{len(tally.outcomes)} of {asked.count}, {minutes:.1f} min", file=sys.stderr)
    print(tally.summary())
    lacking = tally.lacking()
    print("".join(f"{line}\n" for line in lacking), end="")
    return int(bool(tally.failures or lacking))


def _run(tasks: deque[tuple[int, int, str, float]], done: SimpleQueue) -> None:
    """Run what is left of the tasks, by one process after the other.

    A pool of `max_tasks_per_child` would do, but on Python 3.11 it may not start the next process
    (gh-115634).
    """
    context = multiprocessing.get_context("spawn")
    try:
        while tasks:
            with ProcessPoolExecutor(1, context) as process:
                for _ in range(CHUNKS):
                    try:
                        task = tasks.popleft()
                    except IndexError:  # another thread took the last
                        return
                    future = process.submit(run_chunk, task)
                    wait([future])
                    done.put(future)
    except BaseException as error:  # a process that can't be started: whoever waits has to know
        failed: Future[list[Outcome]] = Future()
        failed.set_exception(error)
        done.put(failed)


def _show(outcome: Outcome, folder: Path | None) -> None:
    print(outcome.report, flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"test_program_{outcome.seed}.py").write_text(outcome.text)


if __name__ == "__main__":
    sys.exit(main())
