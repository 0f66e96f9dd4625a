# SPDX-License-Identifier: Apache-2.0
"""Small logs in Criteo's layout."""

from pathlib import Path

import numpy as np


def line(label: int = 0, integers: list[int | str] | None = None, categories: list[str] | None = None) -> str:
    """A line; what is not given is missing."""
    fields = [str(label), *(str(value) for value in integers or [""] * 13), *(categories or [""] * 26)]
    assert len(fields) == 40
    return "\t".join(fields)


def random_lines(rows: int, seed: int = 0) -> list[str]:
    """Lines with missing values, negative integers, and categories of 5 to 2,000 values."""
    generator = np.random.default_rng(seed)
    integers = np.floor(generator.lognormal(2.0, 2.0, (rows, 13))).astype(np.int64) - 2
    values = (generator.random((rows, 26)) ** 3 * np.geomspace(5, 2000, 26)).astype(np.int64) * 2654435761 % 2**32
    present = generator.random((rows, 39)) > 0.15
    return [
        line(
            int(generator.random() < 0.3),
            [str(value) if there else "" for value, there in zip(integers[row], present[row, :13], strict=True)],
            [f"{value:08x}" if there else "" for value, there in zip(values[row], present[row, 13:], strict=True)],
        )
        for row in range(rows)
    ]


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    """`lines` as a file."""
    path.write_bytes("".join(text + end for text in lines).encode())
    return path


def columns(lines: list[str]) -> dict[str, list[object]]:
    """The raw columns of `lines` as a client of the server holds them."""
    names = [f"I{number}" for number in range(1, 14)] + [f"C{number}" for number in range(1, 27)]
    fields = [text.split("\t")[1:] for text in lines]
    raw: dict[str, list[object]] = {}
    for position, name in enumerate(names):
        texts = [row[position] for row in fields]
        raw[name] = [int(text) if text else None for text in texts] if name[0] == "I" else list(texts)
    return raw
