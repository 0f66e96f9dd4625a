# SPDX-License-Identifier: Apache-2.0
"""terarec on a GPU: first whether it is right, then how fast `Trainer` and the kernels are. It takes 8 minutes.

It needs no network: torch with Triton, NumPy, PyArrow (and safetensors for checkpoints) and the compiled core, which
``cmake -S . -B build/core -G Ninja -DPython_EXECUTABLE=$(which python3) && ninja -C build/core`` puts in its place.
``--parts`` selects some of the parts, of which "ranks" trains on 1, 2, 4, ... GPUs (`gpu_ranks`), ``--match`` some of
the checks by words of their names, such as "dlrm". Where a result is wrong, figures are printed and not recorded.
A run that was cut off goes on where it ended when it is started again: what was right or measured by these sources on
this GPU is in ``build/gpu_progress.json``; ``--again`` does it all again. ``--interpret`` runs the parts at a tiny size
on the CPU, to try the script, and ``--simulated`` those of ranks on the device of `tests.simulated_device`; they record
nothing either. Without a CUDA device and without these the results get a row that says so.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # terarec need not be installed

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is loaded
    os.environ["TERAREC_KERNELS"] = "triton"

import torch  # noqa: E402
from record import Row, append_rows  # noqa: E402

from terarec.dist.joining import code_digest  # noqa: E402
from terarec.io.files import write_json  # noqa: E402

_PARTS = ("checks", "training", "tables", "index")
_ALL_PARTS = (*_PARTS, "ranks")
_NEED_SAFETENSORS = ("runs", "checkpoints", "hugectr", "sessions")  # kinds of checks with checkpoints
_MOST_OF_MEMORY = 0.3  # that tables take


@dataclass(frozen=True, kw_only=True)
class GpuRow(Row):
    """A figure with the device and the versions that made it."""

    gpu: str
    triton: str
    cuda: str


def main() -> int:
    """Run the selected parts that there is time for; 1 if a check is wrong or a part fails."""
    options = _options()
    start = time.monotonic()
    is_dry = options.interpret or options.simulated
    if not (torch.cuda.is_available() or is_dry):
        _keep([Row(case="nothing was measured: no CUDA GPU was to be had", metric="GPUs", value=0, unit="devices")])
        return 0
    device, library = torch.device("cpu" if is_dry else "cuda"), None
    if options.simulated:
        from tests.simulated_device import device as simulated

        library = simulated.build(simulated.BUILT)
    progress = _Progress(options.progress, device, again=options.again)
    failed = _count_wrong(device, options, progress) if "checks" in options.parts else 0
    is_dry |= failed > 0
    for name, rows in _figures(device, options, library):
        if progress.has(name):
            print(f"measured before: {name}")
            continue
        try:
            for row in rows:
                _keep([row], dry=is_dry)
                if time.monotonic() - start > options.seconds:
                    print(f"{options.seconds} s are over: the remaining figures are left out")
                    return int(failed > 0)
            progress.add(name)
        except Exception as error:  # another part may work: this runs where nobody can try again soon
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-3)
    return int(failed > 0)


class _Progress:
    """Names of checks that were right and of figures that were measured by these sources on this device.

    Args:
        path: File of them; None to keep none.
        device: The device.
        again: Whether to forget them.
    """

    def __init__(self, path: Path | None, device: torch.device, *, again: bool) -> None:
        self._path = path
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        self._held: dict[str, object] = {"code": code_digest(), "gpu": gpu}
        self._done: list[str] = []
        if path is not None and path.exists() and not again:
            held = json.loads(path.read_text())
            if all(held.get(name) == value for name, value in self._held.items()):
                self._done = held["done"]

    def has(self, name: str) -> bool:
        """Return whether a former run has done it."""
        return name in self._done

    def add(self, name: str) -> None:
        """Note that it is done."""
        self._done.append(name)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._held | {"done": self._done})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of float32 tables")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--batches", type=int, default=64, help="of an epoch")
    parser.add_argument("--threads", type=int, default=4, help="of the reader")
    parser.add_argument("--hash-keys", type=int, default=10_000_000)
    parser.add_argument("--parts", nargs="+", choices=_ALL_PARTS, default=_PARTS, help="all but ranks unless given")
    parser.add_argument("--match", nargs="+", metavar="WORD", help="only checks whose names have one of the words")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no further check or figure begins")
    parser.add_argument("--interpret", action="store_true", help="a tiny size on the CPU")
    parser.add_argument("--simulated", action="store_true", help="ranks at a tiny size on the simulated device")
    parser.add_argument("--again", action="store_true", help="do again what a former run has done")
    parser.add_argument("--progress", type=Path, help="file of what is done; build/gpu_progress.json on a GPU")
    options = parser.parse_args()
    if options.progress is None and not (options.interpret or options.simulated):
        options.progress = ROOT / "build" / "gpu_progress.json"
    if options.simulated:
        options.parts = ["ranks"]
    if options.interpret or options.simulated:
        options.gigabytes, options.batch, options.batches, options.hash_keys = 0.001, 3, 2, 200
    elif torch.cuda.is_available():  # AdaGrad's state takes as much again, and batches and their results the rest
        options.gigabytes = min(options.gigabytes, _MOST_OF_MEMORY * torch.cuda.mem_get_info()[0] / 1e9)
    return options


def _count_wrong(device: torch.device, options: argparse.Namespace, progress: _Progress) -> int:
    """Return how many checks do not hold on `device`; without a word to match, `--interpret` tries one of each kind."""
    from tests.device_cases import MODULES, cases_of

    kinds = dict.fromkeys(MODULES)
    if importlib.util.find_spec("safetensors") is None:
        print("left out: whole runs, whose checkpoints need safetensors, which is not installed")
        for kind in _NEED_SAFETENSORS:
            kinds.pop(kind, None)
    wrong, tried, start = 0, 0, time.monotonic()
    for kind in kinds:
        try:
            cases = cases_of(kind)
        except Exception as error:  # a package that is not installed here spoils its own cases alone
            wrong += _report_wrong(f"all checks of {kind}", error)
            continue
        chosen = {f"{kind}: {name}": holds for name, holds in cases.items()}
        found = [(name, holds) for name, holds in chosen.items() if any(word in name for word in options.match or [""])]
        for name, holds in islice(found, 1 if options.interpret and not options.match else None):
            if time.monotonic() - start > options.seconds:
                print(f"{options.seconds} s are over: the remaining checks of {kind} are left out", flush=True)
                break
            if progress.has(name):
                continue
            tried += 1
            if _is_wrong(name, holds, device):
                wrong += 1
            else:
                progress.add(name)
    print(f"{tried} checks, {wrong} wrong", flush=True)
    return wrong


def _is_wrong(name: str, holds: Callable[[torch.device], None], device: torch.device) -> bool:
    """Try one check and say whether it is wrong."""
    begin = time.monotonic()
    try:
        holds(device)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what a compiler or pytest raises leaves the other checks to try
        return _report_wrong(name, error)
    print(f"right {name} ({time.monotonic() - begin:.1f} s)", flush=True)
    return False


def _report_wrong(name: str, error: BaseException) -> bool:
    """Print the end of a check's error, and return True."""
    print(f"WRONG {name}: {type(error).__name__}: {error}", flush=True)
    traceback.print_exception(error, limit=-4)
    return True


