# SPDX-License-Identifier: Apache-2.0
"""Programs of the compiled core without Python, for another processor or with sanitizers."""

import subprocess
from collections import defaultdict
from pathlib import Path

CORE = Path(__file__).parents[2] / "csrc"
HERE = Path(__file__).parent
COMMON = sorted((CORE / "common").glob("*.cpp"))


def parts(folder, *binding_prefixes):
    """The sources of a module without those that need Python."""
    return [path for path in sorted((CORE / folder).glob("*.cpp")) if not path.name.startswith(binding_prefixes)]


EMBEDDING = [*parts("embedding", "bind", "torch_"), CORE / "embedding/isa/pair_dots.cpp"]
DATA = [*parts("encoding", "bind"), *parts("rowfile", "bind")]
OPTIONS = ("-std=gnu++17", "-O2", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi", f"-I{CORE}", f"-I{HERE}")
SETS = {"generic": ("kGenericKernels", 4, ()), "neon": ("kNeonKernels", 4, ("-DTERAREC_NEON",))}
"""Set -> constant, lanes and options, as csrc/embedding/CMakeLists.txt has them."""


def compile_set(compiler, folder, name, *flags):
    """An object file of one kernel set."""
    table, lanes, options = SETS[name]
    definitions = [f"-DTERAREC_SET={name}", f"-DTERAREC_TABLE={table}", f"-DTERAREC_LANES={lanes}"]
    compiled = folder / f"{name}.o"
    source = CORE / "embedding/isa/kernel_set.cpp"
    subprocess.run([compiler, *OPTIONS, *flags, *definitions, *options, "-c", source, "-o", compiled], check=True)
    return compiled


def link(compiler, program, sources, *flags):
    """The path of a program."""
    subprocess.run([compiler, *OPTIONS, *flags, *COMMON, *sources, "-pthread", "-ldl", "-o", program], check=True)
    return program


def digests(*command, **options):
    """Set -> case -> the digests that a program prints, one after another."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stderr[:5000]
    printed = defaultdict(lambda: defaultdict(list))
    for line in ended.stdout.splitlines():
        name, case, digest = line.split()
        printed[name][case].append(digest)
    return printed
