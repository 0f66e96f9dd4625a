# SPDX-License-Identifier: Apache-2.0
"""The loop of docs/scale-out.md on ranks: it runs as it stands there, and equals that of one process."""

import os
import re
from pathlib import Path

import torch

from terarec.checkpoint import complete_checkpoints, load
from tests.dist.launch import run_ranks
from tests.dist.test_training import data

__all__ = ["data"]  # a fixture
PAGE = Path(__file__).parents[2] / "docs" / "scale-out.md"


def program(epochs: int) -> str:
    """Return the program of the page, for a number of epochs."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert code.count("EPOCHS = 2\n") == code.count("join()") == 1
    # The ranks of a busy machine may start far apart.
    return str(code).replace("EPOCHS = 2\n", f"EPOCHS = {epochs}\n").replace("join()", "join(link_timeout=200.0)")


def run(rank: int, directory: Path, epochs: int) -> None:
    os.chdir(directory)
    exec(compile(program(epochs), str(PAGE), "exec"), {"__name__": "__main__"})


def rows(directory: Path) -> dict[str, torch.Tensor]:
    files = load(complete_checkpoints(directory / "checkpoints")[-1]).table_files()
    found = {}
    for name in files.names:
        parts = list(files.rows(name))
        keys = torch.cat([part.keys for part in parts])
        found[name] = torch.cat([part.weights for part in parts])[keys.argsort()]
    return found


def test_the_loop_of_the_page_runs_continues_and_equals_one_process(data: Path, tmp_path: Path) -> None:
    """Finding L10."""
    # Two ranks, then three that continue from their checkpoint; and one process for all epochs.
    for name, launches in (("ranks", ((2, 1), (3, 2))), ("one", ((1, 2),))):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "data").symlink_to(data)
        for size, epochs in launches:
            assert run_ranks(size, run, directory, epochs, joins=False) == [None] * size
    found, expected = rows(tmp_path / "ranks"), rows(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert len(complete_checkpoints(tmp_path / "ranks" / "checkpoints")) == 2
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-3, atol=1e-5)
