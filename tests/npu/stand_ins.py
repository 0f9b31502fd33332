"""Stand-ins for the CANN libraries, so that the torch_npu wheel imports on a machine without them.

    python tests/npu/stand_ins.py FOLDER

FOLDER goes on LD_LIBRARY_PATH. Every function that the wheel expects of CANN becomes one that
returns 0: enough to import it, to check calls against its schemas and shape functions, and to
convert graphs. Nothing computes. Needs a C compiler and nm.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# The first holds all functions; the wheel only asks the others to exist.
LIBRARIES = (
    "libascendcl",
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libfmk_parser",
    "libacl_tdt_channel",
    "libascend_protobuf",
    "libatb",
)
SYSTEM_LIBRARIES = ("c", "m", "stdc++", "gcc_s", "pthread", "dl")
# The interpreter's own, the linker's own, and C++ tables, which are data.
NOT_FUNCTIONS = ("Py", "_Py", "__gmon", "_ITM", "_Jv", "_ZT")


def build(folder: Path) -> int:
    """Write the libraries; how many functions they stand in for."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SystemExit("stand-ins for CANN need a C compiler, there is none on PATH")
    torch_folder, npu_folder = _package("torch"), _package("torch_npu")
    wheel = [
        *npu_folder.glob("lib/*.so"),
        *npu_folder.glob("_C*.so"),
        *npu_folder.glob("dynamo/torchair/core/*.so"),
    ]
    system = (_system_library(compiler, name) for name in SYSTEM_LIBRARIES)
    defined = _symbols(
        "--defined-only", [*wheel, *torch_folder.glob("lib/*.so"), *filter(Path.exists, system)]
    )
    missing = sorted(
        name
        for name in _symbols("--undefined-only", wheel) - defined
        if not name.startswith(NOT_FUNCTIONS)
    )
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stand_ins.c"
    for i, library in enumerate(LIBRARIES):
        functions = missing if i == 0 else [f"pdserve_no_{library}"]
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in functions))
        command = [compiler, "-shared", "-fPIC", "-w", "-fno-builtin", str(source)]
        command += [f"-Wl,-soname,{library}.so", "-o", str(folder / f"{library}.so")]
        subprocess.run(command, check=True)
    return len(missing)


def _package(name: str) -> Path:
    # NOTE: found, not imported: importing torch_npu is what needs the result.
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"stand-ins for CANN: {name} is not installed in {sys.prefix}")
    return Path(spec.origin).parent


def _system_library(compiler: str, name: str) -> Path:
    for file in (f"lib{name}.so.6", f"lib{name}.so.2", f"lib{name}.so.1", f"lib{name}.so.0"):
        command = [compiler, f"-print-file-name={file}"]
        path = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout[:-1])
        if path.is_absolute():
            return path
    return Path("/nonexistent")


def _symbols(kind: str, files: Iterable[Path]) -> set[str]:
    command = ["nm", "-D", kind, *map(str, files)]
    listing = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}
    ).stdout
    lines = (line.split() for line in listing.splitlines())
    return {fields[-1].partition("@")[0] for fields in lines if len(fields) >= 2}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(f"{build(target)} stand-in functions in {target}")
