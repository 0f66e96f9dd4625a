"""The public names are a promise: the exports of the packages equal the checked-in list, so no change is accidental.

After a wanted change: ``python -m tests.architecture.test_public_names > tests/architecture/public_names.txt``.
"""

import importlib
import inspect
from pathlib import Path

LIST = Path(__file__).with_name("public_names.txt")
ROOMS = [
    "",
    "batch",
    "checkpoint",
    "config",
    "data",
    "data.records",
    "data.synthetic",
    "embedding",
    "errors",
    "etl",
    "etl.engine",
    "etl.ready",
    "etl.workflow",
    "export",
    "formats",
    "formats.hugectr",
    "hugectr",
    "hugectr.data",
    "hugectr.optimizer",
    "kernels.contract",
    "kernels.hash_index",
    "kernels.registry",
    "kernels.row_rules",
    "kernels.rows",
    "metrics",
    "models",
    "nn",
    "ops",
    "optim",
    "recipes",
    "serve",
    "spec",
    "storage",
    "storage.rocksdb_store",
    "storage.row_file",
    "train",
]


def exported(room: str) -> list[str]:
    """Names of a package's ``__all__``, or the public classes and functions that a single-file room defines."""
    package = f"terarec.{room}".rstrip(".")
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        assert not hasattr(module, "__path__"), f"package {package} declares no __all__"
        defined = inspect.getmembers(module, lambda value: getattr(value, "__module__", "") == module.__name__)
        names = [name for name, _ in defined if not name.startswith("_")]
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"{package} exports names that it does not have: {missing}"
    return [f"{package}.{name}" for name in sorted(names)]


def all_exported() -> list[str]:
    return [name for room in ROOMS for name in exported(room)]


def test_public_names_equal_the_list() -> None:
    assert all_exported() == LIST.read_text().split()


if __name__ == "__main__":
    print("\n".join(all_exported()))
