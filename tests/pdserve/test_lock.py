"""The lock files name everything that pyproject.toml asks for, as it is installed here."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent


def pins(name: str) -> dict[str, Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def asked_for() -> tuple[list[str], list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]["dev"]


def test_every_dependency_is_locked() -> None:
    runtime, dev = asked_for()
    locked = pins("requirements.lock")
    assert {canonicalize_name(Requirement(line).name) for line in runtime} <= set(locked)
    locked |= pins("requirements-dev.lock")
    assert {canonicalize_name(Requirement(line).name) for line in dev} <= set(locked)


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_every_lock_is_exact_and_what_is_installed(name: str) -> None:
    for requirement in pins(name).values():
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        if (requirement.marker or Marker("python_version > '3'")).evaluate():
            # A local version such as 2.13.0+cpu satisfies the pin.
            installed = importlib.metadata.version(requirement.name)
            assert requirement.specifier.contains(installed), requirement
