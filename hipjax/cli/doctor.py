"""``hipjax doctor``."""

import argparse
import importlib.metadata
import json
import platform
import time
from typing import Any

import jax

import hipjax
from hipjax.cli.errors import FAILED, CommandError
from hipjax.cli.output import show_table
from hipjax.cli.runtime import devices, use_cache
from hipjax.ffi import ops, registration

_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "tokenizers")


def run(args: argparse.Namespace) -> int:
    """Shows what is installed and whether it works."""
    report = {
        "versions": _versions(),
        "platform": _platform(),
        "kernels": _kernels(),
        "operations": _operations(),
        "cache": _cache(),
        "bundled_model": _bundled_model(),
    }
    if args.json:
        print(json.dumps(report))
    else:
        for name, rows in report.items():
            show_table(name.replace("_", " ").capitalize(), rows)
    return FAILED if any("error" in rows for rows in report.values()) else 0


def _versions() -> dict[str, str]:
    found = {"hipjax": hipjax.__version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def _platform() -> dict[str, Any]:
    system = {"system": platform.platform()}
    try:
        found = devices()
    except CommandError as error:
        return system | {"error": str(error)}
    listed = ", ".join(f"{d.id}: {d.device_kind}" for d in found)
    return system | {"backend": found[0].platform, "devices": listed}


def _kernels() -> dict[str, Any]:
    """The library, what it holds, and what the device in use says of it."""
    try:
        found = registration.report()
        backend = devices()[0].platform
        verdict = registration.verdict(backend)
    except (ValueError, CommandError) as error:
        return {"error": str(error)}
    rows = {
        "library": found.library,
        "instruction set of the CPU": found.instruction_set or "none",
        "code objects": " ".join(found.code_objects) or "none",
    }
    if found.missing:
        rows["missing"] = found.missing
    if backend != "cpu":
        rows[backend] = verdict.reason
    return rows


def _operations() -> dict[str, str]:
    try:
        devices()
        return ops.implementations()
    except (ValueError, CommandError) as error:
        return {"error": str(error)}


def _cache() -> dict[str, Any]:
    folder = use_cache()
    if folder is None:
        return {"folder": None}
    programs = [file.stat().st_size for file in folder.glob("*-cache")]
    return {"folder": str(folder), "programs": len(programs), "bytes": sum(programs)}


def _bundled_model() -> dict[str, Any]:
    began = time.perf_counter()
    try:
        devices()
        model = hipjax.load_nano()
    except (ValueError, OSError, CommandError) as error:
        return {"error": str(error)}
    return {
        "layers": model.config.num_hidden_layers,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "seconds_to_load": round(time.perf_counter() - began, 2),
    }
