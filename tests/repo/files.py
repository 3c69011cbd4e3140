"""The repository's own files, for tests about them."""

import subprocess  # noqa: TID251 - asks git; nothing here comes from a sandbox
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ("server", "sandboxes", "profiles", "scripts", "tests")


def committed() -> list[str]:
    """Every file git knows or would add, by its path from the root; those deleted meanwhile left out."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return sorted(name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file())


def python_files(*below: str) -> Iterator[tuple[str, str]]:
    """Path and text of every Python module under these directories."""
    for name in committed():
        if name.endswith(".py") and name.partition("/")[0] in (below or SOURCE):
            yield name, (ROOT / name).read_text()


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of every file that is text."""
    for name in committed():
        content = (ROOT / name).read_bytes()
        if b"\0" not in content[:8192]:
            yield name, content.decode(errors="replace")
