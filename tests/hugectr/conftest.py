# SPDX-License-Identifier: Apache-2.0
"""Planted and random data for the scripts of these tests, written once."""

import pytest

from tests.hugectr.planted import Planted, write_norm


@pytest.fixture(scope="session")
def planted(tmp_path_factory):
    """Training list, evaluation list, and the best AUC that can be reached on the latter."""
    directory = tmp_path_factory.mktemp("planted")
    valid = Planted(5_000, seed=1)
    return write_norm(directory / "train", Planted(20_000)), write_norm(directory / "valid", valid), valid.best_auc


@pytest.fixture(scope="session")
def random_labels(tmp_path_factory):
    """Training and evaluation lists whose labels follow from nothing."""
    directory = tmp_path_factory.mktemp("random")
    return (
        write_norm(directory / "train", Planted(20_000, is_random=True)),
        write_norm(directory / "valid", Planted(5_000, seed=1, is_random=True)),
    )
