"""Compile the C++ kernels for this machine, once: `python -m kernels.cpu.build`.

sources + torch version + CPU capability + compiler  ->  key
~/.cache/pdserve/kernels/<key>/pdserve_cpu.so        the library, moved there whole
~/.cache/pdserve/kernels/<key>.lock                  held by whoever builds it; others wait
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
LIBRARY_NAME = "pdserve_cpu.so"
_COMPILE_TIMEOUT_S = 300.0
_LOCK_TIMEOUT_S = 600.0
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-DNDEBUG")
# NOTE: without contraction every fused multiply-add is one we wrote: results do not depend on how
# a loop was inlined.
_NUMERIC_FLAGS = ("-ffp-contract=off", "-fno-math-errno")
_CAPABILITY_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """What a build depends on besides the sources."""

    compiler: str
    """Path of the C++ compiler."""
    compiler_version: str
    """First line of its --version."""
    capability: str
    """Vector instructions to compile for: AVX512, AVX2 or DEFAULT (NEON on Arm)."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags."""
        macros = [f"-DCPU_CAPABILITY={self.capability}", f"-DCPU_CAPABILITY_{self.capability}"]
        if platform.machine() == "aarch64":
            macros.append("-DAT_BUILD_ARM_VEC256_WITH_SLEEF")
        include_dir = Path(torch.__file__).parent / "include"
        return (
            *_COMMON_FLAGS,
            *_NUMERIC_FLAGS,
            *macros,
            *_CAPABILITY_FLAGS.get(self.capability, ()),
            "-isystem",
            str(include_dir),
            "-isystem",
            str(include_dir / "torch" / "csrc" / "api" / "include"),
        )


def find_toolchain(capability: str | None = None) -> Toolchain:
    """The compiler to use and the CPU to compile for; `capability` overrides this CPU's own.

    Raises: BuildError: no C++ compiler.
    """
    paths = [path for name in COMPILERS if (path := shutil.which(name))]
    if not paths:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH")
    version = _run([paths[0], "--version"], timeout_s=30.0).splitlines()[0]
    detected = capability or torch.backends.cpu.get_cpu_capability()
    return Toolchain(
        compiler=paths[0],
        compiler_version=version,
        capability=detected if detected in _CAPABILITY_FLAGS else "DEFAULT",
    )


def build(cache_dir: Path | None = None, toolchain: Toolchain | None = None) -> Path:
    """Compile the kernels if the cache has no library for them yet; return the library's path.

    Safe in several processes at once: one builds, the others wait for it.

    Raises: BuildError: no compiler, a compile error, no writable cache, or a lock held too long.
    """
    toolchain = toolchain or find_toolchain()
    cache_dir = cache_dir or _default_cache_dir()
    key = _cache_key(toolchain)
    library = cache_dir / key / LIBRARY_NAME
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{key}.lock", _LOCK_TIMEOUT_S):
            if not library.exists():
                _compile_into(library.parent, toolchain)
    except OSError as error:
        raise BuildError(f"cannot write to the kernel cache {cache_dir}: {error}") from error
    return library


def _default_cache_dir() -> Path:
    return Path.home() / ".cache" / "pdserve" / "kernels"


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _cache_key(toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), toolchain.compiler_version):
        digest.update(f"{part}\n".encode())
    digest.update(" ".join(toolchain.flags).encode())
    for path in [*_sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return f"{toolchain.capability.lower()}-{digest.hexdigest()[:20]}"


def _compile_into(target: Path, toolchain: Toolchain) -> None:
    """Compile in a directory beside `target`, which then appears whole or not at all."""
    prefix = f"{target.name}.build-"
    # We hold the lock, so whoever left one of these was killed.
    for abandoned in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as work:
        staged = Path(work) / target.name
        staged.mkdir()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(
                pool.map(lambda source: _compile(source, Path(work), toolchain), _sources())
            )
        _link(objects, staged / LIBRARY_NAME, toolchain)
        staged.rename(target)


def _compile(source: Path, work: Path, toolchain: Toolchain) -> Path:
    compiled = work / f"{source.stem}.o"
    _run([toolchain.compiler, *toolchain.flags, "-c", str(source), "-o", str(compiled)])
    return compiled


def _link(objects: list[Path], library: Path, toolchain: Toolchain) -> None:
    # NOTE: no -fopenmp here. It would link the system's libgomp; torch brings its own,
    # and two OpenMP runtimes in a process means two thread pools on the same cores.
    torch_libraries = Path(torch.__file__).parent / "lib"
    paths = [str(path) for path in objects]
    search = [f"-L{torch_libraries}", "-ltorch_cpu", "-lc10"]
    _run([toolchain.compiler, "-shared", "-o", str(library), *paths, *search])


def _run(command: list[str], timeout_s: float = _COMPILE_TIMEOUT_S) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took over {timeout_s:.0f} s") from error
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(f"{command[0]} failed: {lines[0].strip()}")
    return done.stdout


@contextlib.contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock; the system drops it if this process dies."""
    deadline_s = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise BuildError(f"{path} was held for over {timeout_s:.0f} s") from None
                time.sleep(0.1)
        yield


def main() -> int:
    """Build, and say where the library is or why there is none."""
    started_s = time.monotonic()
    try:
        toolchain = find_toolchain()
        library = build(toolchain=toolchain)
    except BuildError as error:
        print(f"CPU kernels not built: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started_s
    print(f"CPU kernels for {toolchain.capability} in {library} ({seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
