"""Compiled kernels, in memory and on disk: source text, plain JSON and cubins, never pickles.

    ROOT/kernels/KEY/kernel.py       the text that was compiled; tracebacks show it
    ROOT/kernels/KEY/STEM.cubin      one variant of one function
    ROOT/kernels/KEY/STEM.usage      its registers and stack, as JSON
    ROOT/kernels/KEY/STEM.json       Triton's metadata of it, written last
    ROOT/kernels/KEY/tuned-*.json    which choice of its schedule was found to be fastest

KEY hashes the kernel's own key, its text, the architecture and the versions that shape the result.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainfuse.log import INTERNALS, get_logger, say_once
from trainfuse.runtime.compile_worker import write_atomically
from trainfuse.runtime.workers import shared_pool

_FORMAT = 2
_MAX_WORKERS = 16
_log = get_logger("cache")


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one function: what its machine code depends on beside the text.

    types: Triton types of the parameters ("*fp32", ...). aligned: pointers are multiples of 16.
    fma: a product and the sum that reads it may round once.
    """

    function: str
    types: tuple[str, ...]
    aligned: bool
    num_warps: int
    max_registers: int | None = None
    fma: bool = True

    @property
    def stem(self) -> str:
        """File name without suffix."""
        text = f"{self.types} {self.aligned} {self.num_warps} {self.max_registers} {self.fma}"
        return f"{self.function}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(slots=True)
class CacheStats:
    """What the cache did in this process."""

    compiled: int = 0
    disk_hits: int = 0
    memory_hits: int = 0
    seconds: float = 0.0


