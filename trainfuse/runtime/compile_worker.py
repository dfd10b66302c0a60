"""Compiles Triton kernels, in this process or as a worker that reads jobs from stdin.

As a script it imports Triton only, never torch, so that a worker starts in a fraction of a second.
One JSON object a line each way: a job's fields in, `{"error": null or text}` out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

_DIVISIBLE = [["tt.divisibility", 16]]


def load_source(path: Path) -> ModuleType:
    """Import a kernel's module from the file that holds its text."""
    spec = importlib.util.spec_from_file_location(f"trainfuse_kernel_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernel(job: dict[str, Any]) -> None:
    """Compile one function and leave `STEM.cubin`, `.usage` and `.json` in the job's folder.

    job: source, folder, stem, function, types (one a parameter), aligned, num_warps,
    max_registers, fma, arch (90 for sm_90). Files appear by renaming, metadata last: a reader never
    sees half a kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainfuse.codegen.compiling import assertions, compiler_options, early_start
    from trainfuse.codegen.cubin import resources

    path = Path(job["source"])
    text = path.read_text()
    function = getattr(load_source(path), job["function"])
    signature = dict(zip(function.arg_names, job["types"], strict=True))
    pointers = [i for i, kind in enumerate(job["types"]) if kind.startswith("*")]
    attrs = {(i,): _DIVISIBLE for i in pointers} if job["aligned"] else {}
    compiled = triton.compile(
        ASTSource(function, signature, {}, attrs),
        target=GPUTarget("cuda", job["arch"], 32),
        options={
            **compiler_options(job["num_warps"], job["max_registers"]),
            "enable_fp_fusion": job["fma"],
            **early_start(text, job["function"]),
            **assertions(text),
        },
    )
    metadata = next(Path(p) for name, p in compiled.metadata_group.items() if name[-5:] == ".json")
    folder = Path(job["folder"])
    write_atomically(folder / f"{job['stem']}.cubin", compiled.asm["cubin"])
    try:
        taken = resources(folder / f"{job['stem']}.cubin")
    except (OSError, subprocess.CalledProcessError):
        taken = {}  # no working cuobjdump: nothing is known, and nothing rescheduled
    write_atomically(folder / f"{job['stem']}.usage", json.dumps(taken).encode())
    write_atomically(folder / f"{job['stem']}.json", metadata.read_bytes())


def build_launcher(num_parameters: int, folder: str) -> None:
    """Build Triton's C launcher for kernels of so many pointers, into the launching process' cache.

    folder: where that process' Triton looks. Up to 3.7 Triton compiles a launcher in the process
    that launches, a good part of a second each; later versions bring one that serves all.
    """
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return
    source = driver.make_launcher({}, dict.fromkeys(range(num_parameters), "*i8"), None)
    own = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = folder
    try:
        driver.compile_module_from_src(
            src=source,
            name="__triton_launcher",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
    finally:
        if own is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = own


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that other processes see whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(name, path)


def serve() -> None:
    """Answer jobs until stdin ends; an error is the last answer, and ends the process."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints must not reach the protocol

    def answer(error: str | None) -> None:
        replies.write(json.dumps({"error": error}) + "\n")
        replies.flush()

    sys.excepthook = lambda kind, problem, _: answer(f"{kind.__name__}: {problem}")
    import triton.compiler  # noqa: F401 -- a second, better spent before the first job comes

    for line in sys.stdin:
        job = json.loads(line)
        if "launcher" in job:
            build_launcher(job["launcher"], job["folder"])
        else:
            compile_kernel(job)
        answer(None)


def _bypass_package(folder: Path) -> None:
    """Let kernels import trainfuse.codegen.triton_lib without the package, which imports torch."""
    for name, place in (("trainfuse", folder), ("trainfuse.codegen", folder / "codegen")):
        package = ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package


if __name__ == "__main__":
    _bypass_package(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory(prefix="trainfuse-worker-") as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        serve()
