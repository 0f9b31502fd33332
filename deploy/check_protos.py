"""Compare the committed generated modules with what protoc makes now; `--write` replaces them."""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")

PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(folder: Path) -> list[Path]:
    """Run protoc from the root, so that modules say `from protos import ...`; the files made."""
    sources = sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto")
    )
    outputs = [f"--{kind}={folder}" for kind in KINDS]
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={name}={scripts / name}" for name in PLUGINS]
    if protoc.main(["protoc", f"-I{ROOT}", *plugins, *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")
    return sorted((folder / "protos").iterdir())


def main() -> None:
    """Check, or write."""
    is_writing = "--write" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        stale = []
        for made in generate(Path(folder)):
            committed = ROOT / "protos" / made.name
            if committed.is_file() and committed.read_bytes() == made.read_bytes():
                continue
            stale.append(made.name)
            if is_writing:
                committed.write_bytes(made.read_bytes())
    if stale and not is_writing:
        raise SystemExit(f"stale: {', '.join(stale)}; run `make protos`")
    print(f"protos: {', '.join(stale) or 'nothing'} changed" if is_writing else "protos: current")


if __name__ == "__main__":
    main()
