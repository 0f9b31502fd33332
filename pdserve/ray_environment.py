"""Environment that Ray reads in every one of its processes; it has no other way to be told."""

_LEAN = {
    # No processes are kept for tasks: the service has actors only.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "0",
    # Nobody reads these here, and Ray wakes up to gather them.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Of one node that runs a handful of actors nothing changes ten times a second.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_report_worker_backlog_interval_ms": "10000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_core_worker_internal_heartbeat_ms": "5000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_memory_monitor_refresh_ms": "2000",
}
"""For a Ray that serves nothing but this service."""


def ray_environment(*, is_local: bool, token: str) -> dict[str, str]:
    """Variables to set before Ray is imported."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray would run workers at nice 15, behind whatever else the machine does.
        "RAY_worker_niceness": "0",
    }
    if is_local:
        # NOTE: Ray's ports listen on all addresses, whatever address it is given: without a
        # token, whoever reaches this machine could run code on it.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} | _LEAN
    return variables