def _figures(
    device: torch.device, options: argparse.Namespace, library: Path | None
) -> Iterator[tuple[str, Iterator[Row]]]:
    """Yield the selected figures, by the name of what they measure."""
    if not set(options.parts) - {"checks"}:
        return
    if "ranks" in options.parts:
        import gpu_ranks

        for scaling in gpu_ranks.scalings(device, options.batch, library):
            yield scaling.name, scaling.rows()
    if not set(options.parts) - {"checks", "ranks"}:
        return
    import gpu_tables
    import gpu_training

    gigabytes = min(4.0, options.gigabytes)
    copy = gpu_tables.copy_bandwidth(device, gigabytes)
    copied = Row(case=f"copy of {gigabytes:.3g} GB", metric="bytes moved", value=copy / 1e9, unit="GB/s")
    yield "copy", iter([copied])
    if "tables" in options.parts:
        tables = gpu_tables.make_tables(device, options.gigabytes, options.batch)
        yield "lookups", gpu_tables.lookups(tables, device, copy)
        yield "updates", gpu_tables.updates(tables, device, copy)
        del tables
    if "index" in options.parts:
        yield "hash index", gpu_tables.hashes(device, options.hash_keys)
    if "training" in options.parts:
        samples = gpu_training.make_samples(options.gigabytes, options.batch * options.batches)
        yield "steps of Trainer, bf16", gpu_training.steps(samples, device, options.batch, "bf16", copy)
        yield "Trainer.fit, bf16", gpu_training.fits(samples, device, options.batch, "bf16", options.threads)
        yield "steps of Trainer, fp32", gpu_training.steps(samples, device, options.batch, "fp32", copy)


def _keep(rows: list[Row], *, dry: bool = False) -> None:
    """Append `rows` with what they ran on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    runtime = torch.version.cuda or torch.version.hip or "none"
    hardware = {"gpu": gpu, "triton": _version("triton"), "cuda": runtime}
    append_rows("gpu", [GpuRow(**asdict(row), **hardware) for row in rows], dry=dry)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
