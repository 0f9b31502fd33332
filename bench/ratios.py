"""Services side by side: their figures over those of one of them, as tables."""

from collections.abc import Mapping

Figures = Mapping[str, Mapping[str, float]]
"""By service, then by row, all above 0; a row that a service lacks was not measured."""


def print_ratios(title: str, figures: Figures, reference: str) -> None:
    """A column for each service; where the reference has no figure, there is no ratio."""
    print(f"\n{title} over that of {reference}, then the figure itself\n")
    print(f"| | {' | '.join(figures)} |\n|---|{'---|' * len(figures)}")
    rows = dict.fromkeys(row for found in figures.values() for row in found)
    for row in rows:
        base = figures[reference].get(row)
        cells = [_cell(found.get(row), base) for found in figures.values()]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def _cell(value: float | None, base: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if base is None else f"{value / base:.2f}x, {value:.4g}"
