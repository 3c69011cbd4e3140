"""What programs, peers, files and names said cannot take over a terminal, hide from it, or forge a line of the log."""

import io
import json
import logging
import sys
from collections.abc import AsyncIterator

import pytest
import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.fixtures.consoles import printing_on

from glovebox_audit.printable import LAYOUT, printable
from glovebox_server.calls import CallResult, Link
from glovebox_server.calls import Text as Told
from glovebox_server.cli import call, failures, saving
from glovebox_server.cli.terminal import COLUMNS, Terminal, print_json, print_table, table_of
from glovebox_server.transport import logs

#: Everything a terminal obeys (C0, DEL, C1), and what reorders or hides: bidirectional controls, zero-width characters,
#: fillers, selectors, tags, line separators.
OBEYED = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))]
UNSEEN = list(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    "\u00ad\u034f\u115f\u1160\u17b4\u180e\u200b\u200c\u200d\u2060\u2064\u206f\u2800\u3164\ufe00\ufeff\uffa0\u2d7f\U0001107f\U00016fe4\U0001d159"
    "\u2028\u2029\ufff9\U000e0001\U000e0041\U000e0100\ue000\udcff"
)
HARMLESS = "naïve café, 日本語, नमस्ते, שלום, 👍🏽 ❤\ufe0f ½ – “quoted” \\x1b"


@pytest.mark.parametrize("character", OBEYED + UNSEEN, ids=lambda each: f"{ord(each):04x}")
def test_what_is_obeyed_or_not_seen_is_written_as_an_escape(character: str) -> None:
    """Control: the same character is in the text before."""
    shown = printable(f"a{character}b")
    assert character not in shown
    assert shown.startswith("a\\")
    assert shown.isascii()


def test_what_people_write_stays_as_it_is() -> None:
    """Letters of every script, emoji and punctuation; of a program's output also lines, tabs and wide blanks."""
    assert printable(HARMLESS) == HARMLESS
    assert printable("a\n\tb\u00a0c\u3000d", LAYOUT) == "a\n\tb\u00a0c\u3000d"
    assert printable("a\n\tb\u00a0c") == "a\\n\\tb\\xa0c"


EVERYTHING = "x" + "".join(each for each in OBEYED + UNSEEN if each not in "\n\t\x07\x08\x0b\x0c\r") + "y"


def harmless(shown: str) -> bool:
    """Whether a terminal obeys nothing of it, and shows all of it."""
    return not [each for each in shown if each not in LAYOUT and printable(each) != each]


