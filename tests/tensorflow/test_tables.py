# SPDX-License-Identifier: Apache-2.0
"""The tables of the compiled core, in a process without TensorFlow.

TensorFlow takes the ops of a library only where it is the first to load it, which `tests.tensorflow.test_tensorflow`
needs in this process.
"""

from pathlib import Path

from tests.processes import run_new_python

CASES = Path(__file__).with_name("table_cases.py")


def test_the_tables_of_the_core() -> None:
    program = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    result = run_new_python(program, CASES)
    assert result.returncode == 0, result.stdout
