"""The compiled core on aarch64, by a cross compiler and qemu: NEON gives the bits that plain loops give on any CPU."""

import platform
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CORE = ROOT / "csrc"
SOURCES = [
    *sorted((CORE / "common").glob("*.cpp")),
    *(path for path in sorted((CORE / "embedding").glob("*.cpp")) if not path.name.startswith(("bind", "torch_"))),
    CORE / "embedding/isa/pair_dots.cpp",
    Path(__file__).with_name("core_check.cpp"),
]
FLAGS = ("-std=gnu++17", "-O2", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi", f"-I{CORE}", "-pthread")
SETS = {"generic": ("kGenericKernels", 4, ()), "neon": ("kNeonKernels", 4, ("-DTERAREC_NEON",))}
"""Set -> constant, lanes and options, as csrc/embedding/CMakeLists.txt has them."""


def needs(*names):
    """The first of these programs that is installed."""
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip(f"{names[0]} is not installed")
    return found


def build(compiler, folder, sets, *flags):
    """The check program with some kernel sets."""
    objects = []
    for name in sets:
        table, lanes, options = SETS[name]
        objects.append(folder / f"{name}.o")
        definitions = [f"-DTERAREC_SET={name}", f"-DTERAREC_TABLE={table}", f"-DTERAREC_LANES={lanes}"]
        source = CORE / "embedding/isa/kernel_set.cpp"
        subprocess.run([compiler, *FLAGS, *definitions, *options, "-c", source, "-o", objects[-1]], check=True)
    program = folder / "core_check"
    subprocess.run([compiler, *FLAGS, *flags, *SOURCES, *objects, "-ldl", "-o", program], check=True)
    return program


def digests(*command):
    """Set -> case -> digest."""
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = defaultdict(dict)
    for line in printed.splitlines():
        name, case, digest = line.split()
        found[name][case] = digest
    return found


@pytest.fixture(scope="module")
def on_aarch64(tmp_path_factory):
    compiler, emulator = needs("aarch64-linux-gnu-g++"), needs("qemu-aarch64-static", "qemu-aarch64")
    return digests(emulator, build(compiler, tmp_path_factory.mktemp("aarch64"), ("generic", "neon"), "-static"))


def test_neon_gives_the_bits_of_plain_loops(on_aarch64):
    assert set(on_aarch64) == {"generic", "neon"}
    assert len(on_aarch64["neon"]) > 30
    assert on_aarch64["neon"] == on_aarch64["generic"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compares with a build for x86-64")
def test_aarch64_gives_the_bits_of_x86_64(on_aarch64, tmp_path):
    here = digests(build(needs("g++"), tmp_path, ("generic",), "-DTERAREC_BASELINE_ONLY"))["generic"]
    there = on_aarch64["generic"]
    assert set(here) == set(there)
    assert {case for case in here if here[case] != there[case] and not case.startswith("libm/")} == set()
