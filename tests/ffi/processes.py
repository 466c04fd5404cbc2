"""Programs in processes of their own: Python with other settings, and what tests compile."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++", "clang++-19"))), None)


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


def compiled(to: Path, source: str, *more: str, standard: str = "c++17") -> None:
    """Compiles a source that lies beside the tests."""
    assert COMPILER is not None
    own = str(Path(__file__).with_name(source))
    subprocess.run([COMPILER, f"-std={standard}", "-o", str(to), own, *more], check=True)