@pytest.mark.parametrize("kind", [Terminal, Console])
def test_the_console_of_every_command_escapes_whatever_it_is_given(kind: type[Console]) -> None:
    """Also where whoever prints forgot to: text, tables, plain strings. The control is rich's own console."""
    console = kind(file=io.StringIO(), force_terminal=True, color_system=None, width=4000)
    table = Table(EVERYTHING)
    table.add_row(Text(EVERYTHING))
    for each in (Text(EVERYTHING, style="red"), EVERYTHING, table):
        console.print(each, markup=False)
    console.out(EVERYTHING)
    assert isinstance(console.file, io.StringIO)
    assert harmless(console.file.getvalue()) == (kind is Terminal)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_in_a_pipe_has_a_line_for_each_row(*, terminal: bool) -> None:
    """For grep: whole, without blanks at the end, and harmless. The control is a terminal, where it is folded."""
    console = Terminal(file=io.StringIO(), force_terminal=terminal, color_system=None, width=40)
    table = Table("name", box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    for cell in ("short", "[bold]long" * 20, EVERYTHING):
        table.add_row("n", Text(cell))
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert harmless("\n".join(lines))
    assert (len(lines) == 4, f"n     {'[bold]long' * 20}" in lines) == (not terminal, not terminal)
    assert [line for line in lines if line.endswith(" ") and not terminal] == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_that_is_not_folded_leaves_out_what_says_nothing(*, terminal: bool) -> None:
    """On a terminal no column of zeros or of nothing, no blank at a line's end. The control is a pipe."""
    console = Terminal(file=io.StringIO(), force_terminal=terminal, color_system=None, width=12)
    table = Table("id", "role", "made", "by", "why", box=None, pad_edge=False)
    table.add_row("a" * 20, "", "2026-11-22 19:47", "local:1000", Text("short"))
    table.add_row("b" * 20, "0", "2026-11-22 19:48", "local:1001", Text("quite long"))
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    blank = "" if terminal else "      "
    assert console.file.getvalue().splitlines()[1] == f"{'a' * 20}  {blank}2026-11-22 19:47  local:1000  short"


ROW = {
    "time": "2026-11-22 19:47:00",
    "call": "c_" + "0" * 26,
    "outcome": "denied: network.address",
    "tool": "read_workspace_file",
    "by": "token:team",
    "client": "An editor",
    "ms": "12345",
}


def printed_row(row: dict[str, str], *, terminal: bool) -> str:
    """A table of one row, as a console of 80 columns shows it."""
    console = Terminal(file=io.StringIO(), force_terminal=terminal, color_system=None, width=COLUMNS)
    table = table_of(row, [row.values()], right=["ms"])
    assert table
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_fits_a_terminal_of_80_columns() -> None:
    """With cells as long as they come; what is copied is not broken. Into a pipe each row is one line (control)."""
    for terminal in (True, False):
        lines = printed_row(ROW, terminal=terminal).splitlines()
        assert (max(map(len, lines)) <= COLUMNS) == terminal
        assert any(ROW["call"] in line for line in lines)


def test_a_narrow_table_breaks_no_word_that_has_room() -> None:
    """Each word of a listing of everyday calls stands whole on a line; only one too long for its column does not."""
    row = ROW | {"outcome": "denied: network.allow", "tool": "run_python", "by": "local:0"}
    row |= {"client": "over cli", "ms": "1632"}
    printed = printed_row(row, terminal=True)
    assert max(map(len, printed.splitlines())) <= COLUMNS
    assert {*row, *" ".join(row.values()).split()} - set(printed.split()) == {"network.allow"}


def test_styles_are_ours_and_stay() -> None:
    """Rich's own colours are not what is escaped."""
    console = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(Text("a\x1b[31mb", style="red"))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "\x1b[31ma\\x1b[31mb\x1b[0m\n"


@pytest.mark.parametrize("kind", [Terminal, Console])
def test_words_between_colons_are_not_drawn(kind: type[Console]) -> None:
    """A name is shown as it is written, in a line and in a cell. The control is rich's own console, which draws."""
    console = kind(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    table = Table("name")
    table.add_row("oauth:https://id.example#:smile:")
    for each in ("token:a:", table):
        console.print(each, markup=False)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert ("token:a:" in shown, "#:smile:" in shown) == (kind is Terminal,) * 2


def test_a_result_is_not_coloured_for_what_it_looks_like() -> None:
    """A link is of one colour, whatever values are in it; and what ends in a line break gets no second one."""
    out = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard")
    link = Link(uri="artifact://1", name="a 1 'b' None.csv", media_type="text/csv", bytes=1, sha256="", risks=())
    result = CallResult(structured={}, content=(Told(text="1 None\n"), Told(text="2"), link), failed=False, meta={})
    with printing_on(out):
        call._show(result)
    assert isinstance(out.file, io.StringIO)
    shown = "\x1b[36ma 1 'b' None.csv  artifact://1  text/csv, 1 bytes\x1b[0m"
    assert out.file.getvalue() == f"1 None\n2\n{shown}\n"


def test_a_call_shows_all_that_a_program_printed_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is dropped on the way either: bell, backspace and the like are shown. As JSON it is ASCII, and exact."""
    words = EVERYTHING + "\x07\x08\x0b\x0c\r"
    link = Link(uri="artifact://1", name=words, media_type="text/plain", bytes=1, sha256="", risks=())
    result = CallResult(structured={"stdout": words}, content=(Told(text=words), link), failed=False, meta={})
    out = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, soft_wrap=True)
    with printing_on(out):
        call._show(result)
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert harmless(shown)
    assert "\\x07\\x08\\x0b\\x0c\\r" in shown
    failures.tell(ValueError(words), out, as_json=True)
    assert harmless(out.file.getvalue())
    told = capsys.readouterr().out
    assert json.loads(told)["error"]["message"] == words
    for value, printed in ((words, told), ({"stdout": words}, "")):
        file = io.StringIO()
        print_json(file, value, indent=None)
        assert json.loads(file.getvalue()) == value
        assert harmless(file.getvalue() + printed)


@pytest.mark.parametrize("terminal", [True, False])
async def test_an_artifact_is_exact_in_a_pipe_and_harmless_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that two chunks share is shown whole; bytes that are no text are escapes."""
    content = "é\x1b[2J\x9b\n".encode() + b"\xff"
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", stream)

    async def chunks() -> AsyncIterator[bytes]:
        yield content[:1]
        yield content[1:]

    await saving.save(chunks(), None)
    assert raw.getvalue() == ("é\\x1b[2J\\x9b\n\\xff".encode() if terminal else content)


FORGED = "x\n2026-11-23T09:59:59Z [info     ] listening url=http://evil\r\x1b[2J\x9b2J\u202e"


def test_a_log_line_cannot_be_forged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A session id in a library's entry, a value of ours, the story of an exception: a line each, the rest indented."""
    # The control is the standard library's own handler, which wrote the forged line as it is.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.to_stderr()
    foreign = logging.makeLogRecord({"name": "mcp.server.sse", "levelno": 30, "msg": "bad id: %s", "args": (FORGED,)})
    assert "\n2026-11-23T09:59:59Z" in logging.Formatter().format(foreign)
    logging.getLogger().handlers[0].handle(foreign)
    log = structlog.get_logger("ours")
    log.warning(FORGED, value=FORGED, k="v")
    log.error("failed", exc_info=ValueError(FORGED))
    written = capsys.readouterr().err
    assert harmless(written)
    lines = written.splitlines()
    first = [line[20:32] for line in lines if not line.startswith("    | ")]
    assert first == [" [warning  ]", " [warning  ]", " [error    ]"]
    assert "bad id: x\\n2026-11-23T09:59:59Z" in lines[0]
    assert "mcp.server.sse" in lines[0]
    assert lines[-2:] == ["    | ValueError: x", f"    | {printable(FORGED[2:])}"]
