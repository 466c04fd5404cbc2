"""What the compiled AMD code says of itself: registers, spills, memory, width of weight loads.

    python -m tools.rdna_report > docs/rdna.md

It reads the code objects inside the built library, so what it reports is what is shipped.
LLVM's own tools do the reading: ``llvm-readelf`` of at least version 19 for the metadata of
every kernel, ``llvm-objdump`` for its instructions.

Sources: LLVM's "User Guide for AMDGPU Backend", code object metadata and ELF header flags.
"""

import dataclasses
import functools
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hipjax.ffi import registration

# EF_AMDGPU_MACH: the low byte of the ELF header's flags.
_MACHINES = {0x41: "gfx1100", 0x4A: "gfx1151", 0x48: "gfx1200", 0x4E: "gfx1201"}
_EM_AMDGPU = 224
# Of every one of these architectures, in wave32: registers of a SIMD's lane, the unit in which
# a wave takes them, and the waves that a SIMD holds at most.
_REGISTERS, _UNIT, _WAVES = 1536, 24, 16
_COLUMNS = ("kernel", "threads", "VGPRs", "SGPRs", "spills", "scratch", "LDS", "waves", "b128",
            "narrower")  # fmt: skip
_LOAD = re.compile(r"^\s+(global|flat)_load_(\w+) ([^/\n]*)", re.MULTILINE)
# Kernels that stream weights.
WEIGHT_KERNELS = re.compile(r"(row_product|hyper_mix_up|expert_inner|expert_output)_\d+")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of one code object.

    Attributes:
      name: with its variant, such as "row_product_9".
      threads: of a block.
      vgprs, sgprs: registers of a wave.
      spills: registers that were spilled, of both kinds.
      scratch: bytes of private memory of a lane.
      lds: bytes of static shared memory of a block; launches ask for more.
      waves: that fit on a SIMD by their registers alone.
      loads: for every kind of load from memory, such as "b128", how many instructions; "b128 nt"
        for those that pass by the caches, "flat b128" for those from a pointer of which the
        compiler does not know that it is not into shared memory.
    """

    name: str
    threads: int
    vgprs: int
    sgprs: int
    spills: int
    scratch: int
    lds: int
    waves: int
    loads: dict[str, int]

    def faults(self) -> list[str]:
        """What a kernel must not do: use private memory, or load weights by parts."""
        found = []
        if self.spills:
            found.append(f"{self.name} spills {self.spills} registers")
        if self.scratch:
            found.append(f"{self.name} uses {self.scratch} bytes of scratch a lane")
        if WEIGHT_KERNELS.fullmatch(self.name):
            if not any(kind.startswith("b128") for kind in self.loads):
                found.append(f"{self.name} has no 128-bit load")
            if any(kind.startswith("flat") for kind in self.loads):
                found.append(f"{self.name} loads without knowing from which memory")
        # Only weights pass by the caches.
        narrow = [k for k in self.loads if k.endswith(" nt") and "b128" not in k]
        found += [f"{self.name} loads weights as {kind}" for kind in narrow]
        return found


def code_objects(library: Path) -> dict[str, bytes]:
    """The AMD code objects inside a library, by architecture."""
    data = library.read_bytes()
    found = {}
    at = data.find(b"\x7fELF", 1)
    while at >= 0:
        # e_machine, e_shoff, e_flags, e_shentsize, e_shnum of a 64-bit ELF header.
        (machine,) = struct.unpack_from("<H", data, at + 18)
        if machine == _EM_AMDGPU:
            sections, flags = struct.unpack_from("<QI", data, at + 40)
            size, count = struct.unpack_from("<HH", data, at + 58)
            found[_MACHINES[flags & 0xFF]] = data[at : at + sections + size * count]
        at = data.find(b"\x7fELF", at + 1)
    return found


def tool(name: str) -> str | None:
    """One of LLVM's tools, of version 19 or newer; None if there is none."""
    for path in (f"{name}-{version}" for version in (22, 21, 20, 19)):
        if found := shutil.which(path):
            return found
    return shutil.which(name, path="/opt/rocm/llvm/bin")


