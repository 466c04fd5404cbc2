"""The AMD code inside the library: no kernel spills, and weights are loaded 128 bits at a time."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hipjax.ffi import registration
from tests.ffi.processes import ROOT
from tools import rdna_report

LIBRARY = Path(registration.report().library)
ARCHITECTURES = [name for name in registration.report().code_objects if name.startswith("gfx")]
CLANG = next(filter(None, (shutil.which(f"clang++-{v}") for v in (22, 21, 20, 19))), None)
pytestmark = [
    pytest.mark.skipif(not ARCHITECTURES, reason="no code for AMD GPUs was built: no clang"),
    pytest.mark.skipif(
        rdna_report.tool("llvm-objdump") is None, reason="there is no llvm-objdump: llvm-19"
    ),
]
HEAD = """
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256)))
typedef float Four __attribute__((vector_size(16)));
__attribute__((device)) inline int lane() { return __builtin_amdgcn_workitem_id_x(); }
"""
GOOD = """
KERNEL void row_product_0(const Four* w, float* out) {
  const Four all = __builtin_nontemporal_load(w + lane());
  out[lane()] = (all[0] + all[1]) + (all[2] + all[3]);
}
"""
NARROW = """
KERNEL void row_product_0(const float* w, float* out) {
  out[lane()] = __builtin_nontemporal_load(w + 5 * lane());
}
"""
NARROWED = (
    GOOD.replace("KERNEL void row_product_0", "KERNEL void row_product_1")
    + """
KERNEL void row_product_0(const Four* w, const float* v, float* out) {
  const Four all = __builtin_nontemporal_load(w + lane());
  out[lane()] = all[0] + __builtin_nontemporal_load(v + 5 * lane());
}
"""
)
FLAT = """
struct Matrix { const Four* weight; };
KERNEL void row_product_0(const Matrix* m, float* out) {
  const Four all = __builtin_nontemporal_load(m[out[0] > 0].weight + lane());
  out[lane()] = all[0] + all[1];
}
"""
SPILLING = """
extern "C" __attribute__((
    global, amdgpu_flat_work_group_size(1024, 1024), amdgpu_waves_per_eu(16, 16)))
void norm_0(const float* x, float* out) {
  float kept[160];
#pragma unroll
  for (int i = 0; i < 160; ++i) kept[i] = x[lane() * 160 + i];
  __builtin_amdgcn_s_barrier();
#pragma unroll
  for (int i = 0; i < 160; ++i) out[lane() * 160 + i] = kept[i] * kept[159 - i];
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_or_loads_weights_by_parts(architecture):
    kernels = rdna_report.library_kernels(LIBRARY)[architecture]
    assert [fault for kernel in kernels for fault in kernel.faults()] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_was_looked_at(architecture):
    kernels = {kernel.name: kernel for kernel in rdna_report.library_kernels(LIBRARY)[architecture]}
    source = (ROOT / "csrc/kernels/all.h").read_text()
    listed = re.findall(r"KERNEL\(\w+, (\w+), (\d+)\)", source)
    assert set(kernels) == {f"{name}_{i}" for name, count in listed for i in range(int(count))}
    streaming = [kernel for name, kernel in kernels.items() if name.startswith("row_product")]
    assert any("b128 nt" in kernel.loads for kernel in streaming)
    # A block has the threads that are launched: the compiler's own guess is 1024, which leaves a
    # thread fewer registers.
    assert kernels["row_product_0"].threads < 1024


def compiled(tmp_path, source):
    if CLANG is None:
        pytest.skip("there is no clang++ of version 19 or newer")
    file, out = tmp_path / "kernel.hip", tmp_path / "kernel.co"
    file.write_text(HEAD + source)
    command = [CLANG, "-x", "hip", "--offload-arch=gfx1151", "--offload-device-only", "-O2",
               "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", file, "-o", out]  # fmt: skip
    subprocess.run(command, check=True)
    return rdna_report.kernels(out.read_bytes())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (NARROW, "row_product_0 has no 128-bit load"),
        (NARROW, "row_product_0 loads weights as b32 nt"),
        (NARROWED, "row_product_0 loads weights as b32 nt"),
        (FLAT, "row_product_0 loads without knowing"),
        (SPILLING, "norm_0 spills"),
        (SPILLING, "norm_0 uses"),
    ],
)
def test_a_kernel_with_that_fault_is_caught(tmp_path, source, said):
    faults = [fault for kernel in compiled(tmp_path, source) for fault in kernel.faults()]
    assert any(fault.startswith(said) for fault in faults), faults
    assert not any("row_product_1" in fault for fault in faults)


def test_a_kernel_without_fault(tmp_path):
    (kernel,) = compiled(tmp_path, GOOD)
    assert kernel.faults() == []
    assert kernel.loads == {"b128 nt": 1}
    assert kernel.threads == 256


def test_the_report_lists_every_kernel():
    text = rdna_report.report(LIBRARY)
    for architecture, kernels in rdna_report.library_kernels(LIBRARY).items():
        assert f"## {architecture}" in text
        assert all(text.count(f"| {kernel.name} |") == len(ARCHITECTURES) for kernel in kernels)
