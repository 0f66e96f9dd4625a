# SPDX-License-Identifier: Apache-2.0
"""A save that dies or fails at any point leaves the checkpoint before it whole, and a later save succeeds."""

import errno
import os
import resource
import shutil
import signal
import sys

import pytest

from terarec.checkpoint import latest, load, save
from terarec.errors import StorageError
from tests.checkpoint.small_state import assert_holds, make_state
from tests.params import in_every_run

# From Python 3.12 on every fork beside threads warns; `in_child` says why these may fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

OLD, NEW = make_state(5), make_state(6)
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class FailAt:
    """An audit hook (they cannot be removed) that calls `action` at the `count`-th event once armed."""

    def __init__(self):
        self.count = None
        self.action = None

    def __call__(self, event, _arguments):
        if self.count is None or event not in EVENTS:
            return
        self.count -= 1
        if self.count < 0:
            self.count = None
            self.action()


FAIL_AT = FailAt()
sys.addaudithook(FAIL_AT)


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work) -> int:
    """Run `work` in a forked process; its exit status. NumPy and file calls only: torch's threads are not there."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def assert_recovers(directory):
    """The old checkpoint is whole, or the new one has just replaced it as the latest; the next save works."""
    found = load(latest(directory))
    assert_holds(found, OLD if found.step == 5 else NEW)
    following = make_state(7)
    assert_holds(load(save(directory, following, keep=1)), following)
    assert [path.name for path in directory.iterdir()] == ["step-00000007"]


def num_events(tmp_path):
    """How many events a save has after another."""
    save(tmp_path / "old", OLD)
    # Once before, since the first one imports modules.
    save(shutil.copytree(tmp_path / "old", tmp_path / "first"), NEW, keep=1)
    dry = shutil.copytree(tmp_path / "old", tmp_path / "dry")
    FAIL_AT.count, FAIL_AT.action = 10**6, die
    save(dry, NEW, keep=1)
    seen, FAIL_AT.count = 10**6 - FAIL_AT.count, None
    return seen


def test_killed_at_every_file_operation(tmp_path):
    total = num_events(tmp_path)
    assert total > 20
    for count in range(total):
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(count))

        def work(count=count, directory=directory):
            FAIL_AT.count, FAIL_AT.action = count, die
            save(directory, NEW, keep=1)

        assert os.WTERMSIG(in_child(work)) == signal.SIGKILL
        assert_recovers(directory)


def test_disk_full_at_every_file_operation(tmp_path):
    total = num_events(tmp_path)
    for count in range(total):
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(count))
        FAIL_AT.count, FAIL_AT.action = count, disk_full
        try:
            save(directory, NEW, keep=1)
        except (StorageError, OSError) as error:  # OSError: from removing the old one, the new one being whole
            assert "No space left on device" in str(error)  # noqa: PT017 - cleaning up ignores it instead
        FAIL_AT.count = None
        assert_recovers(directory)


@pytest.mark.parametrize("limit", in_every_run([0, 7, 200, 1000], [0, 1, 7, 8, 100, 200, 300, 500, 700, 1000, 1200]))
@pytest.mark.parametrize("fate", ["killed", "rejected"])
def test_files_have_a_maximum_size(tmp_path, limit, fate):
    """The system itself stops a write in its middle: kills the process, or tells it that the file is too large."""
    save(tmp_path, OLD)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fate == "killed" else signal.SIG_IGN)
        try:
            save(tmp_path, NEW, keep=1)
        except StorageError as error:
            assert "File too large" in str(error)  # noqa: PT017 - runs in a child process
            assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
        else:
            raise AssertionError("the limit was not met")

    status = in_child(work)
    assert (os.WTERMSIG(status) == signal.SIGXFSZ) if fate == "killed" else (status == 0)
    assert_recovers(tmp_path)
