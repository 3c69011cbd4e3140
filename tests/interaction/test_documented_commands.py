"""The commands of the pages for people, run as they are typed: tests/repo/pages.py says how a page marks them.

The blocks of one page run in order, in a copy of the repository and a home of their own that already hold one call.
Lines that fetch from a network (``git clone``, ``make``) are left out. Those of the README are typed on machines that
nobody has worked on, by tests/tools/doorstep.py.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess  # noqa: TID251 - runs a shell on what our own pages say
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.repo.files import ROOT, committed
from tests.repo.pages import Block, blocks, pages, says, shown

pytestmark = pytest.mark.driver("bubblewrap")

FETCHES = ("git clone ", "make ")
#: For one block on a busy machine; the longest takes five by itself.
TIMEOUT_SECONDS = 120
BINARIES = Path(sys.executable).parent
RUN = [block for page, text in pages().items() if page != "README.md" for block in blocks(page, text) if block.run]

_EXIT = re.compile(r"^(?P<command>.*\S) +# exit (?P<code>[0-9]+)\b.*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page's commands run, what its examples stand for there, and which of its blocks ran."""

    directory: Path
    environment: dict[str, str]
    stands_for: dict[str, str]
    ran: list[Block] = field(default_factory=list)

    def script(self, text: str) -> tuple[int, str]:
        """Exit status and whole output of commands, the first that fails being the last."""
        for example, real in self.stands_for.items():
            text = text.replace(example, real)
        lines = [_with_its_exit(line) for line in text.splitlines() if not line.startswith(FETCHES)]
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        return ended.returncode, ended.stdout


def _with_its_exit(line: str) -> str:
    """A line that says ``# exit 3`` succeeds if it ends so."""
    found = _EXIT.match(line)
    return f"status=0; {found['command']} || status=$?; [ $status = {found['code']} ]" if found else line


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the repository, with this environment."""
    copy = tmp_path_factory.mktemp("pages") / "glovebox"
    for name in committed():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(BINARIES.parent)
    yield copy
    shutil.rmtree(copy)


@pytest.fixture(scope="module")
def first(repository: Path, runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The copy, a home, and in it the records of one call that left a file."""
    home = tmp_path_factory.mktemp("home")
    environment = {
        "HOME": str(home),
        "PATH": f"{BINARIES}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "GLOVEBOX_DATA_DIR": str(runtime_dir),
    }
    here = Place(directory=repository, environment=environment, stands_for={})
    program = json.dumps({"code": "open('/output/notes.txt', 'w').write('1')"})
    call_it = f"glovebox call run_python --json --args {shlex.quote(program)}"
    status, printed = here.script(f"{call_it} && glovebox audit head")
    assert status == 0, printed
    call, end = json.JSONDecoder().raw_decode(printed)
    here.stands_for.update(
        {"c_01h…": call["call_id"], "artifact://5b0e…": call["artifacts"][0]["uri"], "SEQ:HASH": printed[end:].strip()}
    )
    return here


@pytest.fixture(scope="module")
def place_of(first: Place, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    """The same for each page, with a home of its own."""

    @functools.cache
    def found(page: str) -> Place:
        home = tmp_path_factory.mktemp(Path(page).stem)
        shutil.copytree(first.environment["HOME"], home, dirs_exist_ok=True)
        return Place(
            directory=first.directory,
            environment={**first.environment, "HOME": str(home)},
            stands_for={**first.stands_for, "STATE": str(home / ".local/state/glovebox")},
        )

    return found


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
@pytest.mark.parametrize("block", RUN, ids=str)
def test_the_commands_of_a_page_work_as_typed(place_of: Callable[[str], Place], block: Block) -> None:
    """Each ends as the page says, and prints what it shows; those above it on the page have run."""
    place = place_of(block.page)
    while block not in place.ran:
        each = next(other for other in RUN if other.page == block.page and other not in place.ran)
        place.ran.append(each)
        _run(each, place)


def _run(block: Block, place: Place) -> None:
    for command, output in [(block.text, "…")] if block.tag == "sh" else shown(block):
        status, printed = place.script(command)
        assert status == 0, f"{block}: {command}\n{printed}"
        assert says(printed, output), f"{block}: {command}\n{printed}"
        assert block.tag == "sh" or "[info " not in printed, "a server's log is among what people are shown"


def test_what_a_page_says_and_is_not_so_is_found(first: Place) -> None:
    """The control: another exit status, or other words."""
    assert first.script("true; false # exit 1")[0] == 0
    assert first.script("false # exit 3")[0] != 0
    assert first.script("false\ntrue")[0] != 0
    assert says("a 1\n b", "a …\nb")
    assert not says("a 1\n b", "a\nb")
