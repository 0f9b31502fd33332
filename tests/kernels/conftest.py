import pytest

from kernels.ops import Ops, select_ops


@pytest.fixture(scope="session")
def reference() -> Ops:
    return select_ops("reference")


@pytest.fixture(scope="session")
def cpu() -> Ops:
    return select_ops("cpu")
