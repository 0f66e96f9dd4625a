# SPDX-License-Identifier: Apache-2.0
"""Finding M12: children of a script, notebooks and other processes of this Python find ``hugectr``."""

import subprocess
import sys
import sysconfig

import pytest

from terarec.errors import ConfigError
from terarec.hugectr.alias import MODULES, alias_file, install_alias, remove_alias
from terarec.hugectr.command_line import REPLACEMENTS
from tests.processes import run_python

SPAWNING = """
import multiprocessing, subprocess, sys
import hugectr

def show():
    print(hugectr.__name__, hugectr.CreateSolver().compat_release, flush=True)

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=show)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "from hugectr2onnx.converter import convert; print(convert.__module__)"])
"""


@pytest.mark.slow
def test_children_of_every_kind_find_the_modules_and_the_release(tmp_path):
    """Finding M12."""
    (tmp_path / "train.py").write_text(SPAWNING)
    command = [sys.executable, "-m", "terarec.hugectr", "--compat-release", "4.1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    lines = ["terarec.hugectr 4.1", "terarec.hugectr 4.1", "terarec.hugectr.hugectr2onnx"]
    assert (done.stdout.splitlines(), done.stderr) == (lines, "")


def test_a_script_leaves_a_search_path_for_its_children(tmp_path):
    """Finding M12: spawned processes get ``sys.path``, others the variable."""
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(sys.path[1], os.environ['PYTHONPATH'], os.environ['TERAREC_HUGECTR_RELEASE'], sep='\\n')"
    )
    options = ("--compat-release", "4.1", "train.py")
    done = run_python("terarec.hugectr", *options, cwd=tmp_path, environment={"PYTHONPATH": "/x"}, is_module=True)
    assert done.stdout.splitlines() == [str(MODULES), f"{MODULES}:/x", "4.1"]


def test_a_search_path_with_the_modules_leads_to_terarec():
    """Finding M12."""
    imports = "import hugectr2onnx.converter, hugectr; print(hugectr.__name__)"
    code = f"import sys; sys.path.append({str(MODULES)!r}); {imports}"
    assert run_python(code).stdout == "terarec.hugectr\n"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages in place of this Python's."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_alias_is_one_file_that_is_removed_again(packages):
    path = install_alias()
    assert install_alias() == path == alias_file()
    folders = f"import site, sys; site.addsitedir({str(packages)!r}); print(sys.path[-1])"
    assert run_python(folders).stdout == f"{MODULES}\n"
    assert remove_alias() == path
    assert not path.exists()
    with pytest.raises(ConfigError, match="does not exist"):
        remove_alias()


def test_a_file_or_a_package_of_somebody_else_stays(packages, monkeypatch):
    alias_file().write_text("/elsewhere\n")
    for change in (install_alias, remove_alias):
        with pytest.raises(ConfigError, match="was not written by"):
            change()
    assert alias_file().read_text() == "/elsewhere\n"
    alias_file().unlink()
    (packages / "hugectr.py").write_text("")
    monkeypatch.syspath_prepend(packages)
    with pytest.raises(ConfigError, match="another package is installed"):
        install_alias()


def test_the_modules_are_those_of_the_packages_that_scripts_import():
    packages = {name.partition(".")[0] for name in REPLACEMENTS} | {"hierarchical_parameter_server"}
    assert {path.stem for path in MODULES.glob("*.py")} == packages
