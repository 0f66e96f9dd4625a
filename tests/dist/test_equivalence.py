# SPDX-License-Identifier: Apache-2.0
"""Tables on several ranks equal those of one process, whatever the placement: the cells of `tests.dist.matrix`."""

from itertools import product

import pytest

from tests.dist.matrix import (
    FEW_STEPS,
    MODES,
    NAMES,
    OPTIMIZERS,
    PLACEMENTS,
    SIZES,
    STEPS,
    TOLERANCES,
    Case,
    cases,
    chosen_cases,
    rejection,
    run,
)


def check(todo: list[Case], steps: int) -> None:
    wrong = []
    for case, found in run(todo, steps).items():
        assert set(found) == {*NAMES, "layer"}
        for name, value in found.items():
            is_right = isinstance(value, str) if rejection(case) else not isinstance(value, str)
            if isinstance(value, float):
                is_right &= value <= TOLERANCES[case.mode]
            if not is_right:
                wrong.append(f"{case}, {name}: {value}")
    assert not wrong, "\n".join(wrong[:40])


def test_the_chosen_cells_hold_every_placement_optimizer_size_and_mode() -> None:
    chosen = chosen_cases()
    assert {case.optimizer for case in chosen} == set(OPTIMIZERS)
    assert {(case.placement, case.mode == MODES[0]) for case in chosen} == set(product(PLACEMENTS, (True, False)))
    assert {case.mode for case in chosen} == set(MODES)
    assert {case.size for case in chosen} == set(SIZES)


def test_tables_on_several_ranks_equal_those_of_one_process() -> None:
    check(chosen_cases(), FEW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_whole_matrix(mode: str) -> None:
    check([case for case in cases() if case.mode == mode], STEPS)
