# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import pytest

from terarec.spec import AdaGradSpec, AdamSpec, DLRMSpec, RunSpec, TrainingSpec
from tests.train.planted import make_planted


@pytest.fixture(scope="session")
def planted(tmp_path_factory) -> Path:
    """Return a data set of 1,000 train samples in groups of 100, and 300 valid ones."""
    directory = tmp_path_factory.mktemp("planted")
    make_planted(directory, train=1000, valid=300, rows_per_group=100)
    return directory


@pytest.fixture
def spec(planted) -> RunSpec:
    """DLRM, Adam, AdaGrad; 8 steps an epoch, the last of 104 samples."""
    return RunSpec(
        data=str(planted),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,)),
        dense_optimizer=AdamSpec(lr=0.01),
        sparse_optimizer=AdaGradSpec(lr=0.05),
        training=TrainingSpec(batch_size=128, epochs=2, seed=5),
    )
