"""Files and directories: atomic writing, locks, URLs, JSON."""

from terarec.io.atomic import (
    AtomicFile,
    atomic_dir,
    atomic_entries,
    atomic_file,
    check_new_file,
    check_replaceable,
    flush_tree,
    write_bytes,
)
from terarec.io.json_files import (
    read_json,
    read_json_and_version,
    read_versioned_json,
    write_json,
    write_versioned_json,
)
from terarec.io.remote import (
    PARTIAL_SUFFIX,
    Location,
    file_system,
    folder_and_name,
    is_remote,
    local_copy,
    locate,
    read_text,
)
from terarec.io.resumable import Journal, file_lock, remove_abandoned, resumable_dir

__all__ = [
    "PARTIAL_SUFFIX",
    "AtomicFile",
    "Journal",
    "Location",
    "atomic_dir",
    "atomic_entries",
    "atomic_file",
    "check_new_file",
    "check_replaceable",
    "file_lock",
    "file_system",
    "flush_tree",
    "folder_and_name",
    "is_remote",
    "local_copy",
    "locate",
    "read_json",
    "read_json_and_version",
    "read_text",
    "read_versioned_json",
    "remove_abandoned",
    "resumable_dir",
    "write_bytes",
    "write_json",
    "write_versioned_json",
]
