"""GPUs without a GPU: a fake HIP runtime and a fake CUDA driver that record what is asked."""

import json
import re
import shutil
import subprocess

import jax
import pytest

from hipjax.ffi import registration
from tests.ffi import processes
from tests.ffi.processes import COMPILER, compiled

CODE = registration.report().code_objects
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.skipif("gfx1151" not in CODE or "ptx" not in CODE, reason="no GPU code was built"),
]
# EF_AMDGPU_MACH of LLVM's AMDGPU usage guide.
ELF_MACHINE = {"gfx1100": "41", "gfx1151": "4a", "gfx1200": "48", "gfx1201": "4e"}
SONAMES = {"rocm": "libamdhip64.so.7", "cuda": "libcuda.so.1"}
ASK = """
import json, sys
from hipjax.ffi.registration import verdict
print(json.dumps(verdict(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory):
    """The folder with both fakes, under the names that the real ones have."""
    folder = tmp_path_factory.mktemp("runtimes")
    for platform, name in SONAMES.items():
        kind = ["-DFAKE_HIP"] if platform == "rocm" else []
        flags = ("-shared", "-fPIC", f"-Wl,-soname,{name}")
        compiled(folder / name, "fake_runtime.cc", *flags, *kind)
    return folder


class Fake:
    """A machine with some devices, and the log of what was asked of its runtime."""

    def __init__(self, folder, log, platform, devices, fails=""):
        self.platform, self.log = platform, log
        self.environment = {
            "LD_LIBRARY_PATH": str(folder),
            "FAKE_LOG": str(log),
            "FAKE_DEVICES": devices,
            "FAKE_FAILS": fails,
        }

    def verdict(self, code=ASK):
        out, _ = processes.run(code, self.platform, **self.environment)
        return registration.Verdict(*json.loads(out))

    def calls(self, name):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def machine(runtimes, tmp_path):
    def made(*arguments, **more):
        return Fake(runtimes, tmp_path / "log", *arguments, **more)

    return made


@pytest.mark.parametrize("architecture", ELF_MACHINE)
def test_each_architecture_gets_its_own_code(machine, architecture):
    fake = machine("rocm", architecture)
    assert fake.verdict() == (True, architecture)
    assert fake.calls("load") == [f"device=0 elf={ELF_MACHINE[architecture]}"]


def test_every_kernel_is_looked_up_before_the_first_launch(machine):
    fake = machine("rocm", "gfx1151")
    assert fake.verdict().kernels
    asked = {line.split()[1] for line in fake.calls("function")}
    source = (processes.ROOT / "csrc/kernels/all.h").read_text()
    listed = re.findall(r"KERNEL\(\w+, (\w+), (\d+)\)", source)
    assert len(listed) > 1
    assert asked == {f"{name}_{i}" for name, count in listed for i in range(int(count))}


def test_two_devices_get_the_code_of_each(machine):
    fake = machine("rocm", "gfx1201,gfx1100")
    assert fake.verdict() == (True, "gfx1201; gfx1100")
    assert fake.calls("load") == ["device=0 elf=4e", "device=1 elf=41"]
    for device in range(2):
        assert any(line.startswith(f"device={device}") for line in fake.calls("function"))


def test_an_unknown_architecture_is_named(machine):
    fake = machine("rocm", "gfx906")
    assert fake.verdict() == (False, "gfx906: there is no code for it")
    assert fake.calls("load") == []


def test_one_device_without_code_is_enough_to_say_no(machine):
    found = machine("rocm", "gfx1151,gfx906").verdict()
    assert found == (False, "gfx1151; gfx906: there is no code for it")


@pytest.mark.parametrize(("platform", "device"), [("rocm", "gfx1151"), ("cuda", "90")])
def test_a_load_that_fails(machine, platform, device):
    found = machine(platform, device, fails="load").verdict()
    assert not found.kernels
    assert found.reason.endswith(": loading the kernels failed with status 209")


def test_a_kernel_that_is_not_found(machine):
    found = machine("rocm", "gfx1151", fails="row_product_3").verdict()
    assert found == (False, "gfx1151: finding the kernel row_product_3 failed with status 500")


def test_no_device(machine):
    assert machine("rocm", "").verdict() == (False, "there is no device")


def test_no_runtime(tmp_path):
    fake = Fake(tmp_path, tmp_path / "log", "rocm", "gfx1151")
    assert fake.verdict() == (False, "HIP's runtime, libamdhip64.so, was not found")


def test_a_runtime_that_lacks_a_function(tmp_path):
    (tmp_path / "empty.cc").touch()
    subprocess.run(
        [COMPILER, "-shared", "-o", tmp_path / SONAMES["rocm"], tmp_path / "empty.cc"], check=True
    )
    found = Fake(tmp_path, tmp_path / "log", "rocm", "gfx1151").verdict()
    assert not found.kernels
    assert "the runtime lacks a function" in found.reason
    assert "hipGetDeviceCount" in found.reason


def test_the_runtime_that_jax_has_loaded_is_taken_whatever_its_version(runtimes, tmp_path):
    later = tmp_path / "libamdhip64.so.10.1"
    shutil.copy(runtimes / SONAMES["rocm"], later)
    fake = Fake(tmp_path / "nothing", tmp_path / "log", "rocm", "gfx1200")
    assert not fake.verdict().kernels
    loaded = fake.verdict(f"import ctypes; ctypes.CDLL({str(later)!r})\n{ASK}")
    assert loaded == (True, "gfx1200")


def test_nvidia_gets_ptx_and_its_shared_memory(machine):
    fake = machine("cuda", "80,90")
    assert fake.verdict() == (True, "sm_80; sm_90")
    loads = fake.calls("load")
    assert len(loads) == 2
    assert all(".version" in line for line in loads)
    assert int(loads[0].split("length=")[1]) > 10_000
    # Not more than the device gives, the function's own 1024 bytes included.
    kernels = len(fake.calls("function")) // 2
    for device, limit in enumerate((101376, 232448)):
        asked = [line for line in fake.calls("allow") if line.startswith(f"device={device}")]
        assert asked == [f"device={device} attribute=8 bytes={limit - 1024}"] * kernels


def test_an_nvidia_card_that_is_too_old(machine):
    found = machine("cuda", "75").verdict()
    assert found == (False, "sm_75: it is older than sm_80, for which there is code")


@pytest.mark.parametrize(
    ("platform", "devices", "multiprocessors"),
    [("rocm", "gfx1151,gfx1151", 21), ("cuda", "80,90", 132)],
)
def test_a_launch_goes_to_the_current_device(machine, tmp_path, platform, devices, multiprocessors):
    program = tmp_path / "launch"
    root = processes.ROOT
    target = str(root / "csrc/gpu/target.cc")
    includes = (f"-I{root / 'csrc'}", f"-I{jax.ffi.include_dir()}")
    compiled(program, "launch.cc", target, *includes, "-ldl")
    fake = machine(platform, devices)
    ran = subprocess.run(
        [program, platform], env=fake.environment, capture_output=True, text=True, check=True
    )
    said = re.search(r"blocks (\d+) threads (\d+) shared (\d+) multiprocessors (\d+)", ran.stdout)
    blocks, threads, shared, found = map(int, said.groups())
    assert shared > 0
    assert found == multiprocessors
    functions = [line.split() for line in fake.calls("function")]
    wanted = functions.index(["device=1", "rms_norm_0"]) + 1
    assert fake.calls("launch") == [
        f"device=1 function={wanted} grid={blocks},1,1 threads={threads} shared={shared} "
        "stream=7 parameters=1 extra=0"
    ]
