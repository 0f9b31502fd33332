import pytest

from kernels.ops import Ops, select_ops


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
