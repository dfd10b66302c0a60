"""Compiling side by side for a GPU that isn't here, and what the cache keeps."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from trainfuse.runtime import compile_worker
from trainfuse.runtime.cache import KernelCache, KernelCompileError, Variant, why_unsafe
from trainfuse.runtime.workers import WorkerPool

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def scale(in0_ptr, out0_ptr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out0_ptr + i, tl.load(in0_ptr + i) * 2.0)
"""
ALIGNED = Variant("scale", ("*fp32", "*fp32"), True, 4)
UNALIGNED = Variant("scale", ("*fp32", "*fp32"), False, 4)
ARCH = "sm_90"


def compiled(cache: KernelCache, *variants: Variant, source: str = SOURCE) -> Path:
    folder = cache.entry("key", source, ARCH)
    assert cache.compile([(folder, v) for v in variants], ARCH) == {}
    return folder


@pytest.fixture(scope="module")
def pool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    folder.chmod(0o700)
    return folder


def test_variants_compile_and_nothing_is_pickled(pool_folder: Path) -> None:
    cache = KernelCache(pool_folder)
    folder = compiled(cache, ALIGNED, UNALIGNED)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "kernel.py",
        *(f"{v.stem}{s}" for v in (ALIGNED, UNALIGNED) for s in (".json", ".cubin", ".usage")),
    }
    assert (folder / "kernel.py").read_text() == SOURCE
    metadata = json.loads((folder / f"{ALIGNED.stem}.json").read_text())
    assert metadata["target"]["arch"] == 90
    assert metadata["num_warps"] == 4
    cubins = {(folder / f"{v.stem}.cubin").read_bytes() for v in (ALIGNED, UNALIGNED)}
    assert len(cubins) == 2, "alignment made no difference to the machine code"
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)
    assert cache.stats.compiled == 2


def test_a_new_process_compiles_nothing(pool_folder: Path) -> None:
    compiled(KernelCache(pool_folder), ALIGNED)
    script = (
        "from pathlib import Path; from trainfuse.runtime.cache import *\n"
        f"cache = KernelCache(Path({str(pool_folder)!r}))\n"
        f"folder = cache.entry('key', {SOURCE!r}, 'sm_90')\n"
        f"print(cache.compile([(folder, {ALIGNED!r})], 'sm_90'), cache.stats.compiled,"
        " cache.stats.disk_hits)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "{} 0 1\n", done.stderr


def test_what_changes_code_changes_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cache = KernelCache(tmp_path)
    folders = {
        cache.entry("key", SOURCE, ARCH),
        cache.entry("key", SOURCE, "sm_80"),
        cache.entry("key", SOURCE + "\n", ARCH),
        cache.entry("other", SOURCE, ARCH),
    }
    assert len(folders) == 4


def test_text_that_was_tampered_with_is_written_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cache = KernelCache(tmp_path)
    folder = cache.entry("key", SOURCE, ARCH)
    (folder / "kernel.py").write_text("print('other')")
    assert cache.entry("key", SOURCE, ARCH) == folder
    assert (folder / "kernel.py").read_text() == SOURCE


def test_a_folder_that_others_can_write_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    cache = KernelCache(tmp_path)
    assert not cache.on_disk
    assert not list(tmp_path.iterdir())
    assert cache.entry("key", SOURCE, ARCH).exists()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "others can write to it" in warnings[0]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "can't be used" in str(why_unsafe(blocked / "cache"))
    made = tmp_path / "new" / "cache"
    assert why_unsafe(made) is None
    assert made.stat().st_mode & 0o777 == 0o700


def test_an_error_is_reported_and_the_next_kernel_compiles(pool_folder: Path) -> None:
    cache = KernelCache(pool_folder)
    broken = SOURCE.replace("tl.load(in0_ptr + i)", "tl.no_such_thing(i)")
    folder = cache.entry("broken", broken, ARCH)
    errors = cache.compile([(folder, ALIGNED)], ARCH)
    assert "no_such_thing" in errors[folder, ALIGNED]
    with pytest.raises(KernelCompileError):
        cache.load(folder, ALIGNED, ARCH, 0)
    compiled(cache, ALIGNED, source=SOURCE + "# another\n")


def job(folder: Path, source: str) -> dict[str, object]:
    (folder / "kernel.py").write_text(source)
    return {
        "source": str(folder / "kernel.py"),
        "folder": str(folder),
        "stem": "kernel",
        "function": "scale",
        "types": ["*fp32", "*fp32"],
        "aligned": True,
        "num_warps": 4,
        "max_registers": None,
        "fma": True,
        "arch": 90,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import time\ntime.sleep(60)\n", "longer than 2 s"),
        ("import os\nos._exit(7)\n", "died (exit status 7)"),
    ],
)
def test_a_worker_that_hangs_or_dies_costs_one_kernel(
    tmp_path: Path, text: str, message: str
) -> None:
    pool = WorkerPool(1)
    try:
        errors, _ = pool.run([job(tmp_path, text)], timeout_s=2)
        assert message in str(errors[0])
        assert pool.run([job(tmp_path, SOURCE)], timeout_s=60)[0] == [None]
    finally:
        pool.close()


