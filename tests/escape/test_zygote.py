"""I8, I9: sandboxes forked from one zygote have nothing of it, or of each other, but what the documentation says.

Real zygotes. Each guard has a control: the same attempt where the guard is left out, or where it has to work.
"""

import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures import leftovers, zygotes
from tests.fixtures.leftovers import until
from tests.fixtures.zygotes import answer, inside, outcome_of, zygote

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.session import connection
from glovebox_sandboxes.session.connection import host_namespaces

pytestmark = pytest.mark.driver("bubblewrap")
THREAT_MODEL = Path(__file__).parents[2] / "docs" / "operate" / "threat-model.md"

#: Preloaded, so that every generator was used before the forks, and what is drawn once is drawn.
USED = """
import multiprocessing, os, random, secrets, ssl, tempfile, uuid
ssl.RAND_bytes(16), random.random(), uuid.uuid4(), uuid.getnode(), next(tempfile._get_candidate_names())
multiprocessing.current_process().authkey
try:
    import numpy
    numpy.random.rand()
except ImportError:
    numpy = None
"""
DRAW = """
import json, multiprocessing, os, random, secrets, ssl, tempfile, uuid
import used
found = {
    "os.urandom": os.urandom(16).hex(), "secrets": secrets.token_hex(16), "ssl": ssl.RAND_bytes(16).hex(),
    "random": random.random(), "uuid4": str(uuid.uuid4()), "uuid1": str(uuid.uuid1()),
    "tempfile": next(tempfile._get_candidate_names()), "mkstemp": tempfile.mkstemp()[1],
    "authkey": bytes(multiprocessing.current_process().authkey).hex(),
}
if used.numpy:
    found["numpy, the old way"] = used.numpy.random.rand()
    found["numpy"] = used.numpy.random.default_rng().random()
print(json.dumps(found))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A directory that a sandbox may read, with a module to preload."""
    found = tmp_path / "workspace"
    found.mkdir()
    found.chmod(0o755)
    (found / "used.py").write_text(USED)
    return found


