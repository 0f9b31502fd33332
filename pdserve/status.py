"""`pdserve status --json`: the same as the table, for programs."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from pdserve.display import STATES
from pdserve.readiness import is_ready
from pdserve.state import ServiceState
from protos import worker_pb2

Values = dict[str, Any]


def status_values(
    state: ServiceState,
    status: worker_pb2.ServiceStatus,
    stats: Mapping[str, worker_pb2.WorkerStats],
) -> Values:
    """Plain values; the cluster's token is not among them."""
    return {
        "service": state.service,
        "status": state.status,
        "model": state.model,
        "pid": state.pid,
        "http_url": state.http_url,
        "grpc_address": state.grpc_address,
        "controller_address": state.controller_address,
        "is_ready": is_ready(state.reachable_host, state.http_port),
        "desired": {"prefiller": status.desired_prefillers, "decoder": status.desired_decoders},
        "workers": [_worker(entry, stats) for entry in status.membership.workers],
    }


def _worker(entry: worker_pb2.WorkerEntry, stats: Mapping[str, worker_pb2.WorkerStats]) -> Values:
    figures = stats.get(entry.engine_id)
    return {
        "engine_id": entry.engine_id,
        "incarnation": entry.incarnation,
        "state": STATES[entry.state],
        "phase": entry.phase,
        "progress": entry.progress,
        "error": entry.error,
        "address": entry.address,
        "pid": entry.pid,
        "num_restarts": entry.num_restarts,
        "node": entry.node,
        "stats": None if figures is None else _plain(figures),
    }


def _plain(figures: worker_pb2.WorkerStats) -> Values:
    values: Values = MessageToDict(
        figures, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return values
