# SPDX-License-Identifier: Apache-2.0
"""Files and directories of users are opened and removed by `io` alone."""

import ast

from tests.architecture.sources import all_nodes

REMOVERS = {"rmtree", "removedirs", "rmtree_errorhandler"}


def test_directories_are_removed_in_one_place() -> None:
    """Finding Q1: `io.remove_tree` checks that a directory is one of ours."""
    found = {
        file
        for file, nodes in all_nodes().items()
        for node in nodes
        if (isinstance(node, ast.Attribute) and node.attr in REMOVERS)
        or (isinstance(node, ast.alias) and node.name in REMOVERS)
    }
    assert found == {"io/removal.py"}


READERS = {"os.open", "np.load", "np.fromfile", "np.memmap", "onnx.load", "pa.memory_map", "safe_open"}
READERS |= {f"shutil.{name}" for name in ("copy", "copy2", "copyfile", "copytree")}
PARQUET_READERS = {"pq.ParquetFile", "pq.read_table", "pq.read_schema", "pq.read_metadata", "pa.OSFile"}
OPENED = {"file", "source"}  # names of files that `io` has opened
EXCEPTIONS = {
    "cli/__init__.py": "the null device",
    "cli/app.py": "the null device",
    "cli/diagnostics.py": "descriptions of the system",
    "dist/joining.py": "sources of terarec and descriptions of the system",
    "export/onnx_file.py": "a file that terarec has just written",
    "export/table_rows.py": "maps a file by its link, and completes the header of one that it writes",
    "formats/hugectr/fields.py": "reads from an open file",
    "hugectr/data.py": "copies by `io.copy_file`",
    "hugectr/schema/table.py": "a resource of terarec",
    "kernels/environment.py": "descriptions of the system",
    "kernels/memory.py": "descriptions of the system",
    "kernels/processor.py": "descriptions of the system",
    "nn/precision.py": "descriptions of the system",
    "apps/recipes/__init__.py": "resources of terarec",
    "reports/page.py": "a resource of terarec",
    "apps/triton.py": "copies by `io.copy_file`",
    "memory/files.py": "makes a file of its own to try direct access",
    "serve/access_log.py": "appends lines without waiting, also to a pipe or a terminal",
    "serve/http/assembly.py": "a resource of terarec",
    "serve/shared_memory.py": "shared memory, which it opens without waiting or following links, and looks at",
    "train/report.py": "maps a file by its link",
}


def reads_by_itself(node: ast.AST) -> bool:
    """Return whether a node opens a file to read or to append to it."""
    if not isinstance(node, ast.Call):
        return False
    called, name = ast.unparse(node.func), ast.unparse(node.func).rpartition(".")[2]
    if called in READERS or (name in ("read_text", "read_bytes") and "." in called):
        return True
    mode = next((word.value for word in node.keywords if word.arg == "mode"), None)
    if called in PARQUET_READERS:
        writes = any(isinstance(part, ast.Constant) and part.value == "wb" for part in node.args)
        return not writes and ast.unparse(node.args[0]) not in OPENED
    if name != "open" or len(node.args) > 2 or called.startswith(("tarfile", "pa.ipc")):
        return False
    position = 1 if called == "open" else 0
    mode = mode or (node.args[position] if len(node.args) > position else None)
    if mode is None:
        return called == "open" or not node.args
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and not mode.value.startswith(("w", "x"))


def test_files_are_opened_in_one_place() -> None:
    """Finding Q4: `io.open_file` rejects what is not a regular file, and `io.read_bytes` what is too large."""
    found = {
        file
        for file, nodes in all_nodes().items()
        if not file.startswith("io/") and any(reads_by_itself(node) for node in nodes)
    }
    assert found == EXCEPTIONS.keys()
