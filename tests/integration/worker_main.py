"""A worker process without Ray: prints its info once it serves, ends when its stdin closes."""

import json
import sys
import time

import decoder.actor
import prefiller.actor

_POLL_S = 0.05


def main() -> None:
    role, config_json = sys.argv[1:]
    start = {"prefiller": prefiller.actor.start, "decoder": decoder.actor.start}[role]
    actor = start(config_json)
    while actor.info()["state"] == "starting":
        time.sleep(_POLL_S)  # loading has no event to wait for
    print(json.dumps(actor.info()), flush=True)
    sys.stdin.read()
    actor.stop()


if __name__ == "__main__":
    main()
