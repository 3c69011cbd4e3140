"""Run bwrap for every driver whose outer wall it is: descriptors in, a control group around it, a stream out.

The driver's plan says what is run; nothing here decides anything about isolation.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread

from _glovebox_guest.measure import status
from glovebox_sandboxes.contract.base import Missing, Plan
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.spec import GUEST_UID
from glovebox_sandboxes.host import cgroup, host_view, mounts, surroundings
from glovebox_sandboxes.host.identity import SETPRIV, another, changes_user, is_kernels_root, unprivileged, user_map
from glovebox_sandboxes.host.janitor import Janitor
from glovebox_sandboxes.host.owner import new_owner, reap
from glovebox_sandboxes.host.process import Spawner
from glovebox_sandboxes.host.sandbox import DETAIL_BYTES, ProcessSandbox, read_words, seal_size
from glovebox_sandboxes.pool.zygote import Zygote

USERS = ("--info-fd", "{info}", "--userns-block-fd", "{users}", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""Arguments that let bwrap's children become other users, none of which owns anything."""
MINIMUM = (0, 8, 0)
"""First version with --disable-userns and --size."""
ROOT_ALONE = "every sandbox would be the kernel's root: the user namespace around this process has nobody else"
ROOT_FIX = "Start Glovebox, or the sandbox around it, as a normal user; or as root without a user namespace around it."
_GATE = ("/bin/sh", "-c", 'read -r gate && exec "$@"', "gate")
"""On v2, in front of bwrap: it waits for a line until it is in its control group, and becomes bwrap. Moved later, the
group's path could be read inside, because bwrap makes the cgroup namespace when it starts. ``read`` takes a pipe's
bytes one at a time, so what follows the line is the guest's."""
_START_SECONDS = 10.0
"""For printing a version, or trying namespaces: milliseconds; a slower host cannot serve."""


async def find(trial: tuple[str, ...]) -> tuple[str, str, list[Missing]]:
    """Find bwrap and try these arguments; return its path, its version, and what it lacks."""
    program = which("bwrap")
    setpriv = changes_user() and not Path(SETPRIV).exists()  # noqa: ASYNC240 - once
    gaps = [
        (setpriv, "setpriv is not installed", "Run `apt-get install util-linux`."),
        (is_kernels_root(), ROOT_ALONE, ROOT_FIX),
        (program is None, "bwrap is not installed", "Run `apt-get install bubblewrap`."),
    ]
    version = ""
    if program is not None and not any(lacks for lacks, *_ in gaps):
        version = (await run([program, "--version"]))[1].removeprefix("bubblewrap ").strip()
        old = tuple(int(part) for part in version.split(".") if part.isdigit()) < MINIMUM
        code, words = (0, "") if old else await run([program, *trial])
        fix = "Install bubblewrap 0.8 or newer (Debian 12 has it)."
        gaps = [
            (old, f"bwrap is version {version}", fix),
            (code != 0, f"it cannot make namespaces: {words}", surroundings.fix(words) if code else ""),
        ]
    first = [Missing(what=what, fix=fix, fatal=True) for lacks, what, fix in gaps if lacks][:1]
    return program or "bwrap", version, first


async def groups(server_id: str) -> cgroup.Hierarchy | None:
    """Return where this driver makes its control groups; remove those of dead servers there."""
    # Marked like containers: one rule tells for both whether the server is gone.
    hierarchy = cgroup.detect(replace(new_owner(), nonce=server_id).mark())
    if hierarchy is not None:
        await anyio.to_thread.run_sync(reap, hierarchy.parents)
    return hierarchy


