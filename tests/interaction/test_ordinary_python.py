"""What Python programs ordinarily do works in ``run_python`` as ``glovebox serve`` has it, read over MCP."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mcp_types as types
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

GLOVEBOX = str(Path(sys.executable).with_name("glovebox"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program, and what has to come of it."""

    does: str
    code: str
    value: str | None = None
    """The last expression's."""
    reads: str = ""
    """Part of the text that comes back."""
    pictures: int = 0


PROGRAMS = [
    Program(
        does="writes to a closed pipe, with a figure open",
        code="""
import os
import matplotlib.pyplot as plt
plt.plot([1, 2])
reader, writer = os.pipe()
os.close(reader)
os.write(writer, b"x")
""",
        reads='line 7, in <module>\n    os.write(writer, b"x")\nBrokenPipeError: [Errno 32] Broken pipe',
        pictures=1,
    ),
    Program(
        does="keeps open as an attribute of a class",
        code="""
class Store:
    open = open
Store().open("/tmp/x", "w").write("a")
""",
        value="1",
    ),
    Program(
        does="starts an interpreter, which draws with its packages",
        code="""
import subprocess, sys
drawing = "import pandas, matplotlib.pyplot as plt; plt.plot([1]); plt.savefig('/output/plot.png')"
subprocess.run([sys.executable, "-c", drawing], check=True).returncode
""",
        value="0",
        pictures=1,
    ),
    Program(
        does="starts workers as joblib and multiprocessing do, which have its packages and not its folder's modules",
        code="""
import multiprocessing, os, subprocess, sys
import multiprocessing.util
flags = multiprocessing.util._args_from_interpreter_flags()
found = "import os, sys, pandas; print('' in sys.path or os.getcwd() in sys.path)"
print(subprocess.run([sys.executable, *flags, "-c", found], check=True, capture_output=True, text=True).stdout)
with multiprocessing.get_context("spawn").Pool(2) as pool:
    sizes = pool.map(len, [[1], [2, 3]])
sizes
""",
        value="[1, 2]",
        reads="False\n",
    ),
    Program(
        does="talks to a server of its own by name, in the environment's locale",
        code="""
import asyncio, locale
locale.setlocale(locale.LC_ALL, "")
async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "localhost", 0)
    reader, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
    writer.close()
    return await reader.read()
asyncio.run(main())
""",
        value="b''",
    ),
    Program(
        does="is a notebook's cell",
        code="""
%matplotlib inline
import asyncio, matplotlib.pyplot as plt, pandas as pd
display(pd.DataFrame({"region": ["north"]}))
plt.plot([1, 2])
queue = asyncio.Queue()
await queue.put(7)
await queue.get();  # not shown
""",
        reads="  region\n0  north\n",
        pictures=1,
    ),
    Program(
        does="awaits in its last line",
        code="import asyncio\nawait asyncio.gather(*[asyncio.sleep(0, number) for number in range(3)])",
        value="[0, 1, 2]",
    ),
    Program(
        does="shares what a manager keeps with a pool",
        code="""
import multiprocessing
def add(number):
    kept.append(number)
with multiprocessing.Manager() as manager:
    kept = manager.list()
    with multiprocessing.Pool(2) as pool:
        pool.map(add, [1, 2, 3])
    numbers = sorted(kept)
numbers
""",
        value="[1, 2, 3]",
    ),
    Program(
        does="copies a file, and starts a binary that it brings along",
        code="""
import errno, os, shutil, subprocess, sys
shutil.copyfile(sys.executable, "/tmp/brought")
os.chmod("/tmp/brought", 0o755)
reader, writer = os.pipe()
try:
    os.splice(os.open("/tmp/brought", os.O_RDONLY), writer, 1)
except OSError as error:
    print(error.errno == errno.ENOSYS)
subprocess.run(["/tmp/brought", "-c", "print(6 * 7)"], capture_output=True).stdout
""",
        value="b'42\\n'",
        reads="True\n",
    ),
]


@pytest.fixture(scope="module")
def session(runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BlockingPortal, Client]]:
    """A client of one server for the whole module."""
    home = tmp_path_factory.mktemp("ordinary")
    home.chmod(0o755)
    workspace = home / "workspace"
    workspace.mkdir()
    options = ["--workspace", str(workspace), "--state-dir", str(home / "state"), "--data-dir", str(runtime_dir)]
    server = StdioServerParameters(command=GLOVEBOX, args=["serve", *options])
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:
        yield portal, client


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.does)
def test_an_ordinary_program_works(program: Program, session: tuple[BlockingPortal, Client]) -> None:
    """Its value, its text and its pictures are those of the same program elsewhere."""
    portal, client = session
    result = portal.call(client.call_tool, "run_python", {"code": program.code})
    text = "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))
    assert program.reads in text
    assert result.structured_content is not None
    assert result.structured_content["value"] == program.value, text
    assert [block.type for block in result.content].count("image") == program.pictures
