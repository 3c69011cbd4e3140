"""The commands of the pages for people, run as they are typed: tests/repo/pages.py says how a page marks them.

The blocks of one page run in order, in a copy of the repository and a home of their own that already hold one call.
Lines that fetch from a network (``git clone``, ``make``) are left out; of ``$ make demo`` the last step is run.
"""

import json
import os
import re
import shlex
import shutil
import subprocess  # noqa: TID251 - runs a shell on what our own pages say
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.repo.files import ROOT, committed
from tests.repo.pages import Block, blocks, pages

pytestmark = pytest.mark.driver("bubblewrap")

FETCHES = ("git clone ", "make ")
#: For one block on a busy machine; the longest takes five by itself.
TIMEOUT_SECONDS = 120
LAST_STEP = {"make demo": ".venv/bin/python scripts/demo.py"}
BINARIES = Path(sys.executable).parent
RUN = {page: found for page, text in pages().items() if (found := [block for block in blocks(page, text) if block.run])}

_EXIT = re.compile(r"^(?P<command>.*\S) +# exit (?P<code>[0-9]+)\b.*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page's commands run, and what its examples stand for there."""

    directory: Path
    environment: dict[str, str]
    stands_for: dict[str, str]

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


@pytest.fixture
def place(repository: Path, runtime_dir: Path, tmp_path: Path) -> Place:
    """The copy, a home of its own, and in it the records of one call that left a file."""
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{BINARIES}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "GLOVEBOX_DATA_DIR": str(runtime_dir),
    }
    here = Place(directory=repository, environment=environment, stands_for={})
    program = json.dumps({"code": "open('/output/notes.txt', 'w').write('1')"})
    status, printed = here.script(f"glovebox call run_python --json --args {shlex.quote(program)}")
    assert status == 0, printed
    call = json.loads(printed)
    _, head = here.script("glovebox audit head")
    examples = {
        "c_01h…": call["call_id"],
        "artifact://5b0e…": call["artifacts"][0]["uri"],
        "SEQ:HASH": head.strip(),
        "STATE": str(tmp_path / ".local/state/glovebox"),
    }
    return replace(here, stands_for=examples)


def shown(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a ``console`` block, and what it is shown to print."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield LAST_STEP.get(command, command), output


def says(printed: str, expected: str) -> bool:
    """Whether that is what was printed: ``…`` stands for anything, and lines may break elsewhere."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("…")]
    return re.fullmatch(r"\s*.*\s*".join(parts), " ".join(printed.split())) is not None


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_work_as_typed(page: str, place: Place) -> None:
    """Each ends as the page says, and prints what it shows."""
    for block in RUN[page]:
        if block.tag == "sh":
            status, printed = place.script(block.text)
            assert status == 0, f"{block}:\n{printed}"
            continue
        for command, output in shown(block):
            status, printed = place.script(command)
            assert status == 0, f"{block}: {command}\n{printed}"
            assert says(printed, output), f"{block}: {command}\n{printed}"
            assert "[info " not in printed, "a server's log is among what people are shown"


def test_what_a_page_says_and_is_not_so_is_found(place: Place) -> None:
    """The control: another exit status, or other words."""
    assert place.script("true; false # exit 1")[0] == 0
    assert place.script("false # exit 3")[0] != 0
    assert place.script("false\ntrue")[0] != 0
    assert says("a 1\n b", "a …\nb")
    assert not says("a 1\n b", "a\nb")
