"""``glovebox call --code`` and ``--file``: the program as it is, instead of inside of JSON."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from glovebox_server.cli import call as command
from glovebox_server.cli.main import main

PROGRAM = "print('höhe')\n# \"quoted\" \\n\n"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    made: list[tuple[str, str | None]] = []

    async def make_call(_settings: object, _tool: str, arguments: str, program: str | None, **_: object) -> int:
        made.append((arguments, program))
        return 0

    monkeypatch.setattr(command, "_make_call", make_call)
    return made


def run(*words: str | Path, read: str | bytes = "") -> tuple[int, str]:
    done = CliRunner().invoke(main, ["call", "run_python", *map(str, words)], input=read)
    return done.exit_code, " ".join(done.stderr.split())


def test_a_program_comes_from_a_word_a_file_or_standard_input(
    calls: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    """Byte for byte; beside other arguments, and without any (the control)."""
    (tmp_path / "prog.py").write_text(PROGRAM)
    assert run("--code", PROGRAM) == (0, "")
    assert run("--code", "-", read=PROGRAM) == (0, "")
    assert run("--file", "-", read=PROGRAM) == (0, "")
    assert run("--file", tmp_path / "prog.py", "--args", '{"timeout_seconds": 5}') == (0, "")
    assert run() == (0, "")
    assert calls == [*[("{}", PROGRAM)] * 3, ('{"timeout_seconds": 5}', PROGRAM), ("{}", None)]


def test_the_mark_of_an_editor_is_no_part_of_a_program(calls: list[tuple[str, str | None]], tmp_path: Path) -> None:
    """As Python itself has it; the control is the same mark within the program."""
    (tmp_path / "prog.py").write_bytes(b"\xef\xbb\xbfprint(1)\xef\xbb\xbf")
    assert run("--file", tmp_path / "prog.py") == (0, "")
    assert calls == [("{}", "print(1)\ufeff")]


@pytest.mark.parametrize(
    ("words", "read", "said"),
    [
        (("--code", "1", "--file", "FILE"), b"", "--code and --file both name the program"),
        (("--code", "-", "--args", "-"), b"", "cannot both read standard input"),
        (("--file", "-", "--args", "-"), b"", "cannot both read standard input"),
        (("--file", "-"), b"\xff", "--file: it is not UTF-8 at byte 0"),
        (("--code", "-"), b"\xff", "--code: it is not UTF-8 at byte 0"),
        (("--code", "-"), b"1" * (1 << 20) + b"1", "--code: it has more than 1048576 bytes"),
        (("--code", "\udcff"), b"", "--code: it is not UTF-8"),
        (("--file", "BAD"), b"", "--file: it is not UTF-8 at byte 1"),
        (("--file", "/proc/none"), b"", "'--file': '/proc/none': No such file"),
        (("--file", "/proc/self/mem"), b"", "--file: it cannot be read: Input/output error."),
    ],
)
def test_what_is_no_program_is_refused(
    calls: list[tuple[str, str | None]], tmp_path: Path, words: tuple[str, ...], read: bytes, said: str
) -> None:
    (tmp_path / "FILE").write_text("1")
    (tmp_path / "BAD").write_bytes(b"1\xff")
    placed = [str(tmp_path / word) if word in {"FILE", "BAD"} else word for word in words]
    code, err = run(*placed, read=read)
    assert code == 2
    assert said in err
    assert calls == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("call", "run_python", "--code", "1", "--args", '{"code": "2"}'),
            "--args has one, and so does --code or --file",
        ),
        (("call", "search_workspace", "--code", "1"), "it takes no program, so neither --code nor --file"),
        (("call", "no_such_tool", "--code", "1"), "no_such_tool"),
    ],
)
def test_a_program_that_has_no_place_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "served").mkdir()
    places = [f"--{name}-dir={tmp_path / name}" for name in ("state", "data")]
    done = CliRunner().invoke(main, [*words, *places, f"--workspace={tmp_path / 'served'}"])
    assert (done.exit_code, said in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert b"call.decided" not in (tmp_path / "state" / "audit" / "audit.jsonl").read_bytes()
