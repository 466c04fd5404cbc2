"""The GPU's row products and norms on a machine without a GPU: a thread for every lane."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ffi.processes import ROOT, compiled

# What only a GPU's compiler understands, and what stands for it here.
REPLACED = {
    'asm volatile("bar.sync 0;" ::: "memory");': "emulated_barrier();",
    "__attribute__((device, always_inline)) inline": "inline",
    "__attribute__((address_space(1))) ": "",
    "__builtin_nontemporal_load(": "*(",
}


def emulated(folder: Path, spoiled: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Builds and runs the emulation, with some of the kernel's text replaced."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    for name, replaced in (("wave", REPLACED), ("row_product", spoiled)):
        file = folder / "csrc" / "gpu" / f"{name}.h"
        text = file.read_text()
        for old, new in replaced.items():
            assert old in text, old
            text = text.replace(old, new)
        file.write_text(text)
    program = folder / "emulated"
    options = ["-O1", "-ffp-contract=off", "-w", f"-I{folder / 'csrc'}", "-pthread"]
    compiled(program, "emulated.cc", *options, standard="c++20")
    return subprocess.run([program], capture_output=True, text=True, check=False)


def test_every_value_is_the_stated_one(tmp_path: Path) -> None:
    """Of 1 to 8 rows, both orders, whole and short groups, rows that do not fit, idle waves."""
    run = emulated(tmp_path, {})
    assert run.returncode == 0, run.stdout
    lines = run.stdout.splitlines()
    assert len(lines) == 25
    assert all(line.endswith(" 0 wrong") for line in lines)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= folded(total[o][r]);", "= total[o][r].v[0];"),
        ("(next + i) * kGroup", "(next + i + 1) * kGroup"),
        ("(p[0] + p[kMaxRows])", "(p[0] + p[2 * kMaxRows])"),
    ],
)
def test_a_spoiled_kernel_is_caught(tmp_path: Path, old: str, new: str) -> None:
    """Negative control."""
    run = emulated(tmp_path, {old: new})
    assert run.returncode != 0
    assert not run.stdout.rstrip().endswith(" 0 wrong")
