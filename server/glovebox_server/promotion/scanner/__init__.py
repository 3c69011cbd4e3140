"""Scans files for active content: the program that `glovebox artifact scan` runs in a sandbox.

Its text is sent there as a call's program, so that no hostile byte is parsed outside. Standard library only. On the
host, only ``program``, ``ScanFindings`` and tests may be used.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from glovebox_server.artifacts import diff_form
from glovebox_server.guards.redaction import patterns

_MODULES: Final = ("budget", "documents", "archives", "pdf", "pictures", "look")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanFindings:
    """The findings of the scanner for one file."""

    lines: tuple[str, ...]
    more: int

    @property
    def count(self) -> int:
        """Return the number of findings."""
        return len(self.lines) + self.more

    def told(self) -> tuple[str, ...]:
        """Return the lines, and one that counts the rest."""
        return (*self.lines, f"and {self.more} more, which are not listed") if self.more else self.lines


@cache
def program() -> str:
    """Return a program that scans ``/input`` and prints ``findings`` and ``more`` of each file as JSON."""
    files = {each.__name__: Path(str(each.__file__)) for each in (patterns, diff_form)}
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
