"""Building, caching and choosing the C++ backend."""

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu.build import SOURCE_DIR, BuildError, Toolchain, build, find_toolchain
from kernels.ops import select_ops

BUILD_TIMEOUT_S = 240


def _python(code: str, **env: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home()), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_that_build_at_once_share_one_library(tmp_path: Path) -> None:
    compiler, cache = tmp_path / "c++", tmp_path / "cache"
    # It notes each run and writes what it is asked for, late enough for the other to come.
    compiler.write_text(
        f"#!/bin/sh\necho run >> {tmp_path}/runs\nsleep 0.2\n"
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    compiler.chmod(0o755)
    code = (
        "from kernels.cpu.build import *\n"
        f"compiler = {str(compiler)!r}\n"
        "fake = Toolchain(compiler=compiler, compiler_version='x', capability='DEFAULT')\n"
        f"print(build(Path({str(cache)!r}), fake))"
    )
    builders = [_python(code) for _ in range(2)]
    try:
        results = [builder.communicate(timeout=BUILD_TIMEOUT_S) for builder in builders]
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()
    assert [builder.returncode for builder in builders] == [0, 0], results
    libraries = {out.strip() for out, _ in results}
    assert len(libraries) == 1
    library = Path(libraries.pop())
    assert library.read_text() == "library\n"
    num_sources = len(list(SOURCE_DIR.glob("*.cpp")))
    assert len((tmp_path / "runs").read_text().splitlines()) == num_sources + 1  # and one link
    assert sorted(path.name for path in cache.iterdir()) == sorted(
        [library.parent.name, f"{library.parent.name}.lock"]
    )


def test_auto_falls_back_to_the_reference_and_says_why(tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig()\n"
        "from kernels.ops import select_ops; print(select_ops('auto').name)"
    )
    process = _python(code, PATH="/nonexistent", HOME=str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert out.strip() == "reference", err
    reasons = [line for line in err.splitlines() if line.startswith("WARNING:kernels.ops:")]
    assert len(reasons) == 1
    assert "no C++ compiler: none of c++, g++, clang++ is on PATH" in reasons[0]


def test_cpu_by_name_without_a_compiler_is_an_error(tmp_path: Path) -> None:
    code = "from kernels.ops import select_ops; select_ops('cpu')"
    process = _python(code, PATH="/nonexistent", HOME=str(tmp_path))
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "RuntimeError: kernels backend cpu cannot be loaded: no C++ compiler" in err


def test_auto_takes_the_cpu_kernels_where_they_build(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_ops("auto").name == "cpu"
    assert not caplog.records


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'gpu' is not one of auto, reference, cpu, npu"):
        select_ops("gpu")


def _fake_toolchain(tmp_path: Path, written: str = "library") -> Toolchain:
    """A compiler that writes the same into whatever it is asked for."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf {written} > "$2"\n'
    )
    compiler.chmod(0o755)
    return Toolchain(compiler=str(compiler), compiler_version="fake", capability="DEFAULT")


def test_a_build_removes_what_nobody_has_used_for_a_month(tmp_path: Path) -> None:
    cache, toolchain = tmp_path / "cache", _fake_toolchain(tmp_path)
    old, used, locked = (
        build(cache, replace(toolchain, compiler_version=f"older {i}")) for i in range(3)
    )
    for library in (old, used, locked):
        hash_path = library.with_suffix(".sha256")
        os.utime(hash_path, (0.0, time.time() - 31 * 24 * 3600))
    assert build(cache, replace(toolchain, compiler_version="older 1")) == used
    with (cache / f"{locked.parent.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = build(cache, toolchain)
    assert [path.exists() for path in (old, used, locked, new)] == [False, True, True, True]


@pytest.mark.parametrize("left", ["", "libr", "librarx", "library and more"])
def test_a_damaged_library_is_built_anew(left: str, tmp_path: Path) -> None:
    # Loading part of a library ends the process, and so the worker would die at every start.
    toolchain = _fake_toolchain(tmp_path)
    library = build(tmp_path / "cache", toolchain)
    library.write_text(left)
    assert build(tmp_path / "cache", toolchain) == library
    assert library.read_text() == "library"


def test_a_library_whose_hash_is_lost_or_damaged_is_built_anew(tmp_path: Path) -> None:
    toolchain = _fake_toolchain(tmp_path)
    library = build(tmp_path / "cache", toolchain)
    again = _fake_toolchain(tmp_path, "another")
    (hash_path,) = [path for path in library.parent.iterdir() if path != library]
    for damage in (hash_path.unlink, lambda: hash_path.write_bytes(b"\xff")):
        library.write_text("library")
        damage()
        assert build(tmp_path / "cache", again).read_text() == "another"


def test_a_sound_library_is_not_built_again(tmp_path: Path) -> None:
    library = build(tmp_path / "cache", _fake_toolchain(tmp_path))
    assert build(tmp_path / "cache", _fake_toolchain(tmp_path, "another")) == library
    assert library.read_text() == "library"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that no folder can be made in, and an empty temporary folder."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").write_text("in the way")
    return tmp_path / "home"


def test_without_a_home_to_write_to_the_temporary_folder_keeps_the_library(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = build(toolchain=_fake_toolchain(tmp_path))
    assert library.read_text() == "library"
    (folder,) = (tmp_path / "tmp").iterdir()
    assert library.parent.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"kept in {folder}, because cannot write to the kernel cache {home}" in caplog.text


def test_a_temporary_folder_that_others_may_write_to_is_refused(home: Path, tmp_path: Path) -> None:
    folder = build(toolchain=_fake_toolchain(tmp_path)).parent.parent
    folder.chmod(0o777)
    with pytest.raises(BuildError, match="is not this user's alone"):
        build(toolchain=_fake_toolchain(tmp_path))


def test_without_a_compiler_what_was_built_before_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = find_toolchain().capability
    toolchain = replace(_fake_toolchain(tmp_path), capability=capability)
    library = build(tmp_path / "cache", toolchain)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert build(tmp_path / "cache") == library
    library.write_text("damaged")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build(tmp_path / "cache")


def _failing_toolchain(tmp_path: Path) -> Toolchain:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return Toolchain(compiler=str(compiler), compiler_version="fake", capability="DEFAULT")


def test_a_compile_error_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(BuildError, match="error: no such luck"):
        build(cache, _failing_toolchain(tmp_path))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BuildError, match="cannot write to the kernel cache"):
        build(tmp_path / "file" / "cache", _failing_toolchain(tmp_path))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has one capability"
)
def test_the_kernels_for_avx2_agree_with_the_reference_too() -> None:
    names = ("attention", "linear", "linear_quantized")
    tests = [f"tests/kernels/test_{name}.py" for name in names]
    code = f"import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *{tests}]))"
    process = _python(code, ATEN_CPU_CAPABILITY="avx2", OMP_NUM_THREADS="1")
    out, err = process.communicate(timeout=BUILD_TIMEOUT_S)
    assert process.returncode == 0, out + err


def test_the_toolchain_names_this_cpu() -> None:
    toolchain = find_toolchain()
    assert toolchain.capability in ("AVX512", "AVX2", "DEFAULT")
    assert f"-DCPU_CAPABILITY_{toolchain.capability}" in toolchain.flags


@pytest.mark.parametrize(
    ("capability", "line", "flag"),
    [
        ("AVX512", "flags\t\t: fpu avx512f avx512_vnni", "-mavx512vnni"),
        ("AVX2", "flags\t\t: fpu avx2 avx_vnni", "-mavxvnni"),
        ("DEFAULT", "Features\t: fp asimd asimddp", "-march=armv8.2-a+dotprod"),
    ],
)
def test_dot_products_of_integers_are_used_where_the_cpu_has_them(
    capability: str, line: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr("kernels.cpu.build._CPUINFO", cpuinfo)
    toolchain = replace(_fake_toolchain(tmp_path), capability=capability)
    assert flag not in toolchain.flags  # without the file nothing is known
    without = build(tmp_path / "cache", toolchain)
    cpuinfo.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n")
    assert flag in toolchain.flags
    assert build(tmp_path / "cache", toolchain).parent != without.parent
