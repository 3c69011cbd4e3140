"""Process 1 in C and the guest in Python are one guest to the host: they measure, report and collect the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal
from tests.fixtures.zygotes import Forks, zygote

from glovebox_sandboxes.contract.outcome import Job
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.session import run
from glovebox_sandboxes.session.connection import StreamSink, whole

DIGEST, WHY = guest_tree.process_1()
pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.skipif(DIGEST == "", reason=WHY)]

#: Programs by what they try. What they print is compared, so none prints a time or a number of a process.
PROGRAMS = {
    "nothing": "",
    "all that it is": (
        "import os, resource, signal, sys\n"
        "kept = ('Uid', 'Gid', 'Groups', 'NSpid', 'NSsid', 'Umask', 'Threads', 'Sig', 'Shd', 'Cap', 'No', 'Sec')\n"
        "print(*(line for line in open('/proc/self/status') if line.startswith(kept)))\n"
        "print(open('/proc/self/oom_score_adj').read(), os.getcwd(), sorted(os.environ.items()), sys.path, sys.argv)\n"
        "print([resource.getrlimit(each) for each in range(16)], sorted(os.listdir('/proc/self/fd')))\n"
        "print([(each, signal.getsignal(each)) for each in signal.valid_signals()], sorted(os.listdir('/proc')))\n"
        "print([sorted(os.listdir(each)) for each in ('/tmp', '/dev', '/dev/shm', '/dev/pts', '/input')])\n"
        "print(open('/proc/sys/user/max_user_namespaces').read())\n"
    ),
    "both streams": "import sys; print(1); print(2, file=sys.stderr); 3",
    "an error": "1/0",
    "an exit": "raise SystemExit(7)",
    "no harness": "import os; os._exit(9)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "its own end": "import os; os.write(4, bytes([5])); import time; time.sleep(60)",
    "many ends": "import os, time; os.write(4, b'\\1' * 1000); time.sleep(60)",
    "no end": "import os; os.close(4)",
    "no streams": "import os; os.closerange(0, 5); os._exit(3)",
    "forged results": "import os; [os.write(3, b'\\xff' * 4096) for _ in range(4)]",
    "a pipe of its own": "import os; os.write(2, b'x' * 9); os.open('/proc/self/fd/1', os.O_RDONLY)",
    "too much": "while True: print('x' * 65536)",
    "a megabyte": "print('0123456789abcdef' * 65536, end='')",
    "orphans": "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid(); os.fork(); os._exit(0)",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\nprint('left')",
    "a daemon, and no harness": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\nos._exit(0)",
    "a child that prints": "import os\nif os.fork() == 0:\n    print('child'); os._exit(0)\nos.wait(); print('parent')",
    "a name with brackets": "open('/proc/self/comm', 'w')",
    "time": "import time; open('/output/a', 'w').write('kept'); time.sleep(60)",
    "processor": "while True: pass",
    "a file": "open('/output/a', 'w').write('content')",
    "files": "import os\nos.makedirs('/output/b/c')\nfor n in 'xyz': open(f'/output/b/c/{n}', 'w').write(n * 100_000)",
    "no file": "import os; os.symlink('/etc/passwd', '/tmp/l'); os.mkdir('/output/d'); os.chmod('/output/d', 0)",
    "too many files": "[open(f'/output/{n:03}', 'w').write('.') for n in range(20)]",
    "a file from elsewhere": "import os; open('/output/one', 'w').write('1'); os.link('/output/one', '/output/two')",
    "a file, and an error": "open('/output/a', 'w').write('content'); 1/0",
    "a file, and too much": "open('/output/a', 'w').write('content')\nwhile True: print('x' * 65536)",
    "an input": "import os; print(open('/input/in/put').read(), oct(os.stat('/input/in/put').st_mode))",
    "a large picture": (
        "import struct, zlib\n"
        "def part(kind, data):\n"
        "    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))\n"
        "head, rows = struct.pack('>IIBBBBB', 9000, 9000, 8, 0, 0, 0, 0), zlib.compress(bytes(9001) * 9000, 1)\n"
        "whole = part(b'IHDR', head) + part(b'IDAT', rows) + part(b'IEND', b'')\n"
        "open('/output/p.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + whole)"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory, portal: BlockingPortal) -> Iterator[tuple[Forks, Forks]]:
    """A zygote whose sandboxes have process 1 in C, and one whose have it in Python."""
    workspace = tmp_path_factory.mktemp("workspace")
    workspace.chmod(0o755)
    with portal.wrap_async_context_manager(zygote(workspace, name="c")) as in_c, pytest.MonkeyPatch.context() as patch:
        patch.setattr(guest_tree, "process_1", lambda: ("", ""))
        with portal.wrap_async_context_manager(zygote(workspace, name="python")) as in_python:
            yield in_c, in_python


async def _done(forks: Forks, code: str) -> dict[str, Any]:
    files: dict[str, bytes] = {}

    class Sink:
        def __init__(self, name: str) -> None:
            self.name = name

        async def data(self, data: bytes) -> None:
            files[self.name] = files.get(self.name, b"") + data

        async def end(self) -> None:
            files.setdefault(self.name, b"")

    async def file(name: str, _: int) -> StreamSink:
        return Sink(name)

    async with forks.one() as proved:
        job = Job(kind="python", payload={"code": code}, wall_seconds=2.0)
        inputs = [("in/put", whole(b"given"))] if "/input" in code else []
        found = await run.run(proved, job, inputs=inputs, hooks=run.Hooks(file=file))
    return {
        "end": (found.ended, found.code, found.reason), "streams": (found.stdout, found.stderr), "value": found.value,
        "skipped": found.skipped, "shown": found.shown, "problems": found.problems, "files": files,
    }  # fmt: skip


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_has_the_same_outcome_in_both(guests: tuple[Forks, Forks], portal: BlockingPortal, code: str) -> None:
    """All of it that no clock decides: end, output, value, files, what was left out and why."""
    in_c, in_python = (portal.call(_done, forks, code) for forks in guests)
    if "while True: print" in code:  # how much of it was read is chance
        assert in_c.pop("streams")[0].total_bytes > 0 < in_python.pop("streams")[0].total_bytes
    assert in_c == in_python


def test_both_measure_the_same(guests: tuple[Forks, Forks], portal: BlockingPortal) -> None:
    """Every field; of namespaces, which none shares, the names."""
    found = []
    for forks in guests:
        with portal.wrap_async_context_manager(forks.one()) as proved:
            measured = proved.measured.model_dump()
        assert len(set(measured["namespaces"].values())) == 7
        found.append({**measured, "namespaces": sorted(measured["namespaces"])})
    assert found[0] == found[1]


def test_the_plan_names_the_one_in_use(guests: tuple[Forks, Forks]) -> None:
    """By the digest of the library; there is none for Python."""
    assert [forks.plan.action["process_1"] for forks in guests] == [DIGEST, ""]
    loaded = [b"process_1." in Path(f"/proc/{forks.pid}/maps").read_bytes() for forks in guests]
    assert loaded == [True, False]
