"""The public names are a promise: the exports of the packages equal the checked-in list, so no change is accidental.

After a wanted change: ``python -m tests.architecture.test_public_names > tests/architecture/public_names.txt``.
"""

import importlib
import inspect
from pathlib import Path

LIST = Path(__file__).with_name("public_names.txt")
PACKAGES = [
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


def exported(package: str) -> list[str]:
    """Return names of a package's ``__all__``, or the public classes and functions of a package in a single file."""
    full_name = f"terarec.{package}".rstrip(".")
    module = importlib.import_module(full_name)
    names = getattr(module, "__all__", None)
    if names is None:
        assert not hasattr(module, "__path__"), f"package {full_name} declares no __all__"
        defined = inspect.getmembers(module, lambda value: getattr(value, "__module__", "") == module.__name__)
        names = [name for name, _ in defined if not name.startswith("_")]
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"{full_name} exports names that it does not have: {missing}"
    return [f"{full_name}.{name}" for name in sorted(names)]


def all_exported() -> list[str]:
    return [name for package in PACKAGES for name in exported(package)]


def test_public_names_equal_the_list() -> None:
    assert all_exported() == LIST.read_text().split()


if __name__ == "__main__":
    print("\n".join(all_exported()))
