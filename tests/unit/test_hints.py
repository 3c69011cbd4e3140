"""What a program is told of a package it lacks: only what its environment has is named in its place."""

import webbrowser

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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError(
                "\nImage export requires the Kaleido package, v1.0.0 or greater,\nwhich can be installed using pip"
            ),
            1,
        ),
        (ImportError("The vl-convert Vega-Lite compiler and file export feature requires\nversion 1: pip install"), 1),
        (ValueError("Saving charts in 'png' format requires the vl-convert-python package: see the guide"), 1),
        (ValueError("convert"), 0),
        (webbrowser.Error("could not locate runnable browser"), 1),
        (RuntimeError("kaleidoscope"), 0),
        (Exception("could not locate runnable browser"), 0),
    ],
)
def test_a_chart_for_a_browser_is_written_as_a_page(error: Exception, told: int) -> None:
    """The libraries' own advice is to install something; the controls are errors of the same kind."""
    assert hints.hint(error).count("write a page to /output") == told
