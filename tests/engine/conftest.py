from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels.ops import Ops, select_ops
from tests.engine.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight processes: they take seconds to start, so all tests of parallel engines share them."""
    with Ranks(8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, made when it is first asked for."""
    # NOTE: here, because importing transformers takes seconds and most tests do without.
    from tests.engine.parallel_matrix import FAMILIES

    folders: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp("family")
            FAMILIES[family]().save_pretrained(folder)
        return folders[family]

    return of


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    try:
        return select_ops(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def cpu() -> Ops:
    try:
        return select_ops("cpu")
    except RuntimeError as error:
        pytest.skip(str(error))
