# SPDX-License-Identifier: Apache-2.0
"""What the exporters silence, and what not."""

import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from terarec.export.files import quiet
from tests.waiting import PATIENCE


def test_quiet_silences_its_own_thread_alone_and_leaves_the_process_as_it_was(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def export(name: str) -> None:
        with quiet():
            logging.getLogger(f"exporter.{name}").error("of an exporter")
            print("a graph", file=sys.stderr)
            begun.set()
            assert may_end.wait(PATIENCE)

    former = sys.stderr, list(warnings.filters), logging.root.manager.disable
    with ThreadPoolExecutor(2) as threads:
        exports = [threads.submit(export, name) for name in ("first", "second")]  # which overlap
        assert begun.wait(PATIENCE)
        logging.getLogger("terarec.serve").error("of a request")
        print("of the server", file=sys.stderr)
        may_end.set()
        for each in exports:
            each.result(PATIENCE)
    assert [record.getMessage() for record in caplog.records] == ["of a request"]
    assert capsys.readouterr().err == "of the server\n"
    assert (sys.stderr, list(warnings.filters), logging.root.manager.disable) == former
