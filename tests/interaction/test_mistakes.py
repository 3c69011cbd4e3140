"""Ordinary mistakes of models, each made in a real sandbox: what the model then reads leads it on.

``mistakes.toml`` has them, and docs/use/mistakes.csv is written from it: ``python -m tests.interaction.test_mistakes``.
"""

import csv
import io
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal
from tests.fixtures.brokered import DRIVERS, submitted, write_shipped
from tests.interaction.test_everyday import driver, portal
from tests.repo.files import ROOT

from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.artifacts.collect import CUT
from glovebox_server.calls import Text
from glovebox_server.settings import Settings

__all__ = ["driver", "portal"]

ONCE = pytest.mark.parametrize("driver", DRIVERS[:1], indirect=True)
"""Nothing of the sandbox is in what the guest says here, and it is the same with every driver."""
TABLE = ROOT / "docs/use/mistakes.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One of them."""

    does: str
    """What is done, as the page says it."""
    code: str
    reads: str
    """Part of what the caller reads."""
    so: str
    """Why that leads to the right next step."""
    arguments: dict[str, Any] = field(default_factory=dict)
    works_with: list[str] = field(default_factory=list)
    """Drivers with which it is none."""


MISTAKES = [Mistake(**each) for each in tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text())["mistake"]]


def table() -> str:
    """The table for people."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["mistake", "the model reads", "which tells it"])
    lines.writerows([each.does, _cell(each.reads), _so(each)] for each in MISTAKES)
    return text.getvalue()


def _so(mistake: Mistake) -> str:
    return f"{mistake.so}; with {', '.join(mistake.works_with)} it works" if mistake.works_with else mistake.so


def _cell(text: str) -> str:
    return text[1:-1] if text[0] in "([" else text


@pytest.fixture(scope="module")
def app(driver: str, portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """A server with the shipped profiles, for one driver, and a small workspace."""
    home = tmp_path_factory.mktemp("mistakes")
    home.chmod(0o755)
    workspace = home / "workspace"
    (workspace / "data").mkdir(parents=True)
    (workspace / "data/sales.csv").write_text("day,sold\n1,2\n")
    (workspace / "data/names.csv").write_bytes("name\nJürgen\n".encode("latin-1"))
    (workspace / "data/app.db").touch()
    (home / "profiles").mkdir()
    write_shipped(home / "profiles", driver)
    settings = Settings(workspace=workspace, state_dir=home / "state", profiles_dir=home / "profiles")
    with portal.wrap_async_context_manager(apps.opened(settings, "cli")) as opened:
        yield opened


def read(portal: BlockingPortal, app: App, code: str, **arguments: Any) -> str:
    """What the caller of a program reads."""
    result = portal.call(submitted, app, "run_python", {"code": code, **arguments})
    return "\n".join(block.text for block in result.content if isinstance(block, Text))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.does)
def test_a_mistake_gets_the_text_that_the_page_says(
    mistake: Mistake, driver: str, app: App, portal: BlockingPortal
) -> None:
    """Word for word, and nothing of ours beside it; where it is no mistake, nothing is said."""
    text = read(portal, app, mistake.code, **mistake.arguments)
    works = driver in mistake.works_with
    assert (mistake.reads in text.splitlines()) != works
    assert not works or not ("\n(" in text or "[ended" in text)
    assert "_glovebox_guest" not in text


def test_the_page_is_what_the_mistakes_say() -> None:
    """Written by ``python -m tests.interaction.test_mistakes``."""
    assert TABLE.read_text() == table()
    assert len(MISTAKES) >= 40


@ONCE
def test_a_traceback_points_at_what_went_wrong(app: App, portal: BlockingPortal) -> None:
    """In the last line too, which often has no end; and in a traceback that the program prints itself."""
    code = 'import traceback\nx = {"a": 1}\ntry:\n    x["c"]\nexcept KeyError:\n    traceback.print_exc()\ny = x["b"]'
    text = read(portal, app, code)
    assert '    x["c"]\n    ~^^^^^\n' in text
    assert '    y = x["b"]\n        ~^^^^^\n' in text


@ONCE
def test_a_table_is_shown_with_all_its_columns(app: App, portal: BlockingPortal) -> None:
    """Eight of usual names, printed and as a value; the control is one of forty, too wide for anybody."""
    table = "pd.DataFrame({f'quarter_{n}_revenue': [1.25] for n in range(%d)})"
    whole = read(portal, app, f"import pandas as pd\nprint({table % 8})\n{table % 8}")
    assert whole.count("quarter_4_revenue") == 2
    assert "..." not in whole
    assert "..." in read(portal, app, f"import pandas as pd\n{table % 40}")


@ONCE
def test_a_text_of_several_lines_is_shown_as_text(app: App, portal: BlockingPortal) -> None:
    """As ``to_markdown`` makes one; the control is one line, of which one sees that it is a text and no number."""
    table = read(portal, app, "import pandas as pd\npd.DataFrame({'a': [1]}).to_markdown()")
    assert table == "[value]\n|    |   a |\n|---:|----:|\n|  0 |   1 |"
    assert read(portal, app, "'12'") == "[value]\n'12'"
    # What is half of a character stays no reason to lose the rest.
    assert read(portal, app, "'a\\n\\udc80'") == "[value]\na\n?"


@ONCE
def test_a_warning_names_no_file_of_the_guests(app: App, portal: BlockingPortal) -> None:
    """Of a figure that the guest draws, and of a program that blames its caller; fonts that lack are told once."""
    drawn = "import matplotlib.pyplot as plt\nplt.rcParams['font.family'] = 'Arial'\nplt.title('\u65e5');"
    text = read(portal, app, drawn)
    assert "UserWarning: Glyph 26085" in text
    assert text.count("Font family 'Arial' not found.") == 1
    blamed = read(portal, app, "import warnings\nwarnings.warn('old', UserWarning, stacklevel=2)")
    assert "[stderr]\nUserWarning: old\n" in blamed
    own = read(portal, app, "import warnings\nwarnings.warn('old')")
    assert "<program>:2: UserWarning: old\n  warnings.warn('old')\n" in own
    assert "_glovebox_guest" not in text + blamed + own


def test_what_a_program_catches_is_as_it_would_be_elsewhere(driver: str, app: App, portal: BlockingPortal) -> None:
    """The error has its own words, and the program goes on; the control looks nothing up and hears nothing."""
    code = """
