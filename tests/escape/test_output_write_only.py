"""``/output`` can be written and not read (I9, F6): real processes under bubblewrap, each with its control run."""

import json
import platform
import socket
from pathlib import Path

import pytest
from tests.fixtures import bubblewrap

from glovebox_sandboxes.seccomp import load
from glovebox_sandboxes.seccomp.filters import compile_policy
from glovebox_sandboxes.seccomp.policy import FULL_MASK, Allow, Condition

pytestmark = pytest.mark.driver("bubblewrap")

GUEST = Path(__file__).parents[2] / "sandboxes" / "_glovebox_guest"
#: The modules as text: the sandbox's user may not be able to enter the folder they are in.
MODULES = (
    "import sys, types\nfor name in ('_glovebox_guest', '_glovebox_guest.program'):\n"
    "    sys.modules[name] = types.ModuleType(name)\n"
)
MODULES += "\n".join(
    f"{name.rpartition('.')[2]} = sys.modules['_glovebox_guest.{name}'] = types.ModuleType({name!r})\n"
    f"exec({GUEST.joinpath(*name.split('.')).with_suffix('.py').read_text()!r}, {name.rpartition('.')[2]}.__dict__)"
    for name in ("stdlib", "kernel", "landlock", "program.write_only")
)
LAYOUT = [part for name in ("usr", "bin", "lib", "lib64", "etc") for part in ("--ro-bind", f"/{name}", f"/{name}")]
LAYOUT += ["--proc", "/proc", "--dev", "/dev"]

#: Sockets of a path, which the shipped filter refuses altogether: here Landlock alone is to answer.
UNIX = Allow(
    id="unix",
    needed_by="these tests",
    syscalls=("socket",),
    when=(Condition(argument=0, mask=FULL_MASK, values=(("AF_UNIX", socket.AF_UNIX),)),),
)
#: The kernel's interface for confining oneself, without Landlock. bwrap needs it too.
PRCTL = Allow(id="prctl", needed_by="bwrap", syscalls=("prctl",), when=())

