# SPDX-License-Identifier: Apache-2.0
"""Registries: one entry a name, errors with the nearest name."""

import pytest

from terarec.errors import ConfigError
from terarec.spec.registry import Registry, unknown_name
from tests.errors import at


def test_entries_are_listed_in_their_order() -> None:
    registry = Registry("fruit", {"pear": 2, "apple": 1})
    registry.add("fig", 3)
    assert dict(registry) == {"pear": 2, "apple": 1, "fig": 3}
    assert list(registry) == ["pear", "apple", "fig"]
    assert len(registry) == 3
    assert registry.find("apple") == 1


def test_a_second_entry_of_a_name_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("fruit 'pear'")):
        Registry("fruit", [("pear", 1), ("pear", 2)])


def test_a_decorator_registers_functions_and_classes() -> None:
    registry: Registry[object] = Registry("thing")

    @registry.register()
    def _called() -> None: ...

    @registry.register("named")
    class Named: ...

    assert dict(registry) == {"called": _called, "named": Named}
    again = type("Named", (), {"__module__": Named.__module__, "__qualname__": Named.__qualname__})
    registry.add("named", again)  # as when a module is reloaded
    assert registry["named"] is again
    with pytest.raises(ConfigError, check=at("thing 'called'")):

        @registry.register("called")
        class Other: ...


def test_unknown_names_suggest_the_nearest() -> None:
    registry = Registry("fruit", {"pear": 1, "apple": 2})
    with pytest.raises(ConfigError, check=at("basket.fruit")):
        registry.find("aple", "basket.fruit")
    with pytest.raises(ConfigError, check=at("fruit")):
        registry.find("x", listed=["pear@K", "apple"])
    assert str(unknown_name("fruit", "q" * 100, registry)).startswith(f"fruit: got '{'q' * 55}...")
