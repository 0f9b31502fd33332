"""The Graph Engine graph that the wheel's TorchAir converts a function to, and questions to it."""

import collections
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.npu.wheel import parse_graph, stop_before_graph_engine, torchair

_captured: list[bytes] = []
stop_before_graph_engine(_captured)


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of the graph."""

    name: str
    op: str
    inputs: tuple[str, ...]
    """Names of the nodes that it reads or, for a control edge, follows."""
    attributes: Any = field(repr=False)

    @property
    def stream(self) -> str | None:
        """Its stream label."""
        if "_user_stream_label" not in self.attributes:
            return None
        label: str = self.attributes["_user_stream_label"].s.decode()
        return label


@dataclass(frozen=True, slots=True)
class GEGraph:
    """All operators, by name."""

    nodes: dict[str, Node]

    def count(self, *ops: str) -> int:
        """How many nodes are of these types."""
        return sum(node.op in ops for node in self.nodes.values())

    def counts(self) -> dict[str, int]:
        """Nodes of each type; constants and what carries no data are left out."""
        quiet = {"Const", "Data", "RefData", "NetOutput"}
        ops = collections.Counter(node.op for node in self.nodes.values())
        return {op: ops[op] for op in sorted(ops) if op not in quiet}

    def of(self, *ops: str) -> list[Node]:
        """All nodes of these types."""
        return [node for node in self.nodes.values() if node.op in ops]

    def producers(self, node: Node) -> list[Node]:
        """The nodes it reads."""
        return [self.nodes[name] for name in node.inputs if name in self.nodes]

    def upstream(self, node: Node, through: Sequence[str]) -> list[Node]:
        """All nodes before it that are reached through nodes of the types `through` alone."""
        found: dict[str, Node] = {}
        todo = [node]
        while todo:
            for producer in self.producers(todo.pop()):
                if producer.name not in found and producer.op in through:
                    todo.append(producer)
                found[producer.name] = producer
        return list(found.values())

    def streams(self) -> dict[str | None, set[str]]:
        """The types of the nodes of each stream label."""
        found: dict[str | None, set[str]] = collections.defaultdict(set)
        for node in self.nodes.values():
            found[node.stream].add(node.op)
        return found


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def ge_graph(function: Callable[..., Any], *args: Any, config: Any = None) -> GEGraph:
    """Convert `function(*args)`, whose tensors' values do not matter, whole.

    config: a torchair.CompilerConfig. Raises what TorchAir raises for a graph break or an operator
    that it cannot convert.
    """
    del _captured[:]
    torch._dynamo.reset()
    model = function if isinstance(function, nn.Module) else _Function(function)
    with tempfile.TemporaryDirectory() as folder:
        torchair.dynamo_export(
            *args,
            model=model,
            export_path=folder,
            dynamic=False,
            config=config or torchair.CompilerConfig(),
        )
    (serialized,) = _captured
    nodes = {}
    for op in parse_graph(serialized).op:
        inputs = tuple(name.rpartition(":")[0] for name in op.input if name)
        nodes[op.name] = Node(op.name, op.type, inputs, op.attr)
    return GEGraph(nodes)
