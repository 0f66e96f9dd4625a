# SPDX-License-Identifier: Apache-2.0
"""Every error that a user can cause is a `TerarecError` and the builtin that fits it, and prints as one plain line."""

import pytest

from terarec import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.FormatError, ValueError),
        (errors.DataNotFoundError, FileNotFoundError),
        (errors.DataNotFoundError, errors.FormatError),
        (errors.StorageError, RuntimeError),
        (errors.KeyOutOfRangeError, IndexError),
        (errors.KernelError, RuntimeError),
        (errors.MissingDependencyError, ImportError),
    ],
)
def test_the_tree(error, builtin):
    caught = error("what was wrong")
    assert isinstance(caught, errors.TerarecError)
    assert isinstance(caught, builtin)
    assert str(caught) == "what was wrong"
