"""What every result file states: the machine, and figures with their spread."""

import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
    }


def machine() -> dict[str, Any]:
    """The machine and the libraries that decide how fast it is."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