#: What is in place before the restriction: another process's files, and the guest as parent.
PREPARE = """
import json, os, socket, sys
os.makedirs("/output/deep/er")
open("/output/secret", "w").write("told to nobody")
open("/output/movable", "w").write("told to nobody")
open("/output/deep/program", "w").write("#!/bin/sh\\necho told")
os.chmod("/output/deep/program", 0o755)
open("/toplevel", "w").write("a file beside /output")
os.mkfifo("/same/fifo")
for name in ("here", "gone"):
    open(f"/same/{name}", "w").write("told to nobody")
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0guest")
listener.listen()
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
RESTRICT = """
write_only.open_without_reading()
reached = landlock.restrict_output_write_only()
assert reached == landlock.abi_version() > 0
"""
#: Runs every attempt of the table on stdin and prints the answers: "ok", an errno's name, or "exit" for a failed child.
ATTEMPT = """
import ctypes, errno, io, shutil, signal, sqlite3, subprocess, zipfile
def attempt(code):
    try:
        exec(code, globals())
    except subprocess.CalledProcessError:
        return "exit"
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "ok"
print(json.dumps({name: attempt(code) for name, code in json.load(sys.stdin).items()}))
"""

DENIED = {
    "read a file": ("open('/output/secret').read()", "EACCES"),
    "read it by descriptor": ("os.open('secret', os.O_RDONLY, dir_fd=os.open('/output', os.O_PATH))", "EACCES"),
    "write about itself in /proc": ("open('/proc/self/comm', 'w').write('x')", "EACCES"),
    "read it through /proc": ("open('/proc/self/root/output/secret').read()", "EACCES"),
    "read it after chdir": ("os.chdir('/output'); open('secret').read()", "EACCES"),
    "open it again for reading": ("open('/proc/self/fd/%d' % os.open('/output/secret', os.O_WRONLY)).read()", "EACCES"),
    "read what was just written": ("open('/output/own', 'w').write('x'); open('/output/own').read()", "EACCES"),
    "read and write": ("os.open('/output/secret', os.O_RDWR)", "EACCES"),
    "read in a child": ("subprocess.run(['/bin/cat', '/output/secret'], check=True)", "exit"),
    "read it through a link": ("os.symlink('/output/secret', '/tmp/way'); open('/tmp/way').read()", "EACCES"),
    "link it to where reading is allowed": ("os.link('/output/secret', '/same/linked')", "EACCES"),
    "move it to where reading is allowed": ("os.rename('/output/movable', '/same/moved')", "EACCES"),
    "list": ("os.listdir('/output')", "EACCES"),
    "list a directory beneath": ("os.listdir('/output/deep')", "EACCES"),
    "list the root": ("os.listdir('/')", "EACCES"),
    "run a file": ("subprocess.run(['/output/deep/program'])", "EACCES"),
    "make a link": ("os.symlink('/etc/passwd', '/output/link')", "EACCES"),
    "make a FIFO": ("os.mkfifo('/output/fifo')", "EACCES"),
    "make a socket": ("socket.socket(socket.AF_UNIX).bind('/output/socket')", "EACCES"),
    "write into a FIFO of a mount": ("open('/same/fifo', 'r+b', buffering=0).write(b'x')", "EACCES"),
    "write elsewhere": ("open('/same/there', 'w')", "EACCES"),
    "truncate elsewhere": ("os.truncate('/same/here', 0)", "EACCES"),
    "remove elsewhere": ("os.unlink('/same/gone')", "EACCES"),
    "make a directory elsewhere": ("os.mkdir('/same/made')", "EACCES"),
    "make a terminal": ("os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)", "EACCES"),
    "make a terminal for reading": ("os.open('/dev/pts/ptmx', os.O_RDONLY | os.O_NOCTTY)", "EACCES"),
    "signal the guest": ("os.kill(os.getppid(), 0)", "EPERM"),
    "reach an abstract socket": ("socket.socket(socket.AF_UNIX).connect('\\0guest')", "EPERM"),
}
ALLOWED = {
    "create": "open('/output/new', 'w').write('x')",
    "append": "open('/output/new', 'a').write('y')",
    "overwrite": "open('/output/secret', 'w').write('z')",
    "truncate": "os.truncate('/output/new', 1)",
    "make a directory": "os.mkdir('/output/made')",
    "write beneath": "open('/output/made/file', 'wb').write(b'x')",
    "rename in place": "os.replace('/output/new', '/output/renamed')",
    "move to a directory": "os.rename('/output/renamed', '/output/made/renamed')",
    "remove": "os.unlink('/output/made/renamed')",
    "see size": "os.stat('/output/secret')",
    "read and write mode": "open('/output/picture', 'w+b').write(b'x'); open('/output/fresh', 'x+').write('x')",
    "zip": "zipfile.ZipFile('/output/a.zip', 'w').writestr('x', 'y')",
    "copy from scratch": "open('/tmp/t', 'w').write('t'); shutil.copy2('/tmp/t', '/output/t')",
    "read elsewhere": "open('/etc/hostname').read(); open('/usr/bin/env', 'rb').read(1); open('/toplevel').read()",
    "list elsewhere": "os.listdir('/usr'); os.listdir('/bin'); os.listdir('/tmp'); os.listdir('/proc')",
    "everything in scratch": (
        "os.makedirs('/tmp/d/e'); open('/tmp/d/f', 'w+').read(); os.rename('/tmp/d/f', '/tmp/d/e/f')\n"
        "os.mkfifo('/tmp/fifo'); os.symlink('x', '/tmp/l'); socket.socket(socket.AF_UNIX).bind('/tmp/s')"
    ),
    "devices": (
        "open('/dev/null', 'w').write('x'); open('/dev/zero', 'r+b', buffering=0).read(1); os.listdir('/dev')\n"
        "open('/dev/urandom', 'rb').read(1)"
    ),
    "shared memory": "open('/dev/shm/x', 'w+').write('x'); os.unlink('/dev/shm/x')",
    "run programs": "subprocess.run(['/bin/true'], check=True)",
    "database in scratch": "sqlite3.connect('file:/tmp/x.db?vfs=unix-dotfile', uri=True).execute('create table t(a)')",
    "signal a child": "os.kill(subprocess.Popen(['/bin/sleep', '60']).pid, signal.SIGKILL); os.wait()",
    "signal itself": "os.kill(os.getpid(), 0)",
    "pipes": "os.read(0, 0); r, w = os.pipe(); open('/proc/self/fd/%d' % w, 'w')",
}


def _answers(*, restricted: bool) -> dict[str, str]:
    """Every attempt's answer, in one sandbox with a root of its own."""
    table = {name: code for name, (code, _) in DENIED.items()} | ALLOWED
    # Allowed attempts come last: they change /output.
    program = "\n".join([MODULES, PREPARE, RESTRICT if restricted else "", ATTEMPT])
    # /output and /same are on one file system: only Landlock keeps files from moving between them.
    options = ["--tmpfs", "/", *LAYOUT, "--tmpfs", bubblewrap.SCRATCH, "--dir", "/output", "--dir", "/same"]
    policy = load()
    permitting = compile_policy(policy.model_copy(update={"allow": (*policy.allow, UNIX)}), platform.machine())
    done = bubblewrap.run(program, stdin=json.dumps(table), seccomp=permitting, options=options)
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def restricted() -> dict[str, str]:
    """All attempts after the restriction, under the shipped seccomp filter (and sockets of a path)."""
    return _answers(restricted=True)


@pytest.fixture(scope="module")
def control() -> dict[str, str]:
    """The same attempts without the restriction."""
    return _answers(restricted=False)


@pytest.mark.parametrize("name", DENIED)
def test_reading_output_is_denied(name: str, restricted: dict[str, str], control: dict[str, str]) -> None:
    """The attempt fails with Landlock's errno; without the restriction it succeeds."""
    assert (restricted[name], control[name]) == (DENIED[name][1], "ok")


@pytest.mark.parametrize("name", ALLOWED)
def test_everything_else_stays(name: str, restricted: dict[str, str], control: dict[str, str]) -> None:
    """Writing to /output, and all work elsewhere, is as it was."""
    assert (restricted[name], control[name]) == ("ok", "ok")


def test_without_landlock_nothing_is_pretended() -> None:
    """Where the kernel or a filter refuses Landlock, the version is 0 and restricting raises. Control: above."""
    policy = load()
    allow = tuple(group for group in policy.allow if group.id != "narrowing")
    refusing = compile_policy(policy.model_copy(update={"allow": (*allow, PRCTL)}), platform.machine())
    program = """
assert landlock.abi_version() == 0
try:
    landlock.restrict_output_write_only()
except PermissionError as problem:
    print(problem)
"""
    done = bubblewrap.run(MODULES + program, seccomp=refusing, options=["--tmpfs", "/", *LAYOUT])
    assert "is Landlock in this kernel" in done.stdout, done.stderr
