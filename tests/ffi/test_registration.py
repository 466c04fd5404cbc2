"""Finding the library, and what happens where there is none: plain JAX and one warning."""

import json
import os
from pathlib import Path

import pytest

from hipjax.ffi import ops, registration
from hipjax.ffi.call import call
from tests.ffi import processes

BESIDE = Path(registration.__file__).with_name("libhipjax.so")
ASK = "from hipjax.ffi.registration import verdict; print(verdict('cpu').reason)"
NORM = """
import warnings
import jax.numpy as jnp
from hipjax.ffi import ops

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for width in (8, 16):
        out = ops.rms_norm(jnp.ones((2, width)), jnp.ones(width), 1e-6)
        assert abs(out - 2.0).max() < 1e-3
        ops.row_product(out, jnp.ones((3, width)))
for warning in caught:
    print(warning.category.__name__, warning.message)
"""
GENERATE = """
import hipjax, sys
model = hipjax.load_nano()
try:
    hipjax.generate(model.params, None, [5], config=model.config, implementation="kernel")
except ValueError as error:
    print(error)
try:
    hipjax.logits(model.params, [5], config=model.config, rows=True, implementation="kernel")
except ValueError as error:
    print(error)
"""


@pytest.fixture
def broken(tmp_path):
    file = tmp_path / "libhipjax.so"
    file.write_bytes(b"\177ELF and nothing else")
    return str(file)


def test_the_library_lies_beside_its_module():
    named = os.environ.get("HIPJAX_LIBRARY")
    assert registration.report().library == (named or str(BESIDE))
    assert registration.verdict("cpu").kernels
    assert "rms_norm" in registration.operations()


def test_another_library_can_be_named(tmp_path):
    other = tmp_path / "other.so"
    other.symlink_to(registration.report().library)
    code = "from hipjax.ffi.registration import report; print(report().library)"
    assert processes.run(code, HIPJAX_LIBRARY=str(other))[0].strip() == str(other)


def test_a_missing_library():
    found, _ = processes.run(ASK, HIPJAX_LIBRARY="/nowhere/lib.so")
    assert found == "HIPJAX_LIBRARY is /nowhere/lib.so, which is not a file\n"
    code = f"""
        from pathlib import Path
        from hipjax.ffi import registration
        registration._BESIDE = Path("/nowhere/lib.so")
        {ASK}
    """
    found, _ = processes.run(code, HIPJAX_LIBRARY=None)
    assert found == "the library of kernels was not built: there is no /nowhere/lib.so\n"


def test_a_broken_library(broken):
    found, _ = processes.run(ASK, HIPJAX_LIBRARY=broken)
    assert f"{broken} could not be loaded: " in found


def test_a_library_of_something_else():
    """One that loads, but is not ours."""
    code = f"""
        import _ctypes, os
        os.environ["HIPJAX_LIBRARY"] = _ctypes.__file__
        {ASK}
    """
    found, _ = processes.run(code)
    assert "could not be loaded" in found
    assert "hipjax_operations" in found


def test_without_kernels_there_is_plain_jax_and_one_warning():
    out, err = processes.run(NORM, HIPJAX_LIBRARY="/nowhere/lib.so")
    (warning,) = out.splitlines()
    assert warning.startswith("RuntimeWarning hipjax uses plain JAX on this machine's cpu")
    assert warning.endswith("HIPJAX_LIBRARY is /nowhere/lib.so, which is not a file")
    assert err == ""
    assert processes.run(NORM) == ("", "")  # where kernels run there is nothing to say


def test_kernels_that_are_required(broken):
    refusals, _ = processes.run(GENERATE, HIPJAX_LIBRARY=broken)
    generate, logits = refusals.splitlines()
    assert generate.startswith("implementation is 'kernel', but a kernel cannot run on this")
    assert broken in generate
    assert logits == generate


@pytest.mark.parametrize("limit", registration.INSTRUCTION_SETS)
def test_the_instruction_set_can_be_limited(limit):
    names = registration.INSTRUCTION_SETS
    best, _ = processes.run(ASK, HIPJAX_CPU=None)
    found, _ = processes.run(ASK, HIPJAX_CPU=limit)
    wanted = min(names.index(limit), names.index(best.strip()))
    assert names.index(found.strip()) == wanted


def test_an_instruction_set_that_there_is_not():
    said = "HIPJAX_CPU is 'sse'; allowed: portable, avx2, avx512"
    _, err = processes.run(ASK, HIPJAX_CPU="sse", status=1)
    assert err.splitlines()[-1] == f"ValueError: {said}"
    doctor = "import sys; from hipjax.cli import main; sys.exit(main(['doctor', '--json']))"
    out, _ = processes.run(doctor, HIPJAX_CPU="sse", status=1)
    report = json.loads(out)
    assert report["kernels"] == report["operations"] == {"error": said}


def test_doctor_says_what_runs_and_why(broken):
    doctor = "import sys; from hipjax.cli import main; sys.exit(main(['doctor', '--json']))"
    report = json.loads(processes.run(doctor)[0])
    found = registration.report()
    assert report["kernels"]["library"] == found.library
    assert report["kernels"]["instruction set of the CPU"] == found.instruction_set
    assert report["kernels"]["code objects"].split() == (list(found.code_objects) or ["none"])
    assert report["operations"]["rms_norm"] == f"kernel ({found.instruction_set})"
    assert set(report["operations"]) == set(ops.implementations())

    report = json.loads(processes.run(doctor, HIPJAX_LIBRARY=broken)[0])
    assert broken in report["kernels"]["library"]
    assert all(
        said.startswith("reference: ") and broken in said for said in report["operations"].values()
    )


def test_a_backend_that_nobody_has_heard_of():
    found = registration.verdict("tpu")
    assert found == (False, "there are no kernels for the backend 'tpu'")


def test_a_library_that_is_too_old_says_so():
    with pytest.raises(RuntimeError, match="has no kernel for no_such_thing: build it again"):
        call("no_such_thing", [], [], [])
