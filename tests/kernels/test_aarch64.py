# SPDX-License-Identifier: Apache-2.0
"""The compiled core on aarch64, by a cross compiler and qemu.

NEON gives the bits that plain loops give on any CPU. The parser, the counters and the id tables give the same columns
and ids as on x86-64, which reads the row file that aarch64 has written.
"""

import platform
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.programs import AARCH64, AARCH64_COMPILER, COMPILER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CORE = ROOT / "csrc"
HERE = Path(__file__).parent
COMMON = sorted((CORE / "common").glob("*.cpp"))


def parts(folder, *binding_prefixes):
    """The sources of a module without those that need Python."""
    return [path for path in sorted((CORE / folder).glob("*.cpp")) if not path.name.startswith(binding_prefixes)]


EMBEDDING = [*parts("embedding", "bind", "torch_"), CORE / "embedding/isa/pair_dots.cpp", HERE / "core_check.cpp"]
DATA = [*parts("encoding", "bind"), *parts("rowfile", "bind"), HERE / "data_check.cpp"]
OPTIONS = ("-std=gnu++17", "-O2", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi", f"-I{CORE}", f"-I{HERE}")
SETS = {"generic": ("kGenericKernels", 4, ()), "neon": ("kNeonKernels", 4, ("-DTERAREC_NEON",))}
"""Set -> constant, lanes and options, as csrc/embedding/CMakeLists.txt has them."""


def compile_set(compiler, folder, name):
    """An object file of one kernel set."""
    table, lanes, options = SETS[name]
    definitions = [f"-DTERAREC_SET={name}", f"-DTERAREC_TABLE={table}", f"-DTERAREC_LANES={lanes}"]
    compiled = folder / f"{name}.o"
    source = CORE / "embedding/isa/kernel_set.cpp"
    subprocess.run([compiler, *OPTIONS, *definitions, *options, "-c", source, "-o", compiled], check=True)
    return compiled


def link(compiler, program, sources, *flags):
    """The path of a check program."""
    subprocess.run([compiler, *OPTIONS, *flags, *COMMON, *sources, "-pthread", "-ldl", "-o", program], check=True)
    return program


def build(compiler, folder, sets, *flags):
    """The check program of the embedding core with some kernel sets."""
    objects = [compile_set(compiler, folder, name) for name in sets]
    return link(compiler, folder / "core_check", [*EMBEDDING, *objects], *flags)


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
    compiler, emulator = AARCH64_COMPILER.require(), AARCH64.require()
    return digests(emulator, build(compiler, tmp_path_factory.mktemp("aarch64"), ("generic", "neon"), "-static"))


def test_neon_gives_the_bits_of_plain_loops(on_aarch64):
    assert set(on_aarch64) == {"generic", "neon"}
    assert len(on_aarch64["neon"]) > 30
    assert on_aarch64["neon"] == on_aarch64["generic"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compares with a build for x86-64")
def test_aarch64_gives_the_bits_of_x86_64(on_aarch64, tmp_path):
    here = digests(build(COMPILER.require(), tmp_path, ("generic",), "-DTERAREC_BASELINE_ONLY"))["generic"]
    there = on_aarch64["generic"]
    assert set(here) == set(there)
    assert {case for case in here if here[case] != there[case] and not case.startswith("libm/")} == set()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compares with a build for x86-64")
def test_data_and_row_files_are_the_same_on_aarch64_and_x86_64(tmp_path):
    compiler, emulator = AARCH64_COMPILER.require(), AARCH64.require()
    there = link(compiler, tmp_path / "there", DATA, "-static")
    here = link(COMPILER.require(), tmp_path / "here", DATA)
    store = tmp_path / "store"
    store.mkdir()
    found = digests(emulator, there, store)["data"]
    assert len(found) > 10
    assert found["crc32c"] == found["crc32c/tables"]
    # This processor reads the row file that the other one has written.
    assert digests(here, store, "read")["data"] == found
