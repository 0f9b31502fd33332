"""The rooms are the folders of this checkout, whatever else has their names."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("pdserve", "proxy", "prefiller", "decoder", "engine", "kvtransfer", "kernels", "protos")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_imported_from_this_checkout(room: str) -> None:
    file = importlib.import_module(room).__file__
    assert file is not None
    assert Path(file).resolve() == ROOT / room / "__init__.py"


def test_kernels_says_nothing_that_transformers_takes_for_the_package_of_that_name() -> None:
    # transformers probes for a package called kernels and asks for its version.
    assert "__version__" not in vars(importlib.import_module("kernels"))


def test_no_test_module_takes_anything_from_another() -> None:
    # What several use is in a module of makers beside them; pytest imports tests by themselves.
    takes = re.compile(r"^\s*(?:from|import) tests[\w.]*(?:\.test_\w+| import .*\btest_)", re.M)
    found = {str(path) for path in (ROOT / "tests").rglob("*.py") if takes.search(path.read_text())}
    assert found == set()
