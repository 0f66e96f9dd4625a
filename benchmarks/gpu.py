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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # a GPU machine may have the sources and no more

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is loaded

import torch  # noqa: E402
from record import Row, append_rows  # noqa: E402

_SECONDS = 420  # after which no further figure is taken


@dataclass(frozen=True, kw_only=True)
class GpuRow(Row):
    """A figure with the device and the versions that made it."""

    gpu: str
    triton: str
    cuda: str


def main() -> int:
    """Run all parts that there is time for; 1 if a kernel is wrong."""
    options = _options()
    start = time.monotonic()
    if not (torch.cuda.is_available() or options.interpret):
        print("no CUDA GPU is to be had here: nothing was measured")
        _keep([Row(case="no CUDA GPU was to be had", metric="devices", value=0, unit="devices")])
        return 0
    device = torch.device("cpu" if options.interpret else "cuda")
    if not _is_right(device, few=options.interpret):
        return 1
    for part in _parts(device, options):
        for row in part:
            _keep([row], dry=options.interpret)
            if time.monotonic() - start > _SECONDS:
                print(f"{_SECONDS} s are over: the remaining figures are left out")
                return 0
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="of float32 tables")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--hash-keys", type=int, default=10_000_000)
    parser.add_argument("--interpret", action="store_true", help="a tiny size on the CPU")
    options = parser.parse_args()
    if options.interpret:
        options.gigabytes, options.batch, options.hash_keys = 0.001, 3, 200
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


def _parts(device: torch.device, options: argparse.Namespace) -> Iterator[Iterator[Row]]:
    import gpu_tables

    copy = gpu_tables.copy_bandwidth(device, min(4.0, options.gigabytes))
    yield iter([Row(case="copy of 4 GB", metric="bytes moved", value=copy / 1e9, unit="GB/s")])
    tables = gpu_tables.make_tables(device, options.gigabytes, options.batch)
    yield gpu_tables.lookups(tables, device, copy)
    yield gpu_tables.updates(tables, device, copy)
    yield gpu_tables.hashes(device, options.hash_keys)
    yield _steps(tables, device)


def _steps(tables: "object", device: torch.device) -> Iterator[Row]:
    import gpu_dlrm
    from gpu_clock import seconds

    sides = gpu_dlrm.Sides(tables, device)
    has_graphs = device.type == "cuda"
    for is_bf16 in (False, True):
        name = "bf16" if is_bf16 else "fp32"
        peers = {"torch": sides.plain(is_bf16=is_bf16)}
        ours = {"": sides.terarec(is_bf16=is_bf16)}
        if has_graphs:
            peers["torch.compile"] = sides.plain(is_bf16=is_bf16, is_compiled=True)
            ours[", dense layers compiled"] = sides.terarec(is_bf16=is_bf16, is_compiled=True)
            ours[", CUDA graph"] = gpu_dlrm.captured(sides.terarec(is_bf16=is_bf16, is_checked=False))
            ours[", compiled, CUDA graph"] = gpu_dlrm.captured(
                sides.terarec(is_bf16=is_bf16, is_compiled=True, is_checked=False)
            )
        took = {peer: seconds(step, device, repeats=5) for peer, step in peers.items()}
        fastest = min(took, key=lambda peer: took[peer])
        for how, step in ours.items():
            yield Row(
                case=f"DLRM step {tables.layout.shape[0]} x {gpu_dlrm.WIDTH}, batch {tables.batch}, {name}{how}",
                metric="samples",
                value=tables.batch / seconds(step, device, repeats=5) / 1e6,
                unit="M samples/s",
                peer=f"nn.EmbeddingBag ({fastest})",
                peer_value=tables.batch / took[fastest] / 1e6,
            )


def _keep(rows: list[Row], *, dry: bool = False) -> None:
    """Append `rows` with what they ran on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    hardware = {"gpu": gpu, "triton": _version("triton"), "cuda": torch.version.cuda or "none"}
    append_rows("gpu", [GpuRow(**asdict(row), **hardware) for row in rows], dry=dry)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
