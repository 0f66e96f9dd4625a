# SPDX-License-Identifier: Apache-2.0
"""The compiled core on aarch64, by a cross compiler and qemu.

NEON gives the bits that plain loops give on any CPU. The parser, the counters and the id tables give the same columns
and ids as on x86-64, which reads the row file that aarch64 has written.
"""

import platform

import pytest

from tests.kernels.programs_of_core import DATA, EMBEDDING, HERE, compile_set, digests, link
from tests.programs import AARCH64, AARCH64_COMPILER, COMPILER

pytestmark = pytest.mark.slow

DATA_CHECK = [*DATA, HERE / "data_check.cpp"]


def build(compiler, folder, sets, *flags):
    """The check program of the embedding core with some kernel sets."""
    objects = [compile_set(compiler, folder, name) for name in sets]
    return link(compiler, folder / "core_check", [*EMBEDDING, HERE / "core_check.cpp", *objects], *flags)


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
    there = link(compiler, tmp_path / "there", DATA_CHECK, "-static")
    here = link(COMPILER.require(), tmp_path / "here", DATA_CHECK)
    store = tmp_path / "store"
    store.mkdir()
    found = digests(emulator, there, store)["data"]
    assert len(found) > 10
    assert found["crc32c"] == found["crc32c/tables"]
    # This processor reads the row file that the other one has written.
    assert digests(here, store, "read")["data"] == found
