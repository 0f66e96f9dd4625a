# SPDX-License-Identifier: Apache-2.0
"""Files of records on disk and what tests check in their batches."""

import struct

from terarec.data.records import NormSource
from terarec.formats.hugectr import write_file_list
from terarec.formats.hugectr.norm import NormWriter
from tests.formats.hugectr.samples import make_layout, make_rows

LAYOUT = make_layout(slots=((1, True), (3, False)))


def norm_files(directory, sizes, *, checksum=True, layout=LAYOUT):
    """One Norm file for each of `sizes`, whose first labels count the rows of all of them; the list's path."""
    paths = []
    first = 0
    for index, size in enumerate(sizes):
        label, dense, keys = make_rows(layout, size, seed=index)
        label[:, 0] += first
        first += size
        paths.append(directory / f"gen_{index}.data")
        with NormWriter(paths[-1], layout, checksum=checksum) as writer:
            writer.write(label, dense, keys)
            writer.close()
    write_file_list(directory / "list.txt", paths)
    return directory / "list.txt"


def norm_source(directory, sizes, *, layout=LAYOUT):
    return NormSource(norm_files(directory, sizes, layout=layout), layout, checksum=True)


def break_checksum(path, record):
    """Flip a bit of `record`'s label."""
    content = bytearray(path.read_bytes())
    byte = 69
    for _ in range(record):
        byte += struct.unpack_from("<i", content, byte)[0] + 5
    content[byte + 4] ^= 1
    path.write_bytes(bytes(content))
