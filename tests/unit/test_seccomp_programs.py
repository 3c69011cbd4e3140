"""Ordinary programs do not notice the filter: the standard library's ways to the kernel still work."""

import errno
import platform

import pytest
from tests.fixtures import bubblewrap

from glovebox_sandboxes.seccomp import bpf, load
from glovebox_sandboxes.seccomp.filters import compile_policy

pytestmark = pytest.mark.driver("bubblewrap")

#: Name and program; each must print exactly "fine". One process each: what one leaves behind cannot help the next.
PROGRAMS = {
    "threads": """
import concurrent.futures, threading
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]
lock = threading.Lock()
assert lock.acquire(timeout=0.01)
""",
    "processes": """
import multiprocessing, os, signal, subprocess
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert subprocess.run(["/bin/sh", "-c", "echo hi"], capture_output=True).stdout == b"hi\\n"
sleeper = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
signal.pidfd_send_signal(os.pidfd_open(sleeper.pid), signal.SIGKILL)
assert sleeper.wait() == -signal.SIGKILL
assert os.posix_spawn("/bin/true", ["true"], {}) > 0
os.wait()
""",
    "shared memory": """
import mmap, os
from multiprocessing import shared_memory, Semaphore
block = shared_memory.SharedMemory(create=True, size=1 << 20)
block.buf[:2] = b"ok"
block.close(); block.unlink()
assert Semaphore(1).acquire(timeout=1)
memory = os.memfd_create("x")
os.ftruncate(memory, 4096)
mmap.mmap(memory, 4096).resize(8192)
""",
    "files": """
import os, shutil, tarfile, tempfile, zipfile
folder = tempfile.mkdtemp()
os.chdir(folder)
open("a", "w").write("x" * 100000)
shutil.copy2("a", "b"); shutil.move("b", "c"); os.link("a", "d"); os.symlink("a", "e"); os.mkfifo("f")
os.chmod("c", 0o600); os.utime("c"); os.truncate("c", 5); os.listxattr("c"); os.replace("c", "g")
with zipfile.ZipFile("z.zip", "w") as archive: archive.write("a")
with tarfile.open("t.tar", "w:gz") as archive: archive.add("a")
with tarfile.open("t.tar") as archive: archive.extractall("out")
assert sorted(os.listdir())[0] == "a" and shutil.disk_usage(".").total
os.copy_file_range(os.open("a", os.O_RDONLY), os.open("h", os.O_RDWR | os.O_CREAT), 10)
shutil.rmtree(folder)
""",
    "databases": """
import sqlite3
base = sqlite3.connect("file:/tmp/x.db?vfs=unix-dotfile", uri=True) # as the guest has it by itself
base.execute("pragma locking_mode=exclusive"); base.execute("pragma journal_mode=wal")
base.execute("create table t(a)"); base.execute("insert into t values (1)"); base.commit()
assert base.execute("select a from t").fetchall() == [(1,)]
""",
    "loopback": """
import asyncio, socket, ssl, threading, http.server, urllib.request
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
assert urllib.request.urlopen(f"http://localhost:{server.server_port}/etc/hostname").status == 200
ssl.create_default_context()
async def echo():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""
    process = await asyncio.create_subprocess_exec("/bin/true")
    assert await process.wait() == 0
asyncio.run(echo())
assert socket.if_nametoindex("lo") == 1
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
""",
    "system": """
import ctypes, getpass, locale, os, platform, pty, pwd, random, resource, secrets, signal, sys, time, uuid
os.cpu_count(); os.sched_getaffinity(0); os.getloadavg(); platform.platform(); resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); os.urandom(8); secrets.token_hex()
uuid.uuid4(); time.sleep(0.001)
signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.setitimer(signal.ITIMER_REAL, 0.001)
assert not sys.stdin.isatty()
master, slave = pty.openpty(); assert os.isatty(slave); os.get_terminal_size(slave)
""",
    "narrowing": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(4, 0, 0, 0, 0) == 0
assert libc.syscall(444, None, 0, 1) >= 1
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs_work_under_the_filter(name: str) -> None:
    """The program ends well with the filter; without it, as a control, it does too."""
    program = PROGRAMS[name] + '\nprint("fine")\n'
    for filter_program in (None, bpf()):
        done = bubblewrap.run(program, seccomp=filter_program)
        assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_the_filter_counts_as_one_in_the_kernel() -> None:
    """Mode 2 is what the guest measures: /proc/self/status says that a filter is there. Control: 0 without."""
    program = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Seccomp:')])"
    assert bubblewrap.run(program, seccomp=bpf()).stdout == "['2']\n"
    assert bubblewrap.run(program).stdout == "['0']\n"


def test_a_refused_thread_call_falls_back() -> None:
    """Threads start although clone3 is refused: ENOSYS makes libc use clone. Control: EPERM would be final."""
    program = "import threading\nt = threading.Thread(target=print, args=('fine',))\nt.start()\nt.join()"
    assert bubblewrap.run(program, seccomp=bpf()).stdout == "fine\n"
    policy = load()
    final = tuple(group.model_copy(update={"errno": errno.EPERM}) for group in policy.refuse)
    without_fallback = compile_policy(policy.model_copy(update={"refuse": final}), platform.machine())
    assert "can't start new thread" in bubblewrap.run(program, seccomp=without_fallback).stderr
