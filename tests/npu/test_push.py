"""What a prefill step pushes waits for the stream: one event a layer, whatever goes out with it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kernels.ascend.queue import mark
from kvtransfer.connector import BlockCopy, KVArrived, KVFailed
from tests.kvtransfer.harness import CONFIG, LAYOUT, eventually, pair


class Device:
    """Stands in for torch.npu: events are reached when the test says so."""

    def __init__(self) -> None:
        self.num_events = 0
        self.is_done = True
        self.is_looked_at = False

    def Event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.num_events += 1

            def query(self) -> bool:
                device.is_looked_at = True
                return device.is_done

        return Event()


def test_all_transfers_of_a_step_wait_for_one_event_a_layer() -> None:
    device = Device()
    with pair() as (writer, reader):
        writer.memory.mark = partial(mark, device)
        keys = [(f"r{i}", 0) for i in range(3)]
        transfers = [writer.begin(key, reader.expect(key, [i])) for i, key in enumerate(keys)]
        push_layer = writer.sender.pusher(
            [(transfer, [BlockCopy(i, 0)]) for i, transfer in enumerate(transfers)]
        )
        for layer_idx in range(LAYOUT.num_layers):
            push_layer(layer_idx)
        for transfer in transfers:
            transfer.finish()
        assert {reader.next_event() for _ in keys} == {KVArrived(key) for key in keys}
    assert device.is_looked_at
    assert device.num_events == LAYOUT.num_layers


def test_a_step_that_completes_no_block_sets_no_event() -> None:
    device = Device()
    with pair() as (writer, reader):
        writer.memory.mark = partial(mark, device)
        transfer = writer.begin(("r", 0), reader.expect(("r", 0), [1]))
        writer.sender.pusher([(transfer, [])])(0)
        transfer.withdraw("enough seen")
        assert not writer.next_result().ok
    assert device.num_events == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_device_that_hangs_fails_the_transfer_and_the_next_one_is_served(
    is_aborted: bool,
) -> None:
    device = Device()
    config = replace(CONFIG, progress_timeout_s=60 if is_aborted else 0.3, abort_patience_s=0.1)
    with pair(config) as (writer, reader):
        writer.memory.mark = partial(mark, device)
        device.is_done = False
        hung = writer.begin(("hung", 0), reader.expect(("hung", 0), [1]))
        writer.push_all(hung, [1])
        eventually(lambda: device.is_looked_at)
        if is_aborted:
            hung.abort("given up")
        error = "given up" if is_aborted else "layer 0 was not computed in time"
        assert writer.next_result().error == error
        event = reader.next_event()
        assert isinstance(event, KVFailed)
        assert event.quiet
        assert error in event.reason
        device.is_done = True
        assert writer.send(("next", 0), reader.expect(("next", 0), [2]), [2]).ok
        assert reader.next_event() == KVArrived(("next", 0))
