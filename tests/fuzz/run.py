"""Runs one target under atheris: ``python -m tests.fuzz.run TARGET [LIBFUZZER OPTION...]``. ``make fuzz`` calls it.

New inputs go to the first directory among the options, or nowhere. https://github.com/google/atheris
"""

import importlib
import sys
from typing import Any

from tests.fuzz.harness import SEEDS, TARGETS, load

OURS = ["glovebox_server", "glovebox_sandboxes", "_glovebox_guest", "glovebox_profiles", "tomllib"]
"""Packages whose branches guide the fuzzer; tomllib reads profiles for us and is Python itself."""


def main() -> None:
    """Instrument what is ours, then hand over to libFuzzer, which ends the process."""
    target, *options = sys.argv[1:]
    if target not in TARGETS:
        raise SystemExit(f"There is no target {target!r}; there are: {', '.join(TARGETS)}")
    # Found only where `make fuzz` puts it: nothing else needs it.
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=OURS):
        check = load(target)
    seeds = SEEDS / target
    atheris.Setup(["fuzz", *options, *([str(seeds)] if seeds.is_dir() else [])], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
