"""The names of the files of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileNames:
    """The files that ``save_params_to_files(prefix, iteration)`` writes."""

    prefix: str
    iteration: int

    @property
    def dense(self) -> Path:
        """Weights of the layers."""
        return Path(f"{self.prefix}_dense_{self.iteration}.model")

    @property
    def dense_states(self) -> Path:
        """Optimizer states of the layers."""
        return Path(f"{self.prefix}_opt_dense_{self.iteration}.model")

    def sparse(self, number: int) -> Path:
        """Rows of the embedding `number`."""
        return Path(f"{self.prefix}{number}_sparse_{self.iteration}.model")

    def sparse_states(self, number: int) -> Path:
        """Optimizer states of the embedding `number`."""
        return Path(f"{self.prefix}{number}_opt_sparse_{self.iteration}.model")


def is_single_file(release: str) -> bool:
    """Whether `release`, such as "3.0", keeps an embedding in one file; from 3.1 on it is a folder."""
    major, minor = (int(part) for part in release.split("."))
    return (major, minor) <= (3, 0)
