"""The room by itself: the example of the documentation, run where nothing else can be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = ("engine", "pdserve", "proxy", "prefiller", "decoder", "ray", "transformers", "fastapi")


def test_the_example_of_the_documentation_runs_without_the_other_rooms(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "transfer.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({OTHERS!r}))\n"
    script = tmp_path / "example.py"
    script.write_text(blocked + example)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ok=True" in done.stdout
