# SPDX-License-Identifier: Apache-2.0
"""Tables on ranks whose exchange is on a device: cells of `tests.dist.device_matrix`."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from tests.dist.device_matrix import IN_TIERS, TABLES, pieces, quick_cases, run, tiered_cases
from tests.dist.matrix import FEW_STEPS, MODES, OPTIMIZERS, PLACEMENTS, SIZES, Case, cases, rejection
from tests.processes import run_new_python
from tests.simulated_device.device import build, missing_to_build

MODES_TRIED = ("fp32", "bf16 wire", "pooled there", "deterministic", "pooled there", "fp32")
"""Mode of each placement where keys are sorted in host memory."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled simulated device; skip the test where it cannot be compiled."""
    if reason := missing_to_build():
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("simulated_device"))


def test_the_quick_cells_hold_every_placement_optimizer_size_and_mode() -> None:
    chosen = quick_cases()
    assert len(set(chosen)) * len(TABLES) >= 200
    assert {case.optimizer for case in chosen} == set(OPTIMIZERS)
    assert {case.size for case in chosen} == set(SIZES)
    allowed = product(PLACEMENTS, MODES)
    assert {(case.placement, case.mode) for case in chosen} == {
        pair for pair in allowed if not rejection(Case(size=2, placement=pair[0], optimizer="SGD", mode=pair[1]))
    }


def test_the_pieces_of_the_matrix_hold_every_run_once() -> None:
    made = pieces(list(cases()), is_quick=False)
    held = Counter(case for piece in made for case in piece)
    assert held == Counter(cases())
    assert max(map(len, made)) <= len(OPTIMIZERS)
    assert len(pieces(quick_cases(), is_quick=True)) == 1
    assert pieces([], is_quick=True) == []


def test_sorted_keys_train_as_hashed_ones() -> None:
    todo = [
        Case(size=2, placement=placement, optimizer="Adam", mode=mode)
        for placement, mode in zip(PLACEMENTS, MODES_TRIED, strict=True)
    ]
    assert {case.mode for case in todo} == set(MODES)
    assert not any(map(rejection, todo))
    summary, _ = run(todo, FEW_STEPS, "cpu")
    assert summary.failed == []
    assert (summary.cells, summary.missing) == (len(todo) * len(TABLES), 0)


IMPORTS = """
import torch
asked = []
torch.cuda._is_compiled, torch.version.cuda = lambda: True, "13.0"
torch.cuda.is_available = torch.cuda.device_count = lambda: asked.append("the driver") or 1
import tests.dist.device_matrix
assert not asked
"""


@pytest.mark.slow
def test_a_gpu_is_not_asked_for_before_ranks_are_forked() -> None:
    """Which then could not use it; of CUDA's home torch does ask when it knows one."""
    ended = run_new_python(IMPORTS, environment={"CUDA_HOME": "/usr", "PYTHONPATH": str(Path(__file__).parents[2])})
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shares_device", [False, True], ids=["direct", "through host memory"])
def test_the_simulated_device_trains_as_one_process_and_waits_once_in_a_step(
    library: Path, shares_device: bool
) -> None:
    todo = quick_cases()
    summary, _ = run(todo, FEW_STEPS, library, shares_device=shares_device)
    assert summary.failed == []
    assert (summary.cells, summary.missing) == (len(todo) * len(TABLES), 0)
    if not shares_device:
        assert summary.copies_per_step == 1


@pytest.mark.slow
def test_tables_whose_fast_tier_is_on_the_simulated_device_train_as_one_process(library: Path) -> None:
    todo = tiered_cases()
    assert {case.placement for case in todo} == set(PLACEMENTS)
    assert not any(map(rejection, todo))
    summary, _ = run(todo, FEW_STEPS, library, tables=IN_TIERS)
    assert summary.failed == []
    assert (summary.cells, summary.missing) == (len(todo) * len(IN_TIERS), 0)
