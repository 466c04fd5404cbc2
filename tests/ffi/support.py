"""What the tests of kernels share: other instruction sets, and comparison by bits."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np

from hipjax.ffi.registration import verdict

_ROOT = Path(__file__).parents[2]
_SETS = ("portable", "avx2", "avx512")
_RUNNER = """
import sys
import jax
import numpy as np
from hipjax.ffi.registration import verdict
jax.config.update("jax_platforms", "cpu")
source, wanted, inputs, outputs = sys.argv[1:]
found = verdict("cpu")
assert found.kernels and found.reason == wanted, found
scope = {"given": dict(np.load(inputs)), "results": {}}
exec(source, scope)
np.savez(outputs, **{name: np.asarray(x) for name, x in scope["results"].items()})
"""


def instruction_sets() -> tuple[str, ...]:
    """The CPU instruction sets that this machine can run kernels with, weakest first."""
    found = verdict("cpu")
    assert found.kernels, found.reason
    return _SETS[: _SETS.index(found.reason) + 1]


def bits_under(
    instruction_set: str, code: str, environment: dict[str, str] | None = None, **given: object
) -> dict[str, np.ndarray]:
    """Arrays that a snippet computes on the CPU with kernels of one instruction set.

    The snippet runs in a process of its own, in the repository's root. It finds the arrays
    ``given`` in the dict of that name, and leaves what it computes in the dict ``results``.
    A value in NumPy's own types comes back as it is; bfloat16 has to be viewed as uint16.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(inputs, **{name: np.asarray(x) for name, x in given.items()})
        settings = {
            **os.environ,
            "HIPJAX_CPU": instruction_set,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
            **(environment or {}),
        }
        arguments = [textwrap.dedent(code), instruction_set, str(inputs), str(outputs)]
        ran = subprocess.run(
            [sys.executable, "-c", _RUNNER, *arguments],
            cwd=_ROOT,
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"under {instruction_set}:\n{ran.stderr}"
        with np.load(outputs) as file:
            return dict(file)


def assert_same_bits(got: object, wanted: object) -> None:
    """Equal to the bit, zeros' signs included; any NaN equals any other."""
    a, b = np.asarray(got), np.asarray(wanted)
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, a.shape, b.dtype, b.shape)
    if a.dtype == np.float32:
        nan = np.isnan(a)
        np.testing.assert_array_equal(nan, np.isnan(b))
        a, b = (np.where(nan, 0, x.view(np.int32)) for x in (a, b))
    np.testing.assert_array_equal(a, b)