def test_workers_import_triton_without_torch_even_for_library_functions(tmp_path: Path) -> None:
    probe = "from trainfuse.codegen.triton_lib import maximum\nimport sys\n"
    probe += "assert 'torch' not in sys.modules, 'torch was imported'\n"
    pool = WorkerPool(1)
    try:
        assert pool.run([job(tmp_path, probe + SOURCE)], timeout_s=60)[0] == [None]
    finally:
        pool.close()


def test_a_loaded_kernel_knows_how_to_launch_and_is_shared(pool_folder: Path) -> None:
    cache = KernelCache(pool_folder)
    folder = compiled(cache, ALIGNED)
    kernel = cache.load(folder, ALIGNED, ARCH, device=0)
    assert kernel.metadata.name == "scale"
    assert kernel.metadata.num_warps == 4
    assert kernel.kernel == (folder / f"{ALIGNED.stem}.cubin").read_bytes()
    assert cache.load(folder, ALIGNED, ARCH, device=0) is kernel
    assert cache.load(folder, ALIGNED, ARCH, device=1) is not kernel


MULTIPLY_ADD = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, z_ptr, out_ptr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    product = tl.load(x_ptr + i) * tl.load(y_ptr + i)
    tl.store(out_ptr + i, product + tl.load(z_ptr + i))
"""


def test_without_fma_products_and_sums_round_separately(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    types = ("*fp32",) * 4
    fused, apart = (Variant("scale", types, True, 4, fma=fma) for fma in (True, False))
    folder = compiled(KernelCache(tmp_path), fused, apart, source=MULTIPLY_ADD)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = []
    for variant in (fused, apart):
        path = folder / f"{variant.stem}.cubin"
        done = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True)
        found.append({name: f" {name} " in done.stdout for name in ("FFMA", "FMUL", "FADD")})
    assert found == [
        {"FFMA": True, "FMUL": False, "FADD": False},
        {"FFMA": False, "FMUL": True, "FADD": True},
    ]


def test_launchers_are_built_where_the_launching_process_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.8 brings one launcher for all: nothing is built there."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "library_dirs", lambda: [], raising=False)
    monkeypatch.setattr(driver, "libraries", [], raising=False)  # there is no libcuda here
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "scratch"))
    wanted = tmp_path / "wanted"
    with contextlib.suppress(ImportError):  # without the driver it is built, but can't be loaded
        compile_worker.build_launcher(5, str(wanted))
    built = list(wanted.rglob("__triton_launcher*"))
    assert bool(built) is hasattr(driver, "make_launcher")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()


def test_workers_started_ahead_take_jobs() -> None:
    pool = WorkerPool(2)
    try:
        pool.start()
        pool.start()
        errors, _ = pool.run([{"source": "/nowhere/kernel.py"}] * 2, timeout_s=60)
        assert all(error is not None and "kernel" in error for error in errors)
    finally:
        pool.close()
