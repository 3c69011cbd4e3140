"""``python -m tests.perf.covert [DRIVER]``: bits per second between two sandboxes through what their kernel shares.

One program sets as many bits as its channel has places, at the beginning of every slot of time; the other looks in the
middle of it. Clocks are the kernel's, so nobody has to agree on anything. Told is what a binary symmetric channel with
that share of wrong bits can carry, at the best of a few lengths of a slot: a channel that is closed carries nothing.
A person with patience gets more out of each; what matters is the order of magnitude, and which of them is none.
"""

import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
from rich.console import Console

from glovebox_sandboxes.contract.base import WORKSPACE, Driver, Limits, Mount, SandboxSpec
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.session import connection, run
from glovebox_sandboxes.session.connection import StreamSink
from glovebox_server.settings import Settings

SECONDS = 1.0  # of sending, for each length of a slot
LIMITS = Limits(
    wall_seconds=60, cpu_seconds=60, memory_bytes=512 * 2**20, pids=64, scratch_bytes=16 * 2**20, output_bytes=2**20,
    output_files=1, stream_bytes=2**16,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """What two programs do to say one bit per place; each part is Python inside the sandbox."""

    name: str
    shared: str  # what both do first; may set ``WIDTH``, the number of places
    send: str  # body of ``send(bits)``
    look: str  # body of ``look()``, which returns a list of bits
    slots: tuple[float, ...] = (0.0003, 0.001, 0.004, 0.016)  # lengths to try, in seconds


FILES = """
import glob, fcntl
FILES = sorted(glob.glob("/usr/lib/python3*/*.py"))[:64]
WIDTH = len(FILES)
"""
BIG = """
import mmap, glob
BLOCK = 65536  # the kernel maps so much around a page that is touched
BIG = max(glob.glob("/opt/packages/**/*.so*", recursive=True), key=lambda name: os.stat(name).st_size)
WIDTH = min(256, os.stat(BIG).st_size // BLOCK - 1)
descriptor = os.open(BIG, os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def mapped():
    return libc.mmap(None, (WIDTH + 1) * BLOCK, 1, 1, descriptor, 0)
"""

CHANNELS = (
    Channel(
        name="flock on files of the runtime",
        shared=FILES + "OPEN = [os.open(f, os.O_RDONLY) for f in FILES]",
        send="for fd, bit in zip(OPEN, bits): fcntl.flock(fd, fcntl.LOCK_EX if bit else fcntl.LOCK_UN)",
        look="""
found = []
for fd in OPEN:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        found.append(0)
    except BlockingIOError:
        found.append(1)
return found""",
    ),
    Channel(
        name="fcntl locks on one file of the runtime",
        shared=FILES + "import struct\nfd = os.open(FILES[0], os.O_RDONLY)",
        send="for at, bit in enumerate(bits): fcntl.lockf(fd, fcntl.LOCK_SH if bit else fcntl.LOCK_UN, 1, at)",
        look="""
found = []
for at in range(WIDTH):
    back = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhlli4x", fcntl.F_WRLCK, 0, at, 1, 0))
    found.append(int(struct.unpack("hhlli4x", back)[0] != fcntl.F_UNLCK))
return found""",
    ),
    Channel(
        name="flock on the inode of all eventfd and epoll descriptors",
        shared="import fcntl\nfd = os.eventfd(0)",
        send="fcntl.flock(fd, fcntl.LOCK_EX if bits[0] else fcntl.LOCK_UN)",
        look="""
try:
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_UN)
    return [0]
except BlockingIOError:
    return [1]""",
    ),
    Channel(
        name="times of /dev/null",
        shared="seen = [os.stat('/dev/null').st_mtime_ns]",
        send="if bits[0]: os.utime('/dev/null')",
        look="now = os.stat('/dev/null').st_mtime_ns\nchanged = now != seen[0]\nseen[0] = now\nreturn [int(changed)]",
        slots=(0.001, 0.004, 0.008, 0.016),
    ),
    Channel(
        name="page cache: one drops pages, the other asks whether they are there",
        shared=BIG,
        send="""
for at, bit in enumerate(bits):
    if bit: os.posix_fadvise(descriptor, at * BLOCK, BLOCK, os.POSIX_FADV_DONTNEED)
    else: os.pread(descriptor, 1, at * BLOCK)""",
        look="""
found = []
buffer = bytearray(1)
for at in range(WIDTH):
    try:
        found.append(int(os.preadv(descriptor, [buffer], at * BLOCK, os.RWF_NOWAIT) != 1))
    except BlockingIOError:
        found.append(1)
return found""",
        slots=(0.004, 0.016, 0.05, 0.2),
    ),
    Channel(
        name="futex on a page of a library",
        shared=BIG
        + """
import threading
where = mapped()
ctypes.string_at(where, 1)
word = ctypes.c_uint32.from_address(where).value
class T(ctypes.Structure): _fields_ = [("s", ctypes.c_long), ("n", ctypes.c_long)]
libc.syscall.argtypes = [ctypes.c_long] * 4 + [ctypes.c_void_p]
WIDTH = 1
""",
        send="if bits[0]: libc.syscall(202, where, 0, word, ctypes.byref(T(0, int(SLOT * 0.8e9))))",
        look="return [int(libc.syscall(202, where, 1, 1, None) == 1)]",
    ),
    Channel(
        name="who else maps a page (/proc/self/pagemap)",
        shared=BIG
        + """
base = mapped()
table = os.open("/proc/self/pagemap", os.O_RDONLY)
""",
        send="""
libc.madvise(base, WIDTH * BLOCK, 4)
for at, bit in enumerate(bits):
    if bit: ctypes.string_at(base + at * BLOCK, 1)""",
        look="""
for at in range(WIDTH): ctypes.string_at(base + at * BLOCK, 1)
return [int(not os.pread(table, 8, (base + at * BLOCK) // 4096 * 8)[7] & 1) for at in range(WIDTH)]""",
        slots=(0.001, 0.002, 0.004, 0.016),
    ),
    Channel(
        name="numbers of eventfds (/proc/self/fdinfo)",
        shared="""
held = []
def mine():
    fd = os.eventfd(0)
    text = open(f"/proc/self/fdinfo/{fd}").read()
    os.close(fd)
    return int(text.split("eventfd-id:")[1].split()[0])
own = [mine()]
""",
        send="""
if bits[0] and not held: held.append(os.eventfd(0))
elif not bits[0] and held: os.close(held.pop())""",
        look="now = mine()\nown[0] = min(own[0], now)\nreturn [int(now > own[0])]",
    ),
    Channel(
        name="inode numbers of pidfds, which count every process",
        shared="""
def number():
    child = os.fork()
    if child == 0: os._exit(0)
    fd = os.pidfd_open(child)
    found = os.fstat(fd).st_ino
    os.close(fd)
    os.waitpid(child, 0)
    return found
last = [number()]
""",
        send="""
if bits[0]:
    for _ in range(4):
        child = os.fork()
        if child == 0: os._exit(0)
        os.waitpid(child, 0)""",
        look="now = number()\nmore = now - last[0]\nlast[0] = now\nreturn [int(more > 3)]",
        slots=(0.004, 0.008, 0.016),
    ),
    Channel(
        name="open files of the machine (/proc/sys/fs/file-nr)",
        shared="""
held = []
def number(): return int(open("/proc/sys/fs/file-nr").read().split()[0])
""",
        send="""
if bits[0] and not held: held.extend(os.open("/dev/null", 0) for _ in range(900))
elif not bits[0]:
    for fd in held: os.close(fd)
    held.clear()""",
        look="return [int(above(number(), 64))]",
        slots=(0.004, 0.008, 0.016),
    ),
    Channel(
        name="free memory (/proc/meminfo)",
        shared="""
import mmap
held = []
def number(): return int(open("/proc/meminfo").read().split("MemFree:")[1].split()[0])
""",
        send="""
if bits[0] and not held: held.append(bytearray(b"x") * (48 << 20))
elif not bits[0]: held.clear()""",
        look="return [int(not above(number(), 16))]",
        slots=(0.03, 0.06, 0.12),
    ),
    Channel(
        name="the processors: one computes, the other counts how far it gets",
        shared="""
def work(until):
    count = 0
    while time.time() < until: count += 1
    return count
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
""",
        send="if bits[0]: work(time.time() + SLOT * 0.9)",
        look="return [int(not above(work(time.time() + SLOT * 0.4), 16))]",
        slots=(0.016, 0.03, 0.06),
    ),
)

PROGRAM = """
import ctypes, os, random, sys, time
ROLE, START, SLOT, SECONDS = {role!r}, {start!r}, {slot!r}, {seconds!r}
WIDTH = 1
SEEN = []
def above(now, many):
    SEEN.append(now)
    return now > (max(SEEN[-many:]) + min(SEEN[-many:])) / 2
{shared}
def send(bits):
{send}
def look():
{look}
def wait(until):
    left = until - time.time()
    if left > 0.0005: time.sleep(left - 0.0004)
    while time.time() < until: pass
draw = random.Random(1)
wrong = total = 0
for slot in range(int(SECONDS / SLOT)):
    bits = [draw.getrandbits(1) for _ in range(WIDTH)]
    wait(START + slot * SLOT + (SLOT / 2) * (ROLE == "look"))
    if ROLE == "send":
        send(bits)
    else:
        total += WIDTH
        wrong += sum(a != b for a, b in zip(bits, look()))
print(wrong, total, round(max(SECONDS, time.time() - START), 3))
"""


def capacity(wrong: int, total: int, seconds: float) -> float:
    """Bits per second of a binary symmetric channel; nothing where what is seen could be chance."""
    share = wrong / total
    doubt = 4 * math.sqrt(0.25 / total)
    if abs(share - 0.5) <= doubt:
        return 0.0
    entropy = 0.0 if share in (0.0, 1.0) else -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return (1 - entropy) * total / seconds


def indented(text: str) -> str:
    """As the body of a function."""
    return "\n".join("    " + line for line in text.strip("\n").splitlines())


async def measured(driver: Driver, spec: SandboxSpec, channel: Channel, slot: float) -> tuple[float, str]:
    """Bits per second through one channel with slots of this length, and the first reason why none."""
    start = time.time() + 2.0
    ended: dict[str, Outcome] = {}

    async def no_file(_name: str, _size: int) -> StreamSink | None:
        return None

    async def one(role: str) -> None:
        code = PROGRAM.format(
            role=role, start=start, slot=slot, seconds=SECONDS, shared=channel.shared, send=indented(channel.send),
            look=indented(channel.look),
        )  # fmt: skip
        async with driver.open(driver.plan(spec)) as sandbox:
            proved = await connection.attest(sandbox, proved_plan)
            job = Job(kind="python", payload={"code": code})
            ended[role] = await run.run(proved, job, inputs=[], hooks=run.Hooks(file=no_file))

    proved_plan = driver.plan(spec)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one, "send")
        tasks.start_soon(one, "look")
    for role, outcome in ended.items():
        if outcome.code != 0:
            return 0.0, f"{role}: {(outcome.stderr.text.strip().splitlines() or [outcome.reason])[-1][:100]}"
    wrong, total, seconds = ended["look"].stdout.text.split()
    return capacity(int(wrong), int(total), float(seconds)), ""


async def main() -> None:
    """Measure and print."""
    console = Console()
    name = sys.argv[1] if len(sys.argv) > 1 else "bubblewrap"
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        spec = SandboxSpec(limits=LIMITS, mounts=(Mount(source=scratch, target=WORKSPACE),))
        async with registry.opened(Settings().data_dir, "covert") as drivers:
            driver = await drivers.get(name)
            for channel in CHANNELS:
                if wanted not in channel.name:
                    continue
                best, reason = 0.0, ""
                for slot in channel.slots:
                    found, said = await measured(driver, spec, channel, slot)
                    best, reason = max(best, found), reason or said
                console.print(f"{channel.name}: {best:,.0f} bit/s  {reason}")


if __name__ == "__main__":
    anyio.run(main)