def default_folder() -> Path:
    """TRAINFUSE_CACHE_DIR, else trainfuse in the user's cache folder."""
    override = os.environ.get("TRAINFUSE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(override) if override else Path(base).expanduser() / "trainfuse"


def why_unsafe(folder: Path) -> str | None:
    """Why a folder can't hold machine code that this process will run, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        return f"it can't be used ({error.strerror})"
    if facts.st_uid != os.getuid():
        return "it belongs to another user"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it"
    return None if os.access(folder, os.W_OK) else "it is read-only"


@dataclass
class KernelCache:
    """Kernels of one folder; the compiled objects live as long as the process.

    folder: None keeps files in a private temporary folder, removed at exit. workers: processes that
    compile. timeout_s: for one kernel.
    """

    folder: Path | None
    workers: int = 2
    timeout_s: float = 60.0
    stats: CacheStats = field(default_factory=CacheStats)

    def __post_init__(self) -> None:
        self._loaded: dict[tuple[str, str, int], Any] = {}
        self._seen: set[tuple[Path, Variant]] = set()
        self._failed: dict[tuple[Path, Variant], str] = {}
        self._launchers: set[int] = set()
        self._lock = threading.Lock()
        self.on_disk = self.folder is not None
        if self.folder is not None and (reason := why_unsafe(self.folder)) is not None:
            line = f"kernel cache {self.folder} not used: {reason}; kernels stay in memory only"
            say_once("cache", f"unsafe {self.folder}", line)
            self.on_disk = False
        if self.on_disk:
            assert self.folder is not None
            self._root = self.folder / "kernels"
        else:
            self._root = Path(tempfile.mkdtemp(prefix="trainfuse-"))
            atexit.register(shutil.rmtree, self._root, ignore_errors=True)

    # -- files --------------------------------------------------------------------------------

    def entry(self, key: str, source: str, arch: str) -> Path:
        """The folder of one kernel, its text in place; the text on disk is what will run."""
        facts = (str(_FORMAT), key, source, arch, _triton_version(), _library_digest())
        name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        folder = self._root / name
        path = folder / "kernel.py"
        data = source.encode()
        if not path.exists() or path.read_bytes() != data:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, data)
        return folder

    def compile(
        self, wanted: Iterable[tuple[Path, Variant]], arch: str
    ) -> dict[tuple[Path, Variant], str]:
        """Compile what is missing, in parallel; returns the failures and what they said.

        A failure is remembered: it is not tried again in this process.
        """
        pairs = list(dict.fromkeys(wanted))
        unseen = [pair for pair in pairs if pair not in self._seen]
        todo = [pair for pair in unseen if not _complete(*pair)]
        self.stats.disk_hits += len(unseen) - len(todo)
        if todo:
            jobs = [_job(folder, variant, arch) for folder, variant in todo]
            jobs += self._launcher_jobs(variant for _, variant in todo)
            errors, seconds = shared_pool(self.workers).run(jobs, self.timeout_s)
            # a launcher that was not built ahead is built at its first launch, errors and all
            errors = errors[: len(todo)]
            self.stats.compiled += len(todo)
            self.stats.seconds += seconds
            failed = {pair: e for pair, e in zip(todo, errors, strict=True) if e is not None}
            self._failed.update(failed)
            _log.info("compiled %d kernels for %s in %.2f s", len(todo), arch, seconds)
        self._seen.update(unseen)
        return {pair: self._failed[pair] for pair in pairs if pair in self._failed}

    def _launcher_jobs(self, variants: Iterable[Variant]) -> list[dict[str, Any]]:
        """Jobs for the C launchers that the first launches would wait for, where there is a GPU."""
        if not torch.cuda.is_available():
            return []
        counts = {len(variant.types) for variant in variants} - self._launchers
        self._launchers |= counts
        from triton import knobs

        return [{"launcher": n, "folder": knobs.cache.dir} for n in sorted(counts)]

    def start_workers(self) -> None:
        """Start compiling processes ahead of the first kernels: while a step is still traced."""
        shared_pool(self.workers).start()

    # -- compiled objects ---------------------------------------------------------------------

    def load(self, folder: Path, variant: Variant, arch: str, device: int) -> Any:
        """Triton's compiled object of a variant on a device, compiled now if nothing did before.

        Raises KernelCompileError.
        """
        key = (folder.name, variant.stem, device)
        with self._lock:
            if key in self._loaded:
                self.stats.memory_hits += 1
                return self._loaded[key]
        failures = self.compile([(folder, variant)], arch)
        if failures:
            raise KernelCompileError(failures[folder, variant])
        kernel = _compiled_kernel(folder, variant)
        with self._lock:
            _log.log(INTERNALS, "loaded GraphCache: %s %s", folder.name, variant.stem)
            return self._loaded.setdefault(key, kernel)

    def stack(self, folder: Path, variant: Variant) -> int:
        """Bytes of stack a thread that a compiled variant takes; 0 when that isn't known."""
        try:
            return int(json.loads((folder / f"{variant.stem}.usage").read_text())["stack"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def size(self) -> tuple[int, int]:
        """Number of kernels and bytes on disk."""
        files = [f for f in self._root.rglob("*") if f.is_file()] if self._root.exists() else []
        kernels = {f.parent for f in files}
        return len(kernels), sum(f.stat().st_size for f in files)

    def clear(self) -> None:
        """Forget everything, on disk and in memory."""
        self._loaded.clear()
        self._seen.clear()
        self._failed.clear()
        shutil.rmtree(self._root, ignore_errors=True)


class KernelCompileError(RuntimeError):
    """A kernel's text did not compile; the fallback boundary turns this into ATen."""


def _job(folder: Path, variant: Variant, arch: str) -> dict[str, Any]:
    return {
        "source": str(folder / "kernel.py"),
        "folder": str(folder),
        "stem": variant.stem,
        "function": variant.function,
        "types": list(variant.types),
        "aligned": variant.aligned,
        "num_warps": variant.num_warps,
        "max_registers": variant.max_registers,
        "fma": variant.fma,
        "arch": int(arch.removeprefix("sm_")),
    }


def _complete(folder: Path, variant: Variant) -> bool:
    return all((folder / f"{variant.stem}{suffix}").exists() for suffix in (".json", ".cubin"))


def _compiled_kernel(folder: Path, variant: Variant) -> Any:
    from types import SimpleNamespace

    from triton.compiler import CompiledKernel

    # the launcher only needs the number of parameters: one pointer type for all means that
    # Triton builds one C launcher a parameter count, not one a kernel
    signature = dict.fromkeys(range(len(variant.types)), "*i8")
    source = SimpleNamespace(constants={}, signature=signature)
    files = {
        f"k{suffix}": str(folder / f"{variant.stem}{suffix}") for suffix in (".json", ".cubin")
    }
    return CompiledKernel(source, files, f"{folder.name}-{variant.stem}")


@cache
def _library_digest() -> str:
    """Hash of the functions that generated kernels call, which are part of their meaning."""
    path = Path(__file__).parent.parent / "codegen" / "triton_lib.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _triton_version() -> str:
    return importlib.metadata.version("triton")


_caches: dict[tuple[Path, int, float], KernelCache] = {}
_caches_lock = threading.Lock()


def shared_cache(folder: Path | None, workers: int, timeout_s: float = 60.0) -> KernelCache:
    """The process-wide cache of a folder (None: the default one), which all plans share."""
    key = (folder or default_folder(), min(workers, _MAX_WORKERS), timeout_s)
    with _caches_lock:
        if key not in _caches:
            _caches[key] = KernelCache(*key)
        return _caches[key]