import os, socket
try:
    socket.getaddrinfo("example.com", 443)
except socket.gaierror as error:
    print([type(error).__name__, error.errno, error.strerror, os.system("ls")])
"""
    text = read(portal, app, code)
    shell = driver == "docker"
    assert f"['gaierror', -3, 'Temporary failure in name resolution', {0 if shell else 32512}]" in text
    assert "(There is no network in this sandbox" in text
    assert ("(There is no shell" in text) != shell
    assert "[ended" not in text
    assert "(There is no" not in read(portal, app, code.replace('socket.getaddrinfo("example.com", 443)', "pass"))


def test_a_machine_has_the_locale_that_it_names(app: App, portal: BlockingPortal) -> None:
    """With every driver, as LANG says; the control is one of another country."""
    code = "import locale\nlocale.setlocale(locale.LC_ALL, '')"
    assert read(portal, app, code) == "[value]\n'C.UTF-8'"
    assert "locale.Error" in read(portal, app, code.replace("''", "'de_DE.UTF-8'"))


@ONCE
@pytest.mark.parametrize(
    "code",
    [
        "class E(OSError):\n    errno = property(lambda self: 1 / 0)\nraise E",
        "class E(OSError):\n    reason = property(lambda self: E())\nraise E",
        "class E(Exception):\n    __str__ = None\nE.__module__ = 'sqlite3'\nE.__name__ = 'OperationalError'\nraise E",
        "raise FileNotFoundError(2, 'x', 7)",
        "error = OSError()\nerror.args = (error, error)\nerror.__cause__ = error\nraise error",
        "raise NameError('x')",
        "import subprocess\nraise subprocess.CalledProcessError(1, None)",
    ],
)
def test_an_error_that_is_not_made_like_others_is_told_all_the_same(
    code: str, app: App, portal: BlockingPortal
) -> None:
    """The program's error stays the program's: a traceback with its lines, and the status of a script."""
    text = read(portal, app, code)
    assert '[stderr]\nTraceback (most recent call last):\n  File "<program>"' in text
    assert text.endswith("[ended: exited 1]")


@ONCE
def test_a_chart_that_nobody_can_see_is_told(app: App, portal: BlockingPortal) -> None:
    """In a package made as plotly is, imported by its front or beneath it; the control draws and shows nothing."""
    made = """
