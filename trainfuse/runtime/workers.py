"""Worker processes that compile kernels side by side."""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("compile_worker.py")


class Worker:
    """One compiling process, started on its first job and kept."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compile(self, job: dict[str, Any], timeout_s: float) -> str | None:
        """Compile one kernel; None, or what went wrong. A job over time costs the process."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return "the compiler process had died"
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return (
                f"the compiler process died (exit status {process.returncode})"
                if ready
                else f"compiling took longer than {timeout_s:g} s"
            )
        error = json.loads(line)["error"]
        if error is not None:
            self.close()
        return error

    def start(self) -> None:
        """Start the process now, so that it is ready for its first job."""
        if self._process is None:
            self._start()

    def _start(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self._process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:  # a job was still in the buffer
                continue


class WorkerPool:
    """Compiles lists of jobs over a fixed number of processes."""

    def __init__(self, size: int) -> None:
        assert size > 0
        self._workers = [Worker() for _ in range(size)]
        self._lock = threading.Lock()
        atexit.register(self.close)

    def start(self) -> None:
        """Start some of the processes ahead of their first jobs, on half of the cores."""
        with self._lock:
            for worker in self._workers[: max(1, (os.cpu_count() or 1) // 2)]:
                worker.start()

    def run(
        self, jobs: Sequence[dict[str, Any]], timeout_s: float
    ) -> tuple[list[str | None], float]:
        """Compile every job: its error or None, in order, and the seconds that passed."""
        started = time.perf_counter()
        errors: list[str | None] = [None] * len(jobs)
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(jobs)):
            waiting.put(i)

        def drain(worker: Worker) -> None:
            while True:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                errors[i] = worker.compile(jobs[i], timeout_s)

        with self._lock:
            busy = self._workers[: len(jobs)]
            threads = [threading.Thread(target=drain, args=(w,), daemon=True) for w in busy]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return errors, time.perf_counter() - started

    def close(self) -> None:
        """End all processes; a later `run` starts them again."""
        for worker in self._workers:
            worker.close()


_pools: dict[int, WorkerPool] = {}
_pools_lock = threading.Lock()


def shared_pool(size: int) -> WorkerPool:
    """The process-wide pool of a size."""
    with _pools_lock:
        return _pools.setdefault(size, WorkerPool(size)) if size not in _pools else _pools[size]
