"""The torch_npu wheel and its TorchAir where there is no NPU; import this before anything of them.

Needs stand_ins.py's libraries on LD_LIBRARY_PATH and TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import sys
import warnings
from types import ModuleType
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the wheel's own, at import
    import torch_npu  # registers torch.ops.npu
    import torch_npu.dynamo.torchair as torchair


def _take_for_ascend_910b() -> None:
    """Some shape functions ask the device what it is; there is none to ask."""
    loaded("op_plugin.meta._meta_registrations").get_soc_version = lambda: 220


HAS_NPU = bool(torch_npu.npu.is_available())


def loaded(ending: str) -> ModuleType:
    """The module whose name ends so; the wheel has several names for its own."""
    return next(module for name, module in list(sys.modules.items()) if name.endswith(ending))


if not HAS_NPU:
    _take_for_ascend_910b()


def stop_before_graph_engine(captured: list[bytes]) -> None:
    """Let graphs that TorchAir would hand to the Graph Engine land in `captured` instead.

    The Graph Engine is the one part that needs CANN. The graphs are serialised ModelDef messages.
    """
    converter = loaded("torchair._ge_concrete_graph.fx2ge_converter")
    converter.initialize_graph_engine = lambda *args, **kwargs: None

    class Sink(ModuleType):
        export = staticmethod(lambda graph, options: captured.append(graph))
        # What the installed CANN knows: it is taken to be new enough for this wheel.
        check_cann_compat = staticmethod(lambda *args, **kwargs: "")

    converter._torchair = Sink("_torchair")
    loaded("torchair._ge_concrete_graph.compat_ir")._torchair = converter._torchair
    loaded("torchair.core._backend")._cached_device_id = 0
    torch_npu.npu.get_device_name = lambda *args: "Ascend910B1"
    torch_npu.npu.current_device = lambda: 0
    torch_npu.npu.device_count = lambda: 16


def parse_graph(serialized: bytes) -> Any:
    """The GraphDef message in a serialised ModelDef."""
    messages = loaded("torchair._ge_concrete_graph.ge_ir_pb2")
    (graph,) = messages.ModelDef.FromString(serialized).graph
    return graph


__all__ = [
    "HAS_NPU",
    "loaded",
    "parse_graph",
    "stop_before_graph_engine",
    "torch",
    "torch_npu",
    "torchair",
]