@pytest.fixture(autouse=True, params=["c", "python"])
def process_1(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What process 1 is: C, as where it was built, or Python."""
    if request.param == "python":
        monkeypatch.setattr(guest_tree, "process_1", lambda: ("", ""))
    elif why := guest_tree.process_1()[1]:
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(params=["groups", "rlimits"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With control groups, and as on a host that lets nobody make any."""
    if request.param == "rlimits":
        monkeypatch.setattr(cgroup, "detect", lambda _: None)
    return str(request.param)


async def _drawn(workspace: Path, before: str = "") -> list[dict[str, Any]]:
    async with zygote(workspace, preload=("used",), before=before) as forks:
        return [await forks.answer(DRAW) for _ in range(3)]


async def test_forks_draw_different_numbers(workspace: Path) -> None:
    """I8: whatever a program may draw from, also where the zygote had used it before."""
    found = await _drawn(workspace)
    same = [name for name in found[0] if len({each[name] for each in found}) < len(found)]
    assert same == []


async def test_forks_draw_the_same_where_nothing_is_drawn_anew(workspace: Path) -> None:
    """I8, the control: without the guard they share what no library of theirs draws anew by itself."""
    found = await _drawn(workspace, "zygote.reseed = lambda: None")
    same = {name for name in found[0] if len({each[name] for each in found}) == 1}
    assert same >= {"authkey"} | ({"numpy, the old way"} & set(found[0]))


COMMON = """
import ctypes, json, os, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(attempt):
    try:
        return attempt()
    except OSError:
        return None
def unix(use):
    end = socket.socket(socket.AF_UNIX)
    getattr(end, use)("\\0left")
    return end
def connected():
    with socket.socket() as end:
        end.settimeout(5)
        return end.connect_ex(("127.0.0.1", 4747)) == 0
"""
LEAVE = (
    COMMON
    + """
os.environ["LEFT"] = "behind"
for where in ("/tmp", "/dev/shm", "/output"):
    with open(where + "/left", "w") as file:
        file.write("behind")
listener = socket.socket(); listener.bind(("127.0.0.1", 4747)); listener.listen()
abstract = tried(lambda: unix("bind"))
terminal = tried(lambda: os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
libc.shmget(4747, 4096, 0o1666), libc.msgget(4747, 0o1666), libc.semget(4747, 1, 0o1666)
libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o600, None)
libc.syscall(248, b"user", b"left", b"behind", 6, -5)  # add_key, to the user's session
if os.fork() == 0:
    os.setsid(); time.sleep(600)
"""
)
#: Names of what another program finds.
LOOK = (
    COMMON
    + """
attempts = {
    "environment": lambda: "LEFT" in os.environ,
    "/tmp": lambda: os.listdir("/tmp"),
    "/dev/shm": lambda: os.listdir("/dev/shm"),
    "/output": lambda: os.listdir("/output"),
    "/output, by name": lambda: os.path.exists("/output/left"),
    "/input": lambda: os.listdir("/input"),
    "port": connected,
    "abstract": lambda: unix("connect"),
    "sockets": lambda: "@left" in open("/proc/net/unix").read(),
    "shared memory": lambda: libc.shmget(4747, 4096, 0) != -1,
    "messages": lambda: libc.msgget(4747, 0) != -1,
    "semaphores": lambda: libc.semget(4747, 1, 0) != -1,
    "POSIX messages": lambda: libc.mq_open(b"/left", os.O_RDWR) != -1,
    "SysV": lambda: any(len(open("/proc/sysvipc/" + each).readlines()) > 1 for each in ("shm", "msg", "sem")),
    "terminals": lambda: [each for each in os.listdir("/dev/pts") if each != "ptmx"],
    "processes": lambda: [each for each in os.listdir("/proc") if each.isdigit() and int(each) not in (1, os.getpid())],
    "key": lambda: libc.syscall(249, b"user", b"left", 0, 0) != -1,
}
found = sorted(name for name, attempt in attempts.items() if tried(attempt))
"""
)
#: What whoever left it finds himself; everything else of these is refused to everybody.
LEFT = {"environment", "/tmp", "/dev/shm", "/output, by name", "port", "processes"}  # noqa: S108 - in a sandbox
TELL = "\nprint(json.dumps(found), flush=True)\n"
GO_ON = "\nimport time\ntime.sleep(600)\n"


async def test_what_one_leaves_no_other_finds(workspace: Path, limits: str) -> None:
    """I9: neither one that was forked before, nor one after; while the first goes on, nor when it is gone."""
    async with zygote(workspace, name=limits) as forks, forks.one() as before:
        async with forks.busy(LEAVE + LOOK + TELL + GO_ON) as (_, own):
            assert {*own} >= LEFT, "control: there is something to be found"
            assert await answer(before, LOOK + TELL) == []
            assert await forks.answer(LOOK + TELL) == []
        assert await forks.answer(LOOK + TELL) == []


#: 24 bytes that are nowhere as they are: built when they are needed.
CANARY = "canary = bytes(each ^ 0x5A for each in bytes.fromhex({told!r}))\n"
SCAN = """
import json
found = 0
for line in open("/proc/self/maps"):
    where, rights, *_ = line.split()
    if rights.startswith("rw"):
        first, last = (int(each, 16) for each in where.split("-"))
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            try:
                memory.seek(first)
                # Its own words for it end before the sign that only the other's have.
                found += memory.read(last - first).count(canary + bytes([35]))
            except (OSError, ValueError, OverflowError):
                pass
"""


async def test_what_one_has_in_memory_no_other_has(workspace: Path) -> None:
    """I8: not the fork that was there before, not the one after, and not the zygote."""
    secret = os.urandom(24)
    canary = CANARY.format(told=bytes(each ^ 0x5A for each in secret).hex())
    keep = canary + "kept = [canary + bytes([35]) for _ in range(100)]\n"
    async with zygote(workspace) as forks, forks.one() as before:
        async with forks.busy(keep + SCAN + TELL + GO_ON) as (proved, own):
            assert own >= 100, "control: the scan finds what is there"
            if os.geteuid() == 0:
                assert max(zygotes.holds(pid, secret) for pid in inside(proved)) >= 100, "control: and so does ours"
                assert zygotes.holds(forks.pid, secret) == 0
            assert await answer(before, canary + SCAN + TELL) == 0
            assert await forks.answer(canary + SCAN + TELL) == 0
        if os.geteuid() == 0:
            assert zygotes.holds(forks.pid, secret) == 0


ATTACK = """
import ctypes, errno, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
seen = sorted(int(each) for each in os.listdir("/proc") if each.isdigit())
killed = []
for pid in [*range(3, 40000), -1, 1, 0][:-1]:
    if pid == os.getpid():
        continue
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as problem:
        continue
    killed.append(pid)
ctypes.set_errno(0)
traced = [libc.ptrace(16, pid, 0, 0) for pid in (1, *OUTSIDE)]
def opens(path):
    try:
        open(path, "rb").close()
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "opened"
print(json.dumps({
    "seen": seen, "killed": killed, "traced": traced,
    "outside": [opens(f"/proc/{pid}/mem") for pid in OUTSIDE],
    "guest": [opens("/proc/1/mem"), opens("/proc/1/environ")],
}), flush=True)
"""


async def test_a_sandbox_cannot_see_signal_or_trace_its_zygote_or_a_sibling(workspace: Path) -> None:
    """It kills every number there is, also theirs on the host: they go on. What it sees is its guest and itself."""
    async with zygote(workspace) as forks, forks.one() as sibling:
        outside = [forks.pid, *inside(sibling)]
        found = await forks.answer(f"OUTSIDE = {outside!r}\n" + ATTACK)
        assert len(found["seen"]) == 2
        # kill(-1) reaches everybody but oneself and process 1, and 1 takes no signal that it does not handle.
        assert set(found["killed"]) <= {-1, 1}
        assert set(found["traced"]) == {-1}
        assert set(found["outside"]) == {"ENOENT"}
        assert found["guest"] == ["EACCES", "EACCES"]
        assert Path(f"/proc/{forks.pid}").exists()
        assert await answer(sibling, "print(1)") == 1
        assert await forks.answer("print(2)") == 2


async def test_no_descriptor_of_the_zygote_is_open_in_what_it_forked(workspace: Path) -> None:
    """Neither in the guest nor in the program: whoever held its socket could give it orders."""
    if os.geteuid() != 0:
        pytest.skip("only root sees what another user's process has open")
    program = """
import json, os
print(json.dumps({n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{n}")}), flush=True)
"""
    async with zygote(workspace) as forks, forks.one() as sibling:
        orders = set(zygotes.descriptors(forks.pid).values())
        kinds = sorted({each.partition(":")[0] for each in orders})
        assert kinds == ["/dev/null", "/memfd", "socket"], "control: it has one, and nothing of what it rehearsed with"
        children = Path(f"/proc/{forks.pid}/task/{forks.pid}/children").read_text().split()
        assert [int(pid) for pid in children] == inside(sibling)[:1]
        async with forks.busy(program + GO_ON) as (proved, own):
            assert sorted(own) == ["0", "1", "2", "3", "4"]
            assert proved.measured.descriptors == []
            for pid in inside(proved):
                held = set(zygotes.descriptors(pid).values())
                assert not held & {each for each in orders if each.startswith(("socket:", "pipe:"))}
                siblings = {link for other in inside(sibling) for link in zygotes.descriptors(other).values()}
                assert not {each for each in held & siblings if each.startswith(("socket:", "pipe:"))}
        # And the zygote has not kept anything of theirs.
        assert set(zygotes.descriptors(forks.pid).values()) == orders


SHARED = """
import json
(libc, *_) = [line.split("-")[0] for line in open("/proc/self/maps") if "libc.so" in line]
print(json.dumps([hash("x"), id(json), libc]))
"""


async def test_what_forks_share_is_what_the_threat_model_says(workspace: Path) -> None:
    """Hash seed and addresses, for as long as the zygote lives; another zygote has others."""
    async with zygote(workspace) as forks:
        first, second = await forks.answer(SHARED), await forks.answer(SHARED)
    async with zygote(workspace) as forks:
        other = await forks.answer(SHARED)
    assert first == second
    assert all(one != another for one, another in zip(first, other, strict=True))
    text = " ".join(THREAT_MODEL.read_text().split())
    assert "hash seed" in text
    assert "address" in text


async def test_every_fork_is_in_namespaces_of_its_own(workspace: Path, limits: str) -> None:
    """Not the host's, not the zygote's, and not a sibling's."""
    async with zygote(workspace, name=limits) as forks, forks.one() as first, forks.one() as second:
        kinds = {"mnt", "pid", "net", "ipc", "uts", "user", *(["cgroup"] if limits == "groups" else [])}
        own = {kind: (Path(f"/proc/{forks.pid}/ns") / kind).stat().st_ino for kind in kinds}
        for kind in kinds:
            seen = [host_namespaces()[kind], own[kind]]
            seen += [first.measured.namespaces[kind], second.measured.namespaces[kind]]
            assert len(set(seen)) == 4, kind


async def test_every_fork_is_another_user_of_the_host(workspace: Path) -> None:
    """What the kernel counts per user is no way for one to starve another, or to tell it something."""
    if os.geteuid() != 0:
        pytest.skip("a normal user can be nobody else")

    def user(pid: int) -> set[str]:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {number for line in status if line.startswith(("Uid:", "Gid:")) for number in line.split()[1:]}

    async with zygote(workspace) as forks, AsyncExitStack() as stack:
        # Three: drawn by chance from 65,536, two are the same once in 20,000 runs.
        found = [await stack.enter_async_context(forks.one()) for _ in range(3)]
        users = [user(inside(each)[0]) for each in found]
        for each in (user(forks.pid), *users):
            assert len(each) == 1
            assert each.isdisjoint({"0", str(os.getuid())})
        everybody = set.union(*users)
        assert len(everybody) == len(users)
        # And the zygote is itself again: nobody who has a fork's user could signal it.
        await until(lambda: user(forks.pid).isdisjoint(everybody))


#: Paths that are there are to be found: what a zygote has to look for is in its last argument.
MASKS = """import json, sys
config = json.loads(sys.argv[-1])
config["hidden"], config["masked"] = ["/etc", "/none"], ["/workspace/used.py", "/workspace/", "/output/"]
sys.argv[-1] = json.dumps(config)""".replace("\n", "; ")


def _sharing(flag: int) -> str:
    return f"zygote._NEW_NAMESPACES &= ~{flag:#x}"


@pytest.mark.parametrize(
    ("before", "line", "told"),
    [
        ("pass", "", ""),
        ("zygote.kernel.drop_capabilities = lambda: None", "    drop_capabilities();\n", "capabilities"),
        (_sharing(0x2000_0000), "CLONE_NEWPID | ", "/proc"),
        (
            "zygote.serve = (lambda serve: lambda config: serve({**config, 'filter': ''}))(zygote.serve)",
            '    require(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &plan.filter, 0, 0) == 0, "PR_SET_SECCOMP");\n',
            "seccomp",
        ),
        (_sharing(0x4000_0000), "CLONE_NEWNET | ", "Operation not permitted"),
        (_sharing(0x0800_0000), "CLONE_NEWIPC | ", "ipc"),
        ("zygote.reseed = zygote.os.pipe", "    close(pidfd);\n", "open descriptors"),
        (MASKS, "", "['/etc', '/workspace/used.py', '/workspace/']"),
    ],
    ids=["nothing", "capabilities", "pid", "filter", "net", "ipc", "descriptors", "masks"],
)
async def test_what_a_zygote_leaves_out_is_found_in_every_fork(
    workspace: Path, before: str, line: str, told: str, process_1: str
) -> None:
    """A fork is measured like any other sandbox: from inside, and by the host. The control is one with all of it."""
    if process_1 == "c" and line:
        before = zygotes.without(line, workspace)
    async with zygote(workspace, before=before) as forks, forks.source.open() as sandbox:
        try:
            differences = (await connection.attest(sandbox, forks.plan)).attestation.differences
            found = " ".join(str(each) for each in differences)
        except SandboxError as problem:
            found = str(problem)
    assert told in found
    assert bool(found) == bool(told)


@pytest.mark.parametrize("end", ["os.waitpid(child, 0)", "os.read(reading, 1)"], ids=["reaped", "still there"])
async def test_what_children_use_counts(workspace: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Where no group counts, the guest reads one process's time only if it was alone and had no children."""
    monkeypatch.setattr(cgroup, "detect", lambda _: None)
    spend = "while time.process_time() < 0.3:\n        pass\n    os.write(writing, b'x')\n    "
    last = "os._exit(0)" if "waitpid" in end else "time.sleep(600)"
    code = f"reading, writing = os.pipe()\nchild = os.fork()\nif child == 0:\n    {spend}{last}\n{end}"
    async with zygote(workspace, name="rlimits") as forks, forks.one() as proved:
        used = (await outcome_of(proved, f"import os, time\n{code}")).usage
    assert used.cpu_from == "guest"
    assert used.cpu_ms is not None
    assert used.cpu_ms >= 300


CRASHES = {
    "segfault": "import ctypes; ctypes.string_at(0)",
    "exit": "import os; os._exit(3)",
    "memory": "x = b'x'\nwhile True: x += x",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "floods": "while True: print('x' * 65536)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "forged frames": "import os\nfor n in range(64):\n    try: os.write(n, b'\\xff' * 4096)\n    except OSError: pass",
}


@pytest.mark.parametrize("code", CRASHES.values(), ids=CRASHES)
async def test_a_sandbox_that_crashes_takes_nothing_with_it(workspace: Path, limits: str, code: str) -> None:
    """The zygote reads nothing of theirs: whatever one does, it is the same process afterwards, and so are siblings."""
    async with zygote(workspace, name=limits) as forks, forks.one() as sibling:
        async with forks.one() as proved:
            with anyio.move_on_after(1.5):
                await outcome_of(proved, f"import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n{code}")
        assert zygotes.running(os.getpid()) == [forks.pid]
        assert await answer(sibling, "print(1)") == 1
        assert await forks.answer("print(2)") == 2


async def test_a_sandbox_whose_first_process_is_killed_takes_nothing_with_it(workspace: Path, limits: str) -> None:
    """By root, who can: its own call fails, and no other."""
    if os.geteuid() != 0:
        pytest.skip("its first process can be killed by root alone")
    async with zygote(workspace, name=limits) as forks, forks.one() as sibling:
        async with forks.one() as proved:
            os.kill(inside(proved)[0], signal.SIGKILL)
            with pytest.raises(SandboxError):
                await outcome_of(proved, "print(1)")
        assert zygotes.running(os.getpid()) == [forks.pid]
        assert await answer(sibling, "print(1)") == 1
        assert await forks.answer("print(2)") == 2


async def test_a_killed_zygote_ends_what_it_forked_and_forks_no_more(workspace: Path, limits: str) -> None:
    """SIGKILL: a call under way fails as unavailable, and so does the next fork; nothing hangs, nothing is left."""
    async with zygote(workspace, name=limits) as forks:
        async with forks.one() as waiting, forks.one() as busy:
            everything = leftovers.family(os.getpid())
            failed = []

            async def call() -> None:
                with pytest.raises(SandboxError) as caught:
                    await outcome_of(busy, "import time; time.sleep(600)")
                failed.append(caught.value)

            with anyio.fail_after(leftovers.TIMEOUT_SECONDS):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    await until(lambda: len(inside(busy)) >= 2)
                    os.kill(forks.pid, signal.SIGKILL)
                with pytest.raises(anyio.EndOfStream):
                    await waiting.sandbox.channel.receive()
            assert failed
            with pytest.raises(SandboxError), anyio.fail_after(leftovers.TIMEOUT_SECONDS):
                await forks.answer("print(1)")
        assert not [each for each in leftovers.alive(everything) if each.pid in (forks.pid, *inside(busy))]


async def test_a_module_that_cannot_be_imported_is_told_by_name(workspace: Path) -> None:
    """And one that ends the process is no zygote either."""
    (workspace / "broken.py").write_text("raise ValueError('not\\nthis \\x1b[2J')")
    (workspace / "leaves.py").write_text("import os; os._exit(0)")
    for preload, words in (("used", "broken"), r"broken: ValueError: not"), (("leaves",), "ended without a word"):
        told = pytest.RaisesExc(SandboxError, match=words)
        with pytest.RaisesGroup(told, allow_unwrapped=True, flatten_subgroups=True):
            async with zygote(workspace, preload=preload):
                pytest.fail("it is ready")
    assert zygotes.running(os.getpid()) == []


async def test_forking_under_load_leaks_nothing(workspace: Path, limits: str) -> None:
    """A few hundred, some cancelled at any moment: no descriptor, process or group stays, here or in the zygote."""
    async with zygote(workspace, name=limits) as forks:
        await forks.answer("print(1)")
        ours, theirs = len(list(Path("/proc/self/fd").iterdir())), len(list(Path(f"/proc/{forks.pid}/fd").iterdir()))
        turns = anyio.CapacityLimiter(8)

        async def one(number: int) -> None:
            async with turns:
                with anyio.move_on_after(0.0005 * (number % 40) if number % 3 else 60):
                    assert await forks.answer("print(1)") == 1

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(one, number)
        assert len(list(Path("/proc/self/fd").iterdir())) == ours
        await until(lambda: len(list(Path(f"/proc/{forks.pid}/fd").iterdir())) == theirs)
        below = [each for each in leftovers.family(forks.pid) if each.runs()]
        await until(lambda: not leftovers.alive(below))
        assert await forks.answer("print(2)") == 2
    await until(lambda: not leftovers.groups(os.getpid()))
