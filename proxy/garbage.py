"""When the interpreter looks for cyclic garbage.

To look at all objects takes 0.1 s when 1,000 streams are open, and all of them wait for it. The
interpreter would do so whenever there are a quarter more objects than at the last time. Here it
looks by itself only at those that are new, which takes a few milliseconds. All are looked at when
no request would wait for it, and otherwise once a minute: what a long request leaves is some ten
kilobytes.
"""

import asyncio
import gc
from collections.abc import Callable

_NUM_NEW_OBJECTS = 20_000
_NUM_YOUNG_ROUNDS = 20
_NEVER = 1 << 30


def freeze_started() -> None:
    """Leave what exists now out of it for ever, and all old objects out of what comes by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_NEW_OBJECTS, _NUM_YOUNG_ROUNDS, _NEVER)


async def collect_at_leisure(
    num_running: Callable[[], int], *, every_s: float = 5.0, max_wait_s: float = 60.0
) -> None:
    """Look at all objects when the last request ended, or after `max_wait_s`; for ever.

    num_running: requests that would have to wait.
    """
    now_s = asyncio.get_running_loop().time
    was_busy, collected_s = False, now_s()
    while True:
        await asyncio.sleep(every_s)
        is_busy = num_running() > 0
        if (was_busy and not is_busy) or now_s() - collected_s >= max_wait_s:
            gc.collect()
            collected_s = now_s()
        was_busy = is_busy
