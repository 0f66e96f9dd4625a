# SPDX-License-Identifier: Apache-2.0
"""The public names are a promise: the exports of the packages equal the checked-in list, so no change is accidental.

A package promises the names of its ``__all__``; one without promises none, and other packages import from its modules.
After a wanted change: ``python -m tests.architecture.test_public_names > tests/architecture/public_names.txt``.
"""

import importlib
import inspect
from pathlib import Path

from tests.architecture.sources import all_nodes

LIST = Path(__file__).with_name("public_names.txt")
MODULES = ["apps.item_index", "apps.recommend", "batch", "errors", "hugectr.data", "hugectr.optimizer"]
"""Single modules whose names the documentation shows."""
WITH_TENSORFLOW = "tensorflow"
"""A package whose names import TensorFlow, which takes seconds; tests/tensorflow uses every one of them."""
MOST_NAMES = 400
"""Without HugeCTR's own and those of its plugin for TensorFlow, which its releases fix."""


def packages() -> list[str]:
    """Return the packages and single modules, "" for `terarec` itself."""
    files = [file for file in all_nodes() if file.endswith("__init__.py")]
    return sorted([file.removesuffix("__init__.py").rstrip("/").replace("/", ".") for file in files] + MODULES)


def exported(package: str) -> list[str]:
    """Return names of an ``__all__``, or the public classes and functions of a single module without one."""
    full_name = f"terarec.{package}".rstrip(".")
    module = importlib.import_module(full_name)
    names = getattr(module, "__all__", None)
    if names is None:
        if package not in MODULES:
            return []
        defined = inspect.getmembers(module, lambda value: getattr(value, "__module__", "") == module.__name__)
        names = [name for name, _ in defined if not name.startswith("_")]
    missing = [name for name in names if package != WITH_TENSORFLOW and not hasattr(module, name)]
    assert not missing, f"{full_name} exports names that it does not have: {missing}"
    return [f"{full_name}.{name}" for name in sorted(names)]


def all_exported() -> list[str]:
    return [name for package in packages() for name in exported(package)]


def test_public_names_equal_the_list() -> None:
    assert all_exported() == LIST.read_text().split()


def test_the_promise_stays_small() -> None:
    names = [name for name in all_exported() if not name.startswith(("terarec.hugectr.", "terarec.tensorflow."))]
    assert len(names) <= MOST_NAMES


if __name__ == "__main__":
    print("\n".join(all_exported()))
