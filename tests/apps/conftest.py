# SPDX-License-Identifier: Apache-2.0
"""The run that the tests of serving train, for what is made from it."""

from tests.serve.conftest import graph_run, session, trained

__all__ = ["graph_run", "session", "trained"]
