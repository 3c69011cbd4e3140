"""What a program is told of a package it lacks: only what its environment has is named in its place."""

import pytest

from _glovebox_guest.program import hints

ONLY = "Packages cannot be installed here; only those of the sandbox's runtime are available."
OTHER = "is in the environment default, which this tool's profile does not name:"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with polars, and another, the default, with pandas and openpyxl."""
    monkeypatch.setattr(hints, "elsewhere", {"pandas": "default", "openpyxl": "default", "polars": "lake"})
    monkeypatch.setattr(hints, "_importable", lambda name: name in {"polars", "json", "sqlite3"})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("x", name="xlsxwriter"), ONLY),
        (ModuleNotFoundError("x", name="duckdb"), "Packages cannot be installed here; use sqlite3."),
        (ModuleNotFoundError("x", name="orjson"), "Packages cannot be installed here; use json."),
        (ModuleNotFoundError("x", name="pandas"), f"pandas {OTHER} use polars, or ask the operator."),
        (ModuleNotFoundError("x", name="openpyxl.styles"), f"openpyxl {OTHER} do without, or ask the operator."),
        (ModuleNotFoundError("x", name="polars.nothing"), ""),
        (ImportError("polars wants openpyxl: install it"), f"openpyxl {OTHER} do without, or ask the operator."),
    ],
)
def test_only_what_can_be_imported_here_is_named_instead(error: ImportError, words: str) -> None:
    """A part that a package of this environment does not have is the program's own mistake."""
    assert hints.hint(error) == words