import pathlib, sys
place = pathlib.Path("/tmp/plotly/io")
place.mkdir(parents=True)
(place.parent / "__init__.py").touch()
(place / "_renderers.py").write_text("def show(): return 7")
(place / "__init__.py").write_text("from plotly.io._renderers import show")
sys.path.insert(0, "/tmp")
import plotly.io
"""
    shown = read(portal, app, f"{made}plotly.io.show()")
    assert "(There is no browser here: write a page to /output" in shown
    assert "[value]\n7" in shown
    assert "browser" not in read(portal, app, f"{made}plotly.io.show")
    chart = "class Figure: pass\nFigure.__module__ = 'plotly.graph_objs._figure'\nFigure()"
    text = read(portal, app, chart)
    assert "(There is no browser here" in text
    assert text.endswith("[value]\n<plotly Figure>")  # and not all its numbers
    assert "browser" not in read(portal, app, f"# it is in /output\n{chart}")
    assert "browser" not in read(portal, app, f"{chart};")


def test_what_is_lost_at_the_end_of_a_program_is_told(app: App, portal: BlockingPortal) -> None:
    """A thread that is stopped, a file that has no room for its last bytes; the controls wait, and close in time."""
    thread = "import threading, time\nt = threading.Thread(target=lambda: time.sleep(0.2), daemon=True)\nt.start()"
    assert "(A daemon thread had not ended and was stopped" in read(portal, app, thread)
    assert "daemon" not in read(portal, app, f"{thread}\nt.join()")
    full = "f = open('/tmp/a', 'wb', buffering=2**20)\nf.write(bytes(2**19))\ng = open('/tmp/b', 'wb', buffering=0)\n"
    full += "try:\n    while True:\n        g.write(bytes(2**20))\nexcept OSError as error:\n    print(error)"
    assert "(/tmp is full, it holds 256 MiB: " in read(portal, app, full)
    assert "is full" not in read(portal, app, "f = open('/tmp/a', 'wb')\nf.write(bytes(2**20))")


@ONCE
@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import sys\nsys.stdout.buffer.write(b'\\xff');", "[Bytes of output that are not UTF-8 are shown as \ufffd. "),
        (
            "print('x' * 300_000)",
            "[truncated: stdout: its first and last 16384 of 300001 bytes are here; all but 37857 is artifact://",
        ),
        ("list(range(20_000))", "[The value of the last expression was truncated. End with a part of it.]"),
        ("print(1)", ""),
    ],
)
def test_what_of_the_output_cannot_be_read_is_told(code: str, note: str, app: App, portal: BlockingPortal) -> None:
    """And where it would be whole; the control has nothing to tell."""
    lines = read(portal, app, code).splitlines()
    assert any(line.startswith(note) for line in lines) if note else lines == ["1"]


def test_a_file_that_lacks_its_end_is_marked(app: App, portal: BlockingPortal) -> None:
    """In its entry and in the text, though the program goes on; the control has room for all of it."""
    code = """
open("/output/first.txt", "wb").write(b"x" * 2**20)
try:
    with open("/output/big.txt", "wb") as file:
        for _ in range(%d):
            file.write(b"x" * 2**20)
except OSError as error:
    print(error)
"""
    for mib, marks in ((100, (CUT,)), (10, ())):
        result = portal.call(submitted, app, "run_python", {"code": code % mib})
        assert not result.failed
        risks = {each["name"]: each["risks"] for each in result.structured["artifacts"]}
        assert risks == {"big.txt": marks, "first.txt": ()}
        text = "\n".join(block.text for block in result.content if isinstance(block, Text))
        assert (f"big.txt: {CUT}" in text) == bool(marks)


if __name__ == "__main__":
    TABLE.write_text(table())