def kernels(code: bytes) -> list[Kernel]:
    """All kernels of a code object.

    Raises:
      FileNotFoundError: LLVM's tools are not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".co") as file:
        file.write(code)
        file.flush()
        notes = _said("llvm-readelf", "--notes", file.name)
        instructions = _said("llvm-objdump", "-d", "--no-show-raw-insn", file.name)
    loads = dict(_loads(instructions))
    return [_kernel(part, loads) for part in notes.split("  - .args:")[1:]]


def _said(name: str, *arguments: str) -> str:
    path = tool(name)
    if path is None:
        raise FileNotFoundError(f"{name} of version 19 or newer; Debian has it in llvm-19")
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def _kernel(notes: str, loads: dict[str, dict[str, int]]) -> Kernel:
    # The metadata's keys of the kernel itself are indented less than those of its arguments.
    values = dict(re.findall(r"^    \.(\w+): +(\S+)$", notes, re.MULTILINE))
    number = {key: int(value) for key, value in values.items() if value.isdigit()}
    taken = -(-max(number["vgpr_count"], 1) // _UNIT) * _UNIT
    return Kernel(
        name=values["name"],
        threads=number["max_flat_workgroup_size"],
        vgprs=number["vgpr_count"],
        sgprs=number["sgpr_count"],
        spills=number["vgpr_spill_count"] + number["sgpr_spill_count"],
        scratch=number["private_segment_fixed_size"],
        lds=number["group_segment_fixed_size"],
        waves=min(_WAVES, _REGISTERS // taken),
        loads=loads[values["name"]],
    )


def _loads(instructions: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Kernels, and their loads by kind."""
    for block in re.split(r"^[0-9a-f]+ (?=<)", instructions, flags=re.MULTILINE)[1:]:
        name = block[1 : block.index(">")]
        counts: dict[str, int] = {}
        for space, kind, rest in _LOAD.findall(block):
            # gfx11 writes "slc dlc" for a load that is not to stay in the caches, gfx12 a word.
            passing = "slc" in rest.split() or "th:TH_LOAD_NT" in rest
            kind = "flat " * (space == "flat") + kind + " nt" * passing
            counts[kind] = counts.get(kind, 0) + 1
        yield name, counts


@functools.cache
def library_kernels(library: Path) -> dict[str, list[Kernel]]:
    """The kernels of every code object of a library, by architecture."""
    return {name: kernels(code) for name, code in sorted(code_objects(library).items())}


def report(library: Path) -> str:
    """The tables of docs/rdna.md."""
    found = library_kernels(library)
    compiler = _compiler(next(iter(code_objects(library).values())))
    lines = [
        "# What the compiler made of the kernels for RDNA",
        "",
        "Written by `python -m tools.rdna_report > docs/rdna.md` from the code objects inside the",
        f"library, as compiled by {compiler}. This is compiled code, not a measurement: nothing",
        "here has run on an AMD card.",
        "",
        "`waves` is how many fit on a SIMD, of 16, by their vector registers; the shared memory",
        "that a launch asks for may allow fewer. `b128` counts 128-bit loads from global memory,",
        "`narrower` all others; *nt* are those that pass by the caches, which only weights do.",
        "`tests/ffi/test_code_objects.py` fails when a kernel spills, uses scratch, or loads",
        "weights by less than 128 bits.",
    ]
    for architecture, members in found.items():
        faults = [fault for kernel in members for fault in kernel.faults()]
        lines += [
            "",
            f"## {architecture}",
            "",
            f"{len(members)} kernels. {'; '.join(faults) or 'None spills or uses scratch'}.",
            "",
            "| " + " | ".join(_COLUMNS) + " |",
            "| --- " + "| --: " * (len(_COLUMNS) - 1) + "|",
        ]
        lines += [_row(kernel) for kernel in members]
    return "\n".join(lines) + "\n"


def _row(kernel: Kernel) -> str:
    def counted(wide: bool) -> str:
        some = {k: n for k, n in kernel.loads.items() if k.startswith("b128") == wide}
        passing = sum(n for k, n in some.items() if k.endswith(" nt"))
        return f"{sum(some.values())}" + (f" ({passing} nt)" if passing else "")

    cells = (kernel.name, kernel.threads, kernel.vgprs, kernel.sgprs, kernel.spills, kernel.scratch,
             kernel.lds, kernel.waves, counted(True), counted(False))  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _compiler(code: bytes) -> str:
    found = re.search(rb"clang version [\w.~+-]+", code)
    return found.group().decode() if found else "an unnamed compiler"


if __name__ == "__main__":
    print(report(Path(registration.report().library)), end="")
