"""Triton kernels on a GPU: first whether they are right, then how fast they are. Needs no network and 8 minutes.

``--interpret`` runs every part at a tiny size on the CPU, to try the script; it records nothing. Without a CUDA device
and without ``--interpret`` the results get a row that says so.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gpu_tables

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # a GPU machine may have the sources and no more

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is loaded

import torch  # noqa: E402
from record import Row, append_rows  # noqa: E402

_SECONDS = 420  # after which no further figure is taken
_MOST_OF_MEMORY = 0.3  # that tables take


@dataclass(frozen=True, kw_only=True)
class GpuRow(Row):
    """A figure with the device and the versions that made it."""

    gpu: str
    triton: str
    cuda: str


def main() -> int:
    """Run all parts that there is time for; 1 if a kernel is wrong or a part fails."""
    options = _options()
    start = time.monotonic()
    if not (torch.cuda.is_available() or options.interpret):
        _keep([Row(case="nothing was measured: no CUDA GPU was to be had", metric="GPUs", value=0, unit="devices")])
        return 0
    device = torch.device("cpu" if options.interpret else "cuda")
    if not _is_right(device, few=options.interpret):
        return 1
    failed = 0
    for name, rows in _parts(device, options):
        try:
            for row in rows:
                _keep([row], dry=options.interpret)
                if time.monotonic() - start > _SECONDS:
                    print(f"{_SECONDS} s are over: the remaining figures are left out")
                    return int(failed > 0)
        except Exception as error:  # another part may work: this runs where nobody can try again soon
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
    return int(failed > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of float32 tables")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--hash-keys", type=int, default=10_000_000)
    parser.add_argument("--interpret", action="store_true", help="a tiny size on the CPU")
    options = parser.parse_args()
    if options.interpret:
        options.gigabytes, options.batch, options.hash_keys = 0.001, 3, 200
    elif torch.cuda.is_available():  # AdaGrad's state takes as much again, and batches and their results the rest
        options.gigabytes = min(options.gigabytes, _MOST_OF_MEMORY * torch.cuda.mem_get_info()[0] / 1e9)
    return options


def _is_right(device: torch.device, *, few: bool) -> bool:
    """Whether every case of the Triton tests, and of graphs, holds on `device`; two of each where `few` will do."""
    from tests.kernels.triton_cases import CASES as KERNELS
    from tests.train.graph_cases import CASES as GRAPHS

    most = 2 if few else None
    cases = {**dict(list(KERNELS.items())[:most]), **dict(list(GRAPHS.items())[:most])}
    wrong = 0
    for name, holds in cases.items():
        begin = time.monotonic()
        try:
            holds(device)
        except Exception as error:  # a compiler's failure counts as a wrong kernel, and the others are still tried
            wrong += 1
            print(f"WRONG {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"right {name} ({time.monotonic() - begin:.1f} s)", flush=True)
    return wrong == 0


def _parts(device: torch.device, options: argparse.Namespace) -> Iterator[tuple[str, Iterator[Row]]]:
    import gpu_tables

    gigabytes = min(4.0, options.gigabytes)
    copy = gpu_tables.copy_bandwidth(device, gigabytes)
    copied = Row(case=f"copy of {gigabytes:.3g} GB", metric="bytes moved", value=copy / 1e9, unit="GB/s")
    yield "copy", iter([copied])
    tables = gpu_tables.make_tables(device, options.gigabytes, options.batch)
    yield "lookups", gpu_tables.lookups(tables, device, copy)
    yield "updates", gpu_tables.updates(tables, device, copy)
    yield "hash index", gpu_tables.hashes(device, options.hash_keys)
    for is_bf16 in (False, True):
        yield f"DLRM steps, {_precision(is_bf16)}", _steps(tables, device, is_bf16)


def _steps(tables: "gpu_tables.Tables", device: torch.device, is_bf16: bool) -> Iterator[Row]:
    """Whole steps, ours and torch's. Each is made, timed and dropped before the next: graphs hold memory."""
    import gpu_dlrm
    from gpu_clock import seconds

    sides = gpu_dlrm.Sides(tables, device, is_bf16=is_bf16)
    on_gpu = device.type == "cuda"
    took = {how: seconds(make(), device, repeats=5) for how, make in sides.torchs(on_gpu).items()}
    fastest = min(took, key=lambda how: took[how])
    for how, make in sides.ours(on_gpu).items():
        yield Row(
            case=f"DLRM step {tables.size}, batch {tables.batch}, {_precision(is_bf16)}{how}",
            metric="samples",
            value=tables.batch / seconds(make(), device, repeats=5) / 1e6,
            unit="M samples/s",
            peer=f"nn.EmbeddingBag ({fastest})",
            peer_value=tables.batch / took[fastest] / 1e6,
        )


def _precision(is_bf16: bool) -> str:
    return "bf16" if is_bf16 else "fp32"


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
