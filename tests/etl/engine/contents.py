"""What lies in a data set's directory."""

from pathlib import Path


def contents(out: Path) -> dict[str, bytes]:
    """Every file but the report, which has times in it."""
    files = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    files.pop("report.json", None)
    place = str(out.resolve()).encode()
    return {name: content.replace(place, b"OUT") for name, content in files.items()}
