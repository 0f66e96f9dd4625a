# SPDX-License-Identifier: Apache-2.0
"""The release that scripts get where releases differ: the selected one, or the newest that has a call."""

import pytest

import terarec.hugectr as hugectr
from terarec.errors import ConfigError
from terarec.hugectr.release import release_of


def test_a_call_behaves_as_in_the_newest_release_that_has_it(monkeypatch):
    monkeypatch.delenv("TERAREC_HUGECTR_RELEASE", raising=False)
    assert release_of() == (25, 3)
    assert release_of(until="24.06") == (24, 6)
    assert hugectr.CreateSolver().compat_release == "25.03"


@pytest.mark.parametrize(("selected", "expected"), [("2.3", (3, 5)), ("4.1", (4, 1)), ("25.03", (24, 6))])
def test_the_selected_release_counts_within_those_that_have_the_call(selected, expected, monkeypatch):
    monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", selected)
    assert release_of("3.5", "24.06") == expected


def test_the_variable_selects_the_release_of_solvers(monkeypatch):
    """Finding M12: notebooks and child processes have no ``--compat-release``."""
    monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", "2.3")
    assert hugectr.CreateSolver().compat_release == "2.3"
    assert hugectr.CreateSolver(compat_release="3.1").compat_release == "3.1"
    assert hugectr.solver_parser_helper().batchsize == 16384


def test_an_unknown_release_is_reported(monkeypatch):
    monkeypatch.setenv("TERAREC_HUGECTR_RELEASE", "3.14")
    with pytest.raises(ConfigError) as caught:
        hugectr.CreateSolver()
    assert caught.value.where == "TERAREC_HUGECTR_RELEASE"
