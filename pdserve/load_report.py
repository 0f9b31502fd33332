"""What a load measured, as figures: percentiles, throughput, goodput."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from pdserve.load import LoadConfig, LoadResult, RequestTimes

Values = dict[str, Any]

_PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(
    config: LoadConfig,
    result: LoadResult,
    *,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
) -> Values:
    """All figures; times in seconds. JSON has no NaN, so what was not measured is None, and so is
    goodput without an SLO.
    """
    good = [request for request in result.requests if not request.error]
    tpots = [tpot for request in good if (tpot := request.tpot_s) is not None]
    within = sum(_meets(request, slo_ttft_s, slo_tpot_s) for request in good)
    has_slo = slo_ttft_s is not None or slo_tpot_s is not None
    errors = Counter(request.error for request in result.requests if request.error)
    num_output = sum(request.num_output_tokens for request in good)
    duration_s = result.duration_s
    settings = asdict(config)
    del settings["api_key"]
    return {
        "config": settings,
        "duration_s": duration_s,
        "num_requests": len(result.requests),
        "num_errors": errors.total(),
        "errors": dict(errors.most_common(10)),
        "num_prompt_tokens": sum(request.num_prompt_tokens for request in good),
        "num_cached_tokens": sum(request.num_cached_tokens for request in good),
        "num_output_tokens": num_output,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": num_output / duration_s,
        "slo": {"ttft_s": slo_ttft_s, "tpot_s": slo_tpot_s},
        "goodput_requests_per_s": within / duration_s if has_slo else None,
        "goodput_share": within / max(len(result.requests), 1) if has_slo else None,
        "ttft_s": _spread([request.ttft_s for request in good]),
        "tpot_s": _spread(tpots),
        "itl_s": _spread([gap for request in good for gap in request.itl_s]),
        "e2e_s": _spread([request.e2e_s for request in good]),
    }


def report_table(summary: Values) -> Table:
    """The figures for a person, times in milliseconds."""
    share = summary["goodput_share"]
    table = Table(
        title=f"{summary['num_requests']} requests in {summary['duration_s']:.1f} s, "
        f"{summary['num_errors']} errors; {summary['output_tokens_per_s']:.1f} tok/s, "
        f"{summary['requests_per_s']:.2f} req/s"
        + ("" if share is None else f", goodput {share:.0%}"),
        title_justify="left",
    )
    for column in ("ms", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread = summary[f"{name}_s"]
        figures = [spread[key] for key in ("mean", "p50", "p90", "p99", "max")]
        cells = ["-" if figure is None else f"{figure * 1000:.1f}" for figure in figures]
        table.add_row(name.upper(), *cells)
    return table


def _meets(request: RequestTimes, slo_ttft_s: float | None, slo_tpot_s: float | None) -> bool:
    tpot_s = request.tpot_s
    is_prompt = slo_ttft_s is None or request.ttft_s <= slo_ttft_s
    is_steady = slo_tpot_s is None or tpot_s is None or tpot_s <= slo_tpot_s
    return is_prompt and is_steady


def _spread(values: Sequence[float]) -> Values:
    if not values:
        return dict.fromkeys(("mean", *(f"p{p}" for p in _PERCENTILES), "max"))
    figures: Values = {"mean": sum(values) / len(values)}
    figures |= {f"p{percent}": percentile(values, percent) for percent in _PERCENTILES}
    return figures | {"max": max(values)}
