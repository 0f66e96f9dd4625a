# SPDX-License-Identifier: Apache-2.0
"""Damage to files: changed values of JSON, changed bytes, and other things in the place of a file."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "../../x",
        "/dev/zero",
        "http://127.0.0.1:9/x",
        "a\x00b",
        "\ud800",
        [],
        [[]],
        {},
        {"kind": "x"},
        100_000,
    ),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every object or list in JSON data with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def change_json(path: Path, random_numbers: random.Random) -> None:
    """Replace, remove or add one value of a JSON file."""
    data = json.loads(path.read_bytes())
    inside, key = random_numbers.choice(list(places(data)))
    how = random_numbers.randrange(4)
    if how == 0:
        del inside[key]
    elif how == 1 and isinstance(inside, dict):
        inside["unknown"] = inside[key]
    else:
        inside[key] = random_numbers.choice(VALUES)
    path.write_text(json.dumps(data))


def change_bytes(path: Path, random_numbers: random.Random) -> None:
    """Flip a bit, cut the end off, or remove, repeat or overwrite a span of a file."""
    content = bytearray(path.read_bytes())
    start = random_numbers.randrange(max(len(content), 1))
    stop = min(len(content), start + random_numbers.randrange(1, 65))
    how = random_numbers.randrange(5)
    if how == 0 and content:
        content[start] ^= 1 << random_numbers.randrange(8)
    elif how == 1:
        del content[start:]
    elif how == 2:
        del content[start:stop]
    elif how == 3:
        content[start:start] = content[start:stop]
    else:
        content[start:stop] = random_numbers.randbytes(stop - start)
    path.write_bytes(content)


def replace_file(path: Path, random_numbers: random.Random) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    make: Callable[[], object] = random_numbers.choice(
        [
            lambda: None,
            lambda: os.mkfifo(path),
            lambda: path.mkdir(),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to(path),
            path.touch,
            lambda: path.write_bytes("{}".encode("utf-16")),
        ]
    )
    make()


def damage(file: Path, random_numbers: random.Random) -> str:
    """Change a file in one of the ways of this module, and return which."""
    changes = [change_bytes, replace_file] + [change_json] * 2 * (file.suffix == ".json")
    change = random_numbers.choice(changes)
    change(file, random_numbers)
    return f"{change.__name__} of {file.name}"
