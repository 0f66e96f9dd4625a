"""The names of the files of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.formats import folder_and_name


@dataclass(frozen=True, slots=True)
class FileNames:
    """The files that ``save_params_to_files(prefix, iteration)`` writes; `prefix` is of a path or a URL."""

    prefix: str
    iteration: int

    @property
    def folder(self) -> str:
        """Where the files are."""
        return folder_and_name(self.prefix)[0]

    @property
    def dense(self) -> str:
        """Weights of the layers."""
        return f"{self._stem}_dense_{self.iteration}.model"

    @property
    def dense_states(self) -> str:
        """Optimizer states of the layers."""
        return f"{self._stem}_opt_dense_{self.iteration}.model"

    def sparse(self, number: int) -> str:
        """Rows of the embedding `number`."""
        return f"{self._stem}{number}_sparse_{self.iteration}.model"

    def sparse_states(self, number: int) -> str:
        """Optimizer states of the embedding `number`."""
        return f"{self._stem}{number}_opt_sparse_{self.iteration}.model"

    @property
    def _stem(self) -> str:
        return folder_and_name(self.prefix)[1]


def is_single_file(release: str) -> bool:
    """Whether `release`, such as "3.0", keeps an embedding in one file; from 3.1 on it is a folder."""
    major, minor = (int(part) for part in release.split("."))
    return (major, minor) <= (3, 0)
