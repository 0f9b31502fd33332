"""A decoder's rank that is not the leader, with the graphs that its leader replays."""

from decoder.graph import graph_forward
from engine.worker import follower


def be_follower(rank: int, address: str, token: str, host: str) -> None:
    """See engine.worker.follower."""
    follower.be_follower(rank, address, token, host, graph_forward)


if __name__ == "__main__":
    be_follower(*follower.read_start())
