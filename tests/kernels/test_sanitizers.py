# SPDX-License-Identifier: Apache-2.0
"""The compiled core under sanitizers: the threads of a call, and callers at the same time.

The programs load no OpenMP runtime, so that the core starts threads of its own, all of which a sanitizer sees.
"""

import pytest

from tests.kernels.programs_of_core import DATA, EMBEDDING, HERE, compile_set, digests, link
from tests.programs import COMPILER

pytestmark = pytest.mark.slow

FLAGS = ("-DTERAREC_BASELINE_ONLY", "-fno-omit-frame-pointer", "-O1", "-g", "-fno-sanitize-recover=all")
ENDS_AT_FIRST = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "ASAN_OPTIONS": "detect_leaks=0"}


def build(folder, check, sources, sanitizer):
    flags = (*FLAGS, f"-fsanitize={sanitizer}")
    kernels = compile_set(COMPILER.require(), folder, "generic", *flags)
    return link(COMPILER.require(), folder / check, [*sources, HERE / f"{check}.cpp", kernels], *flags)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_at_once(tmp_path, sanitizer):
    program = build(tmp_path, "threads_check", [*EMBEDDING, *DATA], sanitizer)
    results = {}
    for threads in (1, 3):
        folder = tmp_path / str(threads)
        folder.mkdir()
        results[threads] = digests(program, folder, str(threads), env=ENDS_AT_FIRST)["threads"]
    assert set(results[1]) == {"tables", "index", "slots", "callers", "readers", "counts", "row_file"}
    assert results[1] == results[3]
    assert len(set(results[1]["callers"])) == len(set(results[1]["readers"])) == 1
    assert len(results[1]["callers"]) == 4


@pytest.mark.parametrize(("check", "sources"), [("core_check", EMBEDDING), ("data_check", [*EMBEDDING, *DATA])])
def test_memory_and_undefined_behaviour(tmp_path, check, sources):
    program = build(tmp_path, check, sources, "address,undefined")
    store = tmp_path / "store"
    store.mkdir()
    assert digests(program, store, env=ENDS_AT_FIRST)
