"""The random-row bandwidth of this machine: compiles and runs ``row_bandwidth.cpp``."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("row_bandwidth.cpp")


def row_bandwidth(table_gib: float = 4.0, repeats: int = 3) -> dict[str, float]:
    """Bytes of rows per second of each kind of access.

    Returns:
        ``{gather,modify}_{512,256}_bytes_{T}_threads`` -> rate, for T = 1 and all cores.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "row_bandwidth"
        flags = ["-O3", "-std=c++17", "-march=native", "-fopenmp"]
        subprocess.run([os.environ.get("CXX", "g++"), *flags, str(SOURCE), "-o", str(program)], check=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        output = subprocess.run(
            [str(program), str(table_gib), str(repeats)], check=True, capture_output=True, text=True, env=environment
        )
    rates: dict[str, float] = json.loads(output.stdout)
    return rates


if __name__ == "__main__":
    for name, rate in row_bandwidth().items():
        print(f"{name}: {rate / 1e9:.2f} GB/s")
