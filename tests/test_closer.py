# SPDX-License-Identifier: Apache-2.0
"""What is closed when nobody closes it: by a thread, never by a finalizer, and once."""

import os
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from terarec.closer import Closer, stream, wait_closed
from tests.processes import run_new_python, run_python


class Owner:
    """An object with something to close."""


def test_no_finalizer_waits(tmp_path: Path) -> None:
    """Finding K1: collections begin inside locks, also in those of `threading`, and must end."""
    ended = run_python("tests.finalizer_cases", tmp_path, is_module=True, timeout=120)
    assert not ended.returncode, f"{ended.stdout}{ended.stderr}"


def test_an_object_that_is_gone_is_closed_by_the_thread() -> None:
    closed_by: list[str] = []
    owner = Owner()
    closer = Closer(owner, lambda: closed_by.append(threading.current_thread().name))
    del owner
    wait_closed()
    assert closed_by == ["terarec-closer"]
    assert closer.is_closed


def test_resources_are_closed_once() -> None:
    closed: list[int] = []
    owner = Owner()
    closer = Closer(owner, lambda: closed.append(1))
    closer()
    closer()
    del owner
    wait_closed()
    assert closed == [1]


def test_an_error_is_reported_and_the_next_object_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda report: errors.append(report.exc_type))
    closed: list[int] = []
    owners = [Owner(), Owner()]
    Closer(owners[0], lambda: 1 // 0)
    Closer(owners[1], lambda: closed.append(1))
    owners.clear()
    wait_closed()
    assert (errors, closed) == ([ZeroDivisionError], [1])


def test_a_dropped_stream_is_closed_by_the_thread_and_a_closed_one_at_once() -> None:
    closed_by: list[threading.Thread] = []

    @stream
    def numbers() -> Generator[int]:
        try:
            yield from range(3)
        finally:
            closed_by.append(threading.current_thread())

    items = numbers()
    assert next(items) == 0
    items.close()
    assert closed_by == [threading.current_thread()]
    assert list(items) == []
    assert next(numbers()) == 0
    wait_closed()
    assert [thread.name for thread in closed_by[1:]] == ["terarec-closer"]


LEFT_OPEN = """
import os, sys
from pathlib import Path
from terarec.closer import Closer, Stream

class Owner: pass

def numbers():
    try:
        yield from range(3)
    finally:
        print("stream", flush=True)

kept, items = Owner(), Stream(numbers())
next(items)
closer = Closer(kept, lambda: print("kept", flush=True))
"""


def test_the_end_of_the_interpreter_closes_what_is_left_but_streams() -> None:
    ended = run_new_python(LEFT_OPEN)
    assert (ended.stdout, ended.stderr) == ("kept\n", "")


FORK = """
child = os.fork()
if not child:
    closer()
    items.close()
    own = Owner()
    Closer(own, lambda: print("own", flush=True))
    del own, kept, items
    wait_closed()
    print("child", flush=True)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_closes_what_is_its_own() -> None:
    ended = run_new_python(f"{LEFT_OPEN}from terarec.closer import wait_closed\n{FORK}")
    assert ended.stdout == "own\nchild\nkept\n", ended.stderr


CHILDREN = """
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from terarec.closer import Closer

class Owner: pass

def work(text):
    global kept
    kept = Owner()
    closer = Closer(kept, lambda: print(text, flush=True))
    def later():
        time.sleep(0.2)
        assert not closer.is_closed
    threading.Thread(target=later).start()
    ThreadPoolExecutor(1).submit(later)

if __name__ == "__main__":
    parent = Owner()
    Closer(parent, lambda: print("parent", flush=True))
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=work, args=(method,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_of_multiprocessing_closes_what_is_left_after_its_threads(tmp_path: Path) -> None:
    """It runs no function of `atexit`: shared memory of HugeCTR's demonstration stayed after its processes."""
    (tmp_path / "program.py").write_text(CHILDREN)
    ended = run_new_python(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", tmp_path / "program.py"
    )
    assert (ended.stdout, ended.stderr) == ("fork\nspawn\nparent\n", "")


ROW_FILE = """
import gc, os, sys
from pathlib import Path
import numpy as np
from terarec.memory.row_file import RowFile

file = RowFile.create(Path(sys.argv[1]) / "rows", 64)
file.write(np.arange(500), np.zeros((500, 64), dtype=np.uint8))
child = os.fork()
if not child:
    if sys.argv[2] == "close":
        file.close()
    elif sys.argv[2] == "drop":
        del file
        gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
file.commit()
print(len(file))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("end", ["exit", "drop", "close"])
def test_a_forked_process_ends_with_a_row_file_of_its_parent(tmp_path: Path, end: str) -> None:
    """The threads of a row file are not in a forked process, which would wait for them."""
    ended = run_python(ROW_FILE, tmp_path, end, timeout=60)
    assert ended.stdout == "500\n", ended.stderr
