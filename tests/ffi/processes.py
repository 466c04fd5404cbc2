"""Python in a process of its own, with other settings of the environment."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str, *arguments: str, status: int = 0, **environment: str | None) -> tuple[str, str]:
    """Standard output and error of a snippet; a setting of None is taken away.

    The snippet sees this checkout's hipjax, and jax on the CPU.
    """
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        env={name: value for name, value in settings.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == status, ran.stderr
    return ran.stdout, ran.stderr