class Launcher:
    """Starts of bwrap and its contents, for one driver."""

    def __init__(self, driver: str, hierarchy: cgroup.Hierarchy | None, janitor: Janitor | None) -> None:
        self._driver = driver
        self._hierarchy = hierarchy
        self._janitor = janitor
        rest = tuple(f"{parent}/tasks" for parent in hierarchy.parents) if hierarchy and hierarchy.version == 1 else ()
        self._spawner = Spawner(rest)

    @asynccontextmanager
    async def open(
        self, plan: Plan, directories: Mapping[str, Path], files: Mapping[str, bytes]
    ) -> AsyncIterator[ProcessSandbox]:
        """Run ``argv`` of the plan's action during the block, in a group with ``cgroup`` of its action.

        Args:
            plan: its spec's mounts are ``{mount0}`` and so on in the arguments.
            directories: by ``{name}`` in the arguments, each as an open descriptor.
            files: the same, for files that exist only in memory.

        Raises:
            SandboxError: it could not be started.
        """
        async with AsyncExitStack() as stack:
            try:
                waiting = self._wait(plan, stack)
                with ExitStack() as ours, ExitStack() as theirs:
                    places = await self._open_all(plan, directories, theirs)
                    places |= {key: _memory(content, theirs) for key, content in files.items()}
                    sandbox = await self._start(plan.action["argv"], places, ours, theirs, waiting)
            except OSError as problem:  # no descriptor left, or bwrap ended at the gate
                raise self._unavailable(f"a step of its start was refused: {problem.strerror}") from problem
            stack.push_async_callback(_shielded, sandbox.kill)
            yield sandbox

    @asynccontextmanager
    async def fork(
        self, plan: Plan, zygote: Zygote, seen: host_view.ZygoteView, user: int | None
    ) -> AsyncIterator[ProcessSandbox]:
        """Have a zygote of this plan fork a sandbox during the block. Raises SandboxError.

        The fork must keep nothing in ``seen``; ``user`` is the zygote's on the host, if sandboxes can be others.
        """
        async with AsyncExitStack() as stack:
            try:
                waiting = self._wait(plan, stack)
                entrances = waiting.group.entrances if waiting.group else ()
                process = await zygote.fork(waiting.detail, entrances, None if user is None else another(user))
            except OSError as problem:
                raise self._unavailable(f"a step of its start was refused: {problem.strerror}") from problem
            if process is None:
                words = read_words(waiting.detail) or "its zygote has ended"
                raise self._unavailable(words)
            sandbox = ProcessSandbox(waiting.name, process, waiting.group, waiting.detail, zygote=seen)
            stack.push_async_callback(_shielded, sandbox.kill)
            yield sandbox

    def _wait(self, plan: Plan, stack: AsyncExitStack) -> "_SandboxParts":
        """Return the parts that precede a sandbox's first process; ``stack`` removes them."""
        name = f"s{secrets.token_hex(8)}"
        group = None
        if self._hierarchy is not None:
            if self._janitor is not None:
                self._janitor.start()
            group = cgroup.Cgroup(self._hierarchy, name, plan.action["cgroup"])
            stack.push_async_callback(_shielded, group.remove)
        detail = os.memfd_create("bwrap-stderr", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        stack.callback(os.close, detail)
        seal_size(detail)
        return _SandboxParts(name=name, group=group, detail=detail)

    async def _start(
        self, argv: Sequence[str], places: dict[str, int], ours: ExitStack, theirs: ExitStack, waiting: "_SandboxParts"
    ) -> ProcessSandbox:
        info = users = None
        if USERS[0] in argv:
            info, places["info"] = _pipe(ours, theirs)
            users, places["users"] = _pipe(ours, theirs, writing=True)
        group = waiting.group
        gated = self._hierarchy is not None and self._hierarchy.version > 1
        command = [_fill(part, places) for part in argv]
        try:
            process = await self._spawner.start(
                [*_GATE, *command] if gated else command,
                stderr=waiting.detail,
                descriptors=tuple(places.values()),
                tasks=group.tasks if group else (),
            )
        except OSError as problem:
            raise self._unavailable(f"{argv[0]} cannot be run: {problem.strerror}") from problem
        theirs.close()
        sandbox = ProcessSandbox(waiting.name, process, group, waiting.detail)
        try:
            if group is not None and gated:
                group.add(process.pid)
                await process.stream.send(b"\n")
            if info is not None and users is not None:
                sandbox.user = await _map_users(info)
                os.write(users, b"\0")
        except (anyio.BrokenResourceError, anyio.EndOfStream):
            await sandbox.kill()
            raise self._unavailable((await sandbox.stats()).detail or "it ended without a word") from None
        except BaseException:
            with anyio.CancelScope(shield=True):
                await sandbox.kill()
            raise
        return sandbox

    async def close(self) -> None:
        """End the thread that starts sandboxes, and the janitor, which removes this driver's control groups."""
        await anyio.to_thread.run_sync(self._spawner.close)
        if self._janitor is not None:
            await self._janitor.stop()

    async def _open_all(self, plan: Plan, directories: Mapping[str, Path], held: ExitStack) -> dict[str, int]:
        wanted = dict(directories)
        for number, mount in enumerate(plan.spec.mounts):
            wanted[f"mount{number}"] = Path(mount.source)
            # bwrap also binds all that is mounted inside, and none of it is in the plan.
            if found := mounts.inside(mount.source):
                raise SandboxError(
                    f"Mounting {mount.source}",
                    f"other file systems are mounted inside it, at {mounts.named(found)}",
                    "Serve a directory with nothing mounted inside (--workspace), or unmount them.",
                )
        try:
            opened = await self._spawner.places(wanted.values())
        except OSError as problem:
            raise self._unavailable(f"a directory it has to mount cannot be opened: {problem.strerror}") from problem
        for descriptor in opened:
            held.callback(os.close, descriptor)
        return dict(zip(wanted, opened, strict=True))

    def _unavailable(self, reason: str) -> SandboxError:
        return SandboxError(f"Starting a {self._driver} sandbox", reason, "Run `glovebox doctor`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SandboxParts:
    """The parts of a sandbox that precede its first process."""

    name: str
    group: cgroup.Cgroup | None
    detail: int


def _memory(content: bytes, held: ExitStack) -> int:
    """Open a file that exists only as this descriptor, at its beginning."""
    descriptor = os.memfd_create("glovebox", os.MFD_CLOEXEC)
    held.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _pipe(ours: ExitStack, theirs: ExitStack, *, writing: bool = False) -> tuple[int, int]:
    """Open a pipe; return our end, for reading or ``writing``, and bwrap's."""
    ends = os.pipe2(os.O_CLOEXEC)
    own, other = reversed(ends) if writing else ends
    ours.callback(os.close, own)
    theirs.callback(os.close, other)
    return own, other


async def _shielded(action: Callable[[], Awaitable[None]]) -> None:
    with anyio.CancelScope(shield=True):
        await action()


def tmpfs(target: str, size: int) -> list[str]:
    """Return the arguments for a private tmpfs of this many bytes."""
    return ["--perms", "0700", "--size", str(size), "--tmpfs", target]


def _fill(part: str, places: Mapping[str, int]) -> str:
    return str(places[part[1:-1]]) if part.startswith("{") and part[1:-1] in places else part


async def _map_users(info: int) -> int:
    """Give bwrap's waiting child many users; return its user on the host.

    Raises EndOfStream if bwrap has ended; OSError if it did not report its child, or the kernel refused.
    """
    text = b""
    with anyio.fail_after(_START_SECONDS):
        while not text.rstrip().endswith(b"}"):
            await anyio.wait_readable(info)
            part = os.read(info, DETAIL_BYTES)
            if not part:
                raise anyio.EndOfStream
            text += part
    # The number is certainly its own: it waits, and its parent is our child.
    place = Path(f"/proc/{int(json.loads(text)['child-pid'])}")
    own = int(status((place / "status").read_text().splitlines())["Uid"].split()[0])
    for kind in ("uid", "gid"):
        (place / f"{kind}_map").write_text(user_map(own, GUEST_UID))
    return own


async def run(command: list[str]) -> tuple[int, str]:
    """Return the exit status and last line of a trusted program that ends by itself."""
    # A cancelled server waits for it: if the event loop closed first, its process would not be reaped.
    with anyio.move_on_after(_START_SECONDS, shield=True):
        done = await anyio.run_process(unprivileged(command), check=False)
        return done.returncode, (done.stdout or done.stderr).decode(errors="replace").strip()[-300:]
    return 1, "it did not answer"


def which(program: str) -> str | None:
    """Return the path of one of the system's programs; None if it is not installed."""
    # Not the server's PATH: a sandbox's outer wall comes from the system's directories.
    for directory in ("/usr/bin", "/bin", "/usr/local/bin"):
        path = Path(directory) / program
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None
