from collections.abc import Iterator

import pytest

from tests.kvtransfer.faults import Faults, faulty
from tests.kvtransfer.harness import ReaderThread, Writer


@pytest.fixture
def rig() -> Iterator[tuple[Writer, ReaderThread, Faults]]:
    """A pair whose writes go through a seam for faults."""
    faults = Faults()
    reader = ReaderThread()
    writer = Writer(transports=faulty(faults))
    yield writer, reader, faults
    faults.gate.set()
    writer.close()
    reader.close()
