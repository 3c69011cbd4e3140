"""What a program is told of a package it lacks: only what its environment has is named in its place."""

import errno
import webbrowser
from pathlib import Path

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
    ("proxy", "words"),
    [
        ("", "Packages cannot be installed here; use the tool fetch_url."),
        ("http://127.0.0.1:1", "Packages cannot be installed here; use urllib.request."),
    ],
)
def test_what_asks_the_web_differs_with_a_network(proxy: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool reads pages for a program without one; the standard library goes through the proxy."""
    monkeypatch.setattr(hints, "_importable", lambda name: name == "urllib.request")
    monkeypatch.setenv("HTTPS_PROXY", proxy) if proxy else monkeypatch.delenv("HTTPS_PROXY", raising=False)
    for name in ("requests", "httpx"):
        assert hints.hint(ModuleNotFoundError("x", name=name)) == words


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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/usr/bin/pip3 install -q nothing", ONLY),
        (["python", "-m", "pip", "install", "-U", "duckdb==1.0"], "Packages cannot be installed here; use sqlite3."),
        (("pip", "install", "pandas[excel]"), f"pandas {OTHER} use polars, or ask the operator."),
        (["pip", "install", "polars"], ONLY),
        (["pip", "list"], ONLY),
        ("pipes install duckdb", ""),
        (["ls", b"pip"], ""),
        (None, ""),
    ],
)
def test_an_installation_is_told_by_what_it_is_of(command: object, words: str) -> None:
    """The first package that something is known of; the controls are no command of pip's."""
    assert (hints.no_pip(hints.pip(command)) if hints.pip(command) else "") == words


@pytest.mark.parametrize(("name", "told"), [("a.txt", 1), ("new.txt", 1), ("closed.txt", 0), (7, 0)])
def test_a_readable_file_was_to_be_written(
    name: str | int, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gVisor denies that before it sees what is read-only; the controls are denied to readers, or are no name."""
    (tmp_path / "a.txt").touch()
    closed = {str(tmp_path / "closed.txt"): errno.EACCES}
    own = hints._reading
    monkeypatch.setattr(hints, "_reading", lambda path: closed.get(path) or own(path))
    place = str(tmp_path / name) if isinstance(name, str) else name
    assert hints.hint(PermissionError(errno.EACCES, "no", place)).count("read-only") == told
