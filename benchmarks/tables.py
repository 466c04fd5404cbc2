"""Markdown tables of result files, as they stand in docs/kernels.md.

python -m benchmarks.tables benchmarks/results/NAME-rows.json …
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a table whose columns are numbers, but for the first."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_table(report: dict[str, Any]) -> str:
    """One line a matrix: time of one row, row costs, and the dots over the kernel."""
    first = next(iter(report["shapes"].values()))
    counts = [key for key in first if key.isdigit()]
    dots = [
        (name, [r for r in counts if f"{name}_over_kernel" in first[r]])
        for name in ("dot", "exact_dot")
    ]
    dots = [(name, where) for name, where in dots if where]
    head = ["matrix", "MB", "1 row, µs", "of bandwidth"]
    head += [f"row cost, {r}" for r in counts if r != "1"]
    head += [f"{name.replace('_', ' ')} / kernel, {'/'.join(where)}" for name, where in dots]
    lines = []
    for name, shape in report["shapes"].items():
        one = shape["1"]
        line = [
            f"`{name}`",
            f"{shape['bytes'] / 1e6:.1f}",
            _spread(one["kernel_us"]),
            f"{one['bytes_per_second'] / report['read_bandwidth']:.0%}",
        ]
        line += [f"{shape[r]['row_cost']:.3f}" for r in counts if r != "1"]
        for other, where in dots:
            ratios = [f"{shape[r][f'{other}_over_kernel']['median']:.2f}" for r in where]
            line.append(" / ".join(ratios))
        lines.append(line)
    return table(head, lines)


def families_table(report: dict[str, Any]) -> str:
    """One line a kernel call of a step, and their sum."""
    first = next(iter(report["families"].values()))
    counts = [key for key in first if key.isdigit()]
    limit = report["read_bandwidth"]
    head = ["call", "times"]
    for r in counts:
        head += [f"{r} rows: MB", "µs", "of bandwidth"]
    head.append(f"row cost, {'/'.join(counts[1:])}")
    lines, totals = [], {r: [0.0, 0.0] for r in counts}
    for name, entry in report["families"].items():
        line = [f"`{name}`", str(entry["calls"])]
        for r in counts:
            found = entry[r]
            line += [
                f"{found['bytes'] / 1e6:.2f}",
                _spread(found["us"]),
                f"{found['of_read_bandwidth']:.0%}",
            ]
            totals[r][0] += entry["calls"] * found["bytes"]
            totals[r][1] += entry["calls"] * found["us"]["median"]
        line.append(" / ".join(f"{entry[r]['row_cost']:.2f}" for r in counts[1:]))
        lines.append(line)
    total, one = ["all calls of a step", ""], totals[counts[0]][1]
    for r in counts:
        size, time = totals[r]
        total += [f"{size / 1e6:.0f}", f"{time:.0f}", f"{size / (time * 1e-6) / limit:.0%}"]
    costs = [(totals[r][1] - one) / (int(r) - 1) / one for r in counts[1:]]
    total.append(" / ".join(f"{cost:.2f}" for cost in costs))
    return table(head, [*lines, total])


def windows_table(report: dict[str, Any]) -> str:
    """One line an implementation: milliseconds of a window by its rows."""
    windows = report["window_ms_by_rows"]
    if "kernel" not in windows:  # a file from before both were measured
        windows = {"kernel": windows}
    head = ["ms a window, by rows", *windows["kernel"]]
    lines = [[how, *(f"{w['median']:.2f}" for w in each.values())] for how, each in windows.items()]
    return table(head, lines)


def rates_table(report: dict[str, Any]) -> str:
    """One line a way to decode: tokens per second by genre."""
    genres = report["decode"]
    ways = [way for way, found in next(iter(genres.values())).items() if isinstance(found, dict)]
    lines = [
        [way, *(_spread(found[way]["tokens_per_second"]) for found in genres.values())]
        for way in ways
    ]
    return table(["tokens per second", *genres], lines)


def _spread(figure: dict[str, float]) -> str:
    digits = 1 if figure["median"] < 1000 else 0
    return f"{figure['median']:.{digits}f} [{figure['low']:.{digits}f}–{figure['high']:.{digits}f}]"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        report = json.loads(file.read_text())
        print(f"`{report['command']}`, {report['machine']['device']}, {report['date']}\n")
        if "decode" in report:
            print(windows_table(report), rates_table(report), sep="\n\n", end="\n\n")
            continue
        print(f"Read bandwidth {report['read_bandwidth'] / 1e9:.1f} GB/s:\n")
        print(rows_table(report) if "shapes" in report else families_table(report), "\n")


if __name__ == "__main__":
    main()
