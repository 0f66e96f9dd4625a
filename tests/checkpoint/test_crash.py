# SPDX-License-Identifier: Apache-2.0
"""A save that dies or fails at any point leaves the checkpoint before it whole, and a later save succeeds."""

import errno
import functools
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

state = functools.cache(make_state)
OLD, NEW, FOLLOWING = 5, 6, 7
"""Steps of a `state`."""
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class FailAt:
    """An audit hook that calls `action` at the `count`-th event. It cannot be removed: for processes that end."""

    def __init__(self, count, action):
        self.count = count
        self.action = action
        sys.addaudithook(self)

    def __call__(self, event, _arguments):
        if self.count is None or event not in EVENTS:
            return
        self.count -= 1
        if self.count < 0:
            self.count = None
            self.action()


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work) -> int:
    """Run `work` in a forked process; its exit status. NumPy and file calls only: torch's threads are not there.

    Where `work` returns a number, it is the code with which the process ends.
    """
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def assert_recovers(directory):
    """The old checkpoint is whole, or the new one has just replaced it as the latest; the next save works."""
    found = load(latest(directory))
    assert found.step in (OLD, NEW)
    assert_holds(found, state(found.step))
    assert_holds(load(save(directory, state(FOLLOWING), keep=1)), state(FOLLOWING))
    assert [path.name for path in directory.iterdir()] == ["step-00000007"]


def num_events(tmp_path):
    """How many events a save has after another."""
    save(tmp_path / "old", state(OLD))
    # Once before, since the first one imports modules.
    save(shutil.copytree(tmp_path / "old", tmp_path / "first"), state(NEW), keep=1)
    dry = shutil.copytree(tmp_path / "old", tmp_path / "dry")

    def work():
        hook = FailAt(200, die)
        save(dry, state(NEW), keep=1)
        return 200 - hook.count

    return os.waitstatus_to_exitcode(in_child(work))


def test_killed_at_every_file_operation(tmp_path):
    total = num_events(tmp_path)
    assert 20 < total < 200
    for count in range(total):
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(count))

        def work(count=count, directory=directory):
            FailAt(count, die)
            save(directory, state(NEW), keep=1)

        assert os.WTERMSIG(in_child(work)) == signal.SIGKILL
        assert_recovers(directory)


def test_disk_full_at_every_file_operation(tmp_path):
    total = num_events(tmp_path)
    for count in range(total):
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(count))

        def work(count=count, directory=directory):
            FailAt(count, disk_full)
            try:
                save(directory, state(NEW), keep=1)
            except (StorageError, OSError) as error:  # OSError: from removing the old one, the new one being whole
                assert "No space left on device" in str(error)  # noqa: PT017 - cleaning up ignores it instead

        assert in_child(work) == 0
        assert_recovers(directory)


@pytest.mark.parametrize("limit", in_every_run([0, 7, 200, 1000], [0, 1, 7, 8, 100, 200, 300, 500, 700, 1000, 1200]))
@pytest.mark.parametrize("fate", ["killed", "rejected"])
def test_files_have_a_maximum_size(tmp_path, limit, fate):
    """The system itself stops a write in its middle: kills the process, or tells it that the file is too large."""
    save(tmp_path, state(OLD))
    state(NEW)  # which a forked process would make again

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fate == "killed" else signal.SIG_IGN)
        try:
            save(tmp_path, state(NEW), keep=1)
        except StorageError as error:
            assert "File too large" in str(error)  # noqa: PT017 - runs in a child process
            assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
        else:
            raise AssertionError("the limit was not met")

    status = in_child(work)
    assert (os.WTERMSIG(status) == signal.SIGXFSZ) if fate == "killed" else (status == 0)
    assert_recovers(tmp_path)
