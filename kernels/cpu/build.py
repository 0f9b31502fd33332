"""Compile the C++ kernels for this machine, once: `python -m kernels.cpu.build`.

CPU capability, sources + torch version, compiler    ->  key, in three parts
~/.cache/pdserve/kernels/<key>/pdserve_cpu.so        the library, moved there whole
~/.cache/pdserve/kernels/<key>/pdserve_cpu.sha256    its hash: what does not have it is built anew
~/.cache/pdserve/kernels/<key>.lock                  held by whoever builds it; others wait

A build removes those that nobody has taken for 30 days: the time of the hash says when.
Where no home can be written to, the temporary folder has them; without a compiler, what any
compiler made of the same sources is taken.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cpu.cores import usable_cores

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
LIBRARY_NAME = "pdserve_cpu.so"
_COMPILE_TIMEOUT_S = 300.0
_LOCK_TIMEOUT_S = 600.0
_UNUSED_AFTER_S = 30 * 24 * 3600.0
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-DNDEBUG")
# NOTE: without contraction every fused multiply-add is one we wrote: results do not depend on how
# a loop was inlined.
_NUMERIC_FLAGS = ("-ffp-contract=off", "-fno-math-errno")
_CAPABILITY_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
# Dot products of integers, with which each capability comes on newer CPUs: (name in /proc/cpuinfo,
# flag).
_DOT_PRODUCTS = {
    "AVX512": ("avx512_vnni", "-mavx512vnni"),
    "AVX2": ("avx_vnni", "-mavxvnni"),
    "DEFAULT": ("asimddp", "-march=armv8.2-a+dotprod"),
}
_CPUINFO = Path("/proc/cpuinfo")


_log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


class _CacheError(BuildError):
    """The folder cannot keep them; another one may."""


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
            *_instruction_flags(self.capability),
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
    return Toolchain(
        compiler=paths[0], compiler_version=version, capability=capability or _capability()
    )


def _instruction_flags(capability: str) -> tuple[str, ...]:
    """Of the compiler, for this CPU.

    NOTE: results are the same bits with dot products and without.
    """
    flags = _CAPABILITY_FLAGS.get(capability, ())
    name, flag = _DOT_PRODUCTS.get(capability, ("", ""))
    return (*flags, flag) if name in _cpu_features() else flags


def _cpu_features() -> set[str]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    found = (line.split() for line in lines if line.startswith(("flags", "Features")))
    return set(next(found, ()))


def _capability() -> str:
    detected = torch.backends.cpu.get_cpu_capability()
    return detected if detected in _CAPABILITY_FLAGS else "DEFAULT"


def build(cache_dir: Path | None = None, toolchain: Toolchain | None = None) -> Path:
    """Compile the kernels if the cache has no sound library for them yet; return its path.

    Safe in several processes at once: one builds, the others wait for it.

    Raises: BuildError: no compiler, a compile error, no writable cache, or a lock held too long.
    """
    if toolchain is None:
        try:
            toolchain = find_toolchain()
        except BuildError:
            if library := _built_before(cache_dir):
                return library
            raise
    if cache_dir is not None:
        return _build_in(cache_dir, toolchain)
    try:
        return _build_in(_home_cache_dir(), toolchain)
    except _CacheError as error:
        library = _build_in(_temporary_cache_dir(), toolchain)
        _log.warning("kernels: kept in %s, because %s", library.parent.parent, error)
        return library


def _build_in(cache_dir: Path, toolchain: Toolchain) -> Path:
    key = _cache_key(toolchain)
    library = cache_dir / key / LIBRARY_NAME
    try:
        if _is_sound(library):
            return library
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{key}.lock", _LOCK_TIMEOUT_S):
            if not _is_sound(library):
                _compile_into(library.parent, toolchain)
        _remove_unused(cache_dir)
    except OSError as error:
        raise _CacheError(f"cannot write to the kernel cache {cache_dir}: {error}") from error
    return library


def _remove_unused(cache_dir: Path) -> None:
    """NOTE: whoever has a library loaded keeps it; whoever is about to has marked it as used."""
    for hash_path in cache_dir.glob(f"*/{_hash_path(Path(LIBRARY_NAME)).name}"):
        folder = hash_path.parent
        with contextlib.suppress(OSError, BuildError):
            if _is_unused(hash_path):
                with _lock(cache_dir / f"{folder.name}.lock", 0.0):
                    if _is_unused(hash_path):
                        shutil.rmtree(folder)


def _is_unused(hash_path: Path) -> bool:
    return time.time() - hash_path.stat().st_mtime > _UNUSED_AFTER_S


def _built_before(cache_dir: Path | None) -> Path | None:
    """A sound library for this machine, of any compiler."""
    capability = _capability()
    try:
        folder = cache_dir or _home_cache_dir()
        found = sorted(folder.glob(f"{capability.lower()}-{_sources_key(capability)}-*/"))
        return next(filter(_is_sound, (path / LIBRARY_NAME for path in found)), None)
    except (OSError, BuildError):
        return None


def _home_cache_dir() -> Path:
    try:
        return Path.home() / ".cache" / "pdserve" / "kernels"
    except RuntimeError as error:
        raise _CacheError(f"there is no home folder: {error}") from error


def _temporary_cache_dir() -> Path:
    """NOTE: a library is code, so nobody else may be able to put one there."""
    folder = Path(tempfile.gettempdir()) / f"pdserve-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise BuildError(f"cannot write to the kernel cache {folder}: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"the kernel cache {folder} is not this user's alone")
    return folder


def _is_sound(library: Path) -> bool:
    """Whether it is there as it was written; if so it is used now.

    NOTE: loading a library of which a full disk or a power cut left a part ends the process.
    """
    try:
        # NOTE: before it is read: what is read and sound stays until it is loaded.
        with contextlib.suppress(OSError):
            os.utime(_hash_path(library))
        return _hash_path(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError):
        return False


def _hash_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _cache_key(toolchain: Toolchain) -> str:
    parts = (toolchain.compiler_version, " ".join(toolchain.flags))
    compiler = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return f"{toolchain.capability.lower()}-{_sources_key(toolchain.capability)}-{compiler}"


def _sources_key(capability: str) -> str:
    """Of all that a library does but for how the compiler writes it."""
    digest = hashlib.sha256(f"{torch.__version__}\n{platform.machine()}\n{capability}\n".encode())
    digest.update(" ".join(_instruction_flags(capability)).encode())
    for path in [*_sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _compile_into(target: Path, toolchain: Toolchain) -> None:
    """Compile in a directory beside `target`, which then appears whole or not at all."""
    prefix = f"{target.name}.build-"
    # We hold the lock, so whoever left one of these was killed.
    for abandoned in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as work:
        staged = Path(work) / target.name
        staged.mkdir()
        with ThreadPoolExecutor(usable_cores()) as pool:
            objects = list(
                pool.map(lambda source: _compile(source, Path(work), toolchain), _sources())
            )
        library = staged / LIBRARY_NAME
        _link(objects, library, toolchain)
        _hash_path(library).write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        if target.exists():  # a damaged one
            shutil.rmtree(target)
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
