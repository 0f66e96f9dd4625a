# SPDX-License-Identifier: Apache-2.0
"""The jobs of docs/scale-out.md: a shell and a parser of YAML read them, and their options exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = (ROOT / "tests" / "cli" / "options.txt").read_text().replace(" (required)", "").splitlines()


def example(language: str, text: str) -> str:
    """Return the one block of the page with a text."""
    page = (ROOT / "docs" / "scale-out.md").read_text()
    (found,) = (block for block in re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S) if text in block)
    return str(found)


def check_options(words: list[str]) -> None:
    command = words[words.index("terarec") + 1 :]
    wrong = [word for word in command if word.startswith("--") and f"terarec {command[0]} {word}" not in OPTIONS]
    assert not wrong


def test_the_job_of_slurm_is_a_script_whose_options_exist() -> None:
    script = example("sh", "#SBATCH")
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check_options(script.replace("\\\n", " ").split())


def test_the_pytorchjob_has_as_many_workers_as_its_policy_and_its_options_exist() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(example("yaml", "kind: PyTorchJob"))
    spec = job["spec"]
    workers = spec["pytorchReplicaSpecs"]["Worker"]
    policy = spec["elasticPolicy"]
    assert policy["minReplicas"] <= workers["replicas"] <= policy["maxReplicas"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # by which the operator finds it
    assert {held["name"] for held in container["volumeMounts"]} == {held["name"] for held in pod["volumes"]}
    check_options(container["command"])
