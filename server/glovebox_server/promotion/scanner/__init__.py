"""Looks into files for what acts when they are opened: the program that `glovebox artifact scan` runs in a sandbox.

Its text is sent there as a call's program, so that no hostile byte is parsed outside. Standard library only; nothing
here but ``program`` and ``ScanFindings`` must ever be called by anything of ours on the host but its tests.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from glovebox_server.guards.redaction import patterns

_MODULES: Final = ("budget", "markup", "ole", "documents", "archives", "patches", "pdf", "pictures", "look")
"""Each behind those that it imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanFindings:
    """What the scanner says of a file."""

    lines: tuple[str, ...]
    """What it found, a line each, in which nothing hides."""
    more: int
    """How many more it found, which are not listed."""

    @property
    def count(self) -> int:
        """How many it found."""
        return len(self.lines) + self.more

    def told(self) -> tuple[str, ...]:
        """The lines, and one that counts the rest, for somebody who reads them."""
        return (*self.lines, f"and {self.more} more, which are not listed") if self.more else self.lines


@cache
def program() -> str:
    """The text of a program that looks into ``/input`` and prints what it finds as JSON.

    Of each file, ``findings`` and how many ``more`` there are.
    """
    files = {patterns.__name__: Path(patterns.__file__)}
    files.update((f"{__name__}.{name}", Path(__file__).with_name(f"{name}.py")) for name in _MODULES)
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return f"""
import json, sys, types
package = sys.modules[{__name__!r}] = types.ModuleType({__name__!r})
for name, text in {texts!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
    setattr(package, name.rpartition(".")[2], module)
print(json.dumps(package.look.main("/input")))
"""
