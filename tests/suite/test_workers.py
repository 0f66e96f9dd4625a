# SPDX-License-Identifier: Apache-2.0
"""Workers of the suite that crash or hang, and tests that are skipped for want of a program."""

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import Program

ROOT = Path(__file__).parents[2]
PASSING = "def test_one(): pass\ndef test_two(): pass\n"


def run_suite(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Run tests with the settings of this suite; returns the exit status and what was printed."""
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content)
    (folder / "pytest.ini").write_text("[pytest]\nfaulthandler_timeout = 1\nfaulthandler_exit_on_timeout = true\n")
    plugins = ("-p", "tests.conftest", "-p", "xdist", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds on a busy machine
    command = map(str, (sys.executable, "-m", "pytest", *plugins, "-q", *options, folder))
    output = folder / "output.txt"  # no pipe: processes that a crashed worker has left would keep it open
    with output.open("w") as file:
        ended = subprocess.run([*command], cwd=ROOT, env=environment, stdout=file, timeout=250, check=False)
    return ended.returncode, output.read_text()


def test_the_run_fails_and_ends_if_workers_crash_and_hang(tmp_path: Path) -> None:
    """Findings K1 and K4: the suite waited for ever after a worker had crashed."""
    files = {f"test_{name}": PASSING for name in "cdefgh"}
    files["test_a"] = "import os\ndef test_one(): pass\ndef test_two(): os._exit(3)\ndef test_three(): pass\n"
    files["test_b"] = "import time\ndef test_one(): time.sleep(600)\ndef test_two(): pass\n"
    status, printed = run_suite(tmp_path, "-n2", "--dist=loadfile", "--no-loadscope-reorder", **files)
    assert status == 1
    assert "2 failed" in printed
    assert "crashed while running 'test_a.py::test_two'" in printed
    assert "crashed while running 'test_b.py::test_one'" in printed


def test_the_run_ends_if_a_crashed_worker_has_left_a_process(tmp_path: Path) -> None:
    test = "import os, time\ndef test_one():\n    if os.fork() == 0: time.sleep(100)\n    os._exit(3)\n"
    status, printed = run_suite(tmp_path, "-n1", "--dist=loadfile", test_a=test)
    assert status == 1
    assert "crashed while running 'test_a.py::test_one'" in printed


def test_a_run_that_hangs_outside_of_a_test_ends(tmp_path: Path) -> None:
    conftest = "import time\ndef pytest_collection_modifyitems(): time.sleep(600)\n"
    status, _ = run_suite(tmp_path, "--run-seconds=0.5", conftest=conftest, test_a=PASSING)
    assert status == 1


def test_skipped_tests_are_counted_with_what_installs_their_program(tmp_path: Path) -> None:
    """Finding K4."""
    test = "from tests.programs import Program\ndef test_one(): Program(('none',), 'apt-get install none').require()\n"
    status, printed = run_suite(tmp_path, test_a=test, test_b=test)
    assert status == 0
    assert "2 skipped without none: apt-get install none" in printed


def test_a_program_is_searched_among_the_scripts_of_this_python() -> None:
    assert Program(("pytest",), "").path == str(Path(sys.prefix) / "bin" / "pytest")
