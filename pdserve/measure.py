"""A load as a command of a terminal: a bar while it runs, and Ctrl-C for what there is so far."""

import asyncio

from pdserve.display import load_progress
from pdserve.load import LoadConfig, LoadResult, RequestTimes, run_load


def measure(config: LoadConfig) -> tuple[LoadResult, bool]:
    """Run a load; False: Ctrl-C broke it off, and some requests or all are missing."""
    ended: list[RequestTimes] = []
    with load_progress(config.num_requests) as count:

        def watch(times: RequestTimes) -> None:
            ended.append(times)
            count()

        try:
            return asyncio.run(run_load(config, watch)), True
        except KeyboardInterrupt:
            return LoadResult.of_part(ended), False
