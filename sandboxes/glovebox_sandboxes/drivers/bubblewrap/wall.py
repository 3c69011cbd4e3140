"""The wall of namespaces that bwrap makes: its probe, and starts of sandboxes behind it, for every driver that has it.

A driver's plan says what is run; nothing here decides anything about isolation.
"""

import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import anyio.to_thread

from _glovebox_guest.measure import status
from glovebox_sandboxes.contract.base import GUEST_UID, Capabilities, Level, Limits, Missing, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.drivers import boundary
from glovebox_sandboxes.host import cgroup, mounts, owner, surroundings
from glovebox_sandboxes.host.identity import SETPRIV, changes_user, is_kernels_root, unprivileged, user_map
from glovebox_sandboxes.host.process import DETAIL_BYTES, Janitor, ProcessSandbox, Spawner, seal_size
from glovebox_sandboxes.runtime import environments, guest_gc
from glovebox_sandboxes.runtime import runtime as runtimes
from glovebox_sandboxes.runtime.runtime import SETUP, Runtime

NAMESPACES = (
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup",
)  # fmt: skip
USERS = ("--info-fd", "{info}", "--userns-block-fd", "{users}", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
"""Arguments that let bwrap's children become other users, none of which owns anything."""
MINIMUM = (0, 8, 0)
"""First version with --disable-userns and --size."""
ROOT_ALONE = "every sandbox would be the kernel's root: the user namespace around this process maps no other user"
ROOT_FIX = "Start Glovebox, or the sandbox around it, as a normal user; or as root without a user namespace around it."
_GATE = ("/bin/sh", "-c", 'read -r gate && exec "$@"', "gate")
"""On v2, in front of bwrap: it waits for a line until it is in its control group, and becomes bwrap. Moved later, the
group's path could be read inside, because bwrap makes the cgroup namespace when it starts. ``read`` takes a pipe's
bytes one at a time, so what follows the line is the guest's."""
_START_SECONDS = 10.0
"""For printing a version, or trying namespaces: milliseconds; a slower host cannot serve."""


_EMPTY_BYTES = 4096
"""Size of the tmpfs that covers a folder: nothing is ever written there."""


class Walled:
    """Base of a driver that starts its sandboxes with bwrap."""

    name: ClassVar[str]
    level: ClassVar[Level]
    adopt: ClassVar[None] = None
    limits: ClassVar[Mapping[str, str]] = {}
    """Mechanisms that are not the usual ones behind bwrap."""

    def __init__(
        self,
        programs: tuple[str, ...],
        version: str,
        runtimes: Mapping[str, Runtime],
        hierarchy: cgroup.Hierarchy | None,
        missing: tuple[Missing, ...] = (),
    ) -> None:
        """Set its programs, bwrap first, their version, the runtimes by environment, and where to make groups."""
        self._counted = hierarchy is not None and hierarchy.counts
        group = f"cgroup v{hierarchy.version}" if hierarchy else ""
        limits = boundary.mechanisms(group, counted=self._counted, **self.limits)
        self.capabilities = Capabilities(
            driver=self.name, level=self.level, version=version, limits=limits, missing=missing
        )
        self._programs = programs
        self._runtimes = runtimes
        self._hierarchy = hierarchy
        self._parents = hierarchy.parents if hierarchy else ()
        # If this server is killed, it removes the groups.
        self._janitor = Janitor(Path(owner.__file__), *map(str, self._parents))
        v1 = hierarchy is not None and hierarchy.version == 1
        self._spawner = Spawner([f"{parent}/tasks" for parent in self._parents if v1])

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, trial: tuple[str, ...], data: Path, server_id: str, programs: Mapping[str, str], missing: list[Missing]
    ) -> AsyncIterator[Self]:
        """Find out what this host has of the needs of a driver behind bwrap, beside what it looked for itself.

        The driver is held during the block. ``trial`` are arguments with which bwrap is tried out; ``server_id`` names
        the control groups; ``programs`` are others by path, and their version, the driver's; ``missing`` is lacking
        already.
        """
        program, version, first = await _find_bwrap(trial)
        # A path without links names what is mounted.
        built, lacking = await runtimes.usable(data.resolve())  # noqa: ASYNC240 - once
        # Marked like containers: one rule tells for both whether the server is gone.
        hierarchy = cgroup.detect(owner.new_mark(server_id))
        if hierarchy is not None:
            await anyio.to_thread.run_sync(owner.reap, hierarchy.parents)
        missing = [*first, *missing, *([lacking] if lacking else [])]
        if hierarchy is None:
            missing.append(Missing(what="no control groups: limits hold per process", fix=cgroup.fix(), fatal=False))
        version = next(iter(programs.values()), version)
        async with cls((program, *programs), version, built, hierarchy, tuple(missing)).running() as driver:
            yield driver

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Hold this driver during the block: our runtimes stay meanwhile, our groups are removed afterwards."""
        try:
            with guest_gc.held(path for each in self._runtimes.values() for path in each.directories):
                yield self
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._spawner.close)
                if not await self._janitor.stop():
                    for parent in self._parents:  # it was never started: they are empty
                        with suppress(OSError):
                            parent.rmdir()

    def _usable(self, spec: SandboxSpec) -> Runtime:
        """Return the environment's runtime. Raises UnsupportedSpecError if this host lacks what the spec needs."""
        fatal = [missing for missing in self.capabilities.missing if missing.fatal]
        if fatal or not self._runtimes:
            missing = fatal[0] if fatal else Missing(what="there is no runtime", fix=SETUP, fatal=True)
            raise UnsupportedSpecError("isolation", missing.what, missing.fix)
        found = self._runtimes.get(spec.environment)
        if found is None:
            raise environments.not_built(spec.environment)
        if spec.require_cgroup and self._hierarchy is None:
            reason = "this host lets us make no control groups, so limits hold per process only"
            raise UnsupportedSpecError("limits.enforce", reason, cgroup.fix())
        return found

    def _settings(self, limits: Limits) -> dict[str, str]:
        return dict(cgroup.settings(self._hierarchy.version, limits)) if self._hierarchy else {}

    def _start(self, plan: Plan, files: Mapping[str, bytes]) -> AbstractAsyncContextManager[ProcessSandbox]:
        """Run ``argv`` of the plan's action during the block, in a group with ``cgroup`` of its action.

        ``{root}``, ``{guest}``, ``{mount0}`` and so on in the arguments are descriptors of the runtime's directories
        and of the mounts of its spec; so are names of ``files``, which exist only in memory. Raises SandboxError.
        """
        return self._hold(plan, partial(self._run, plan, files))

    @asynccontextmanager
    async def _hold(
        self, plan: Plan, begin: Callable[[str, cgroup.Cgroup, int], Awaitable[ProcessSandbox]]
    ) -> AsyncIterator[ProcessSandbox]:
        """Hold a sandbox during the block: ``begin`` starts it with this name, group, and file for its errors.

        Raises SandboxError.
        """
        async with AsyncExitStack() as stack:
            try:
                name = f"s{secrets.token_hex(8)}"
                if self._hierarchy is not None:
                    self._janitor.start()
                group = cgroup.Cgroup(self._hierarchy, name, plan.action["cgroup"])
                stack.push_async_callback(_shielded, group.remove)
                detail = os.memfd_create("bwrap-stderr", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
                stack.callback(os.close, detail)
                seal_size(detail)
                sandbox = await begin(name, group, detail)
            except OSError as problem:  # no descriptor left, or bwrap ended at the gate
                raise self._unavailable(f"a step of its start was refused: {problem.strerror}") from problem
            stack.push_async_callback(_shielded, sandbox.kill)
            yield sandbox

    async def _run(
        self, plan: Plan, files: Mapping[str, bytes], name: str, group: cgroup.Cgroup, detail: int
    ) -> ProcessSandbox:
        runtime, argv = self._usable(plan.spec), plan.action["argv"]
        info = users = None
        with ExitStack() as ours, ExitStack() as theirs:
            places = await self._open_all(plan, {"root": runtime.root, "guest": runtime.guest}, theirs)
            places |= {key: _memory(content, theirs) for key, content in files.items()}
            if USERS[0] in argv:
                info, places["info"] = _pipe(ours, theirs)
                users, places["users"] = _pipe(ours, theirs, writing=True)
            gated = bool(group.directories and not group.tasks)
            names = {f"{{{key}}}": str(number) for key, number in places.items()}
            command = [names.get(part, part) for part in argv]
            try:
                process = await self._spawner.start(
                    [*_GATE, *command] if gated else command,
                    stderr=detail,
                    descriptors=tuple(places.values()),
                    tasks=group.tasks,
                )
            except OSError as problem:
                raise self._unavailable(f"{argv[0]} cannot be run: {problem.strerror}") from problem
            theirs.close()
            sandbox = ProcessSandbox(name, process, group, detail)
            try:
                if gated:
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

    async def _open_all(self, plan: Plan, directories: Mapping[str, Path], held: ExitStack) -> dict[str, int]:
        wanted = dict(directories)
        for number, mount in enumerate(plan.spec.mounts):
            wanted[f"mount{number}"] = Path(mount.source)
            # bwrap also binds all that is mounted inside, and none of it is in the plan.
            if found := mounts.inside(mount.source):
                reason = f"other file systems are mounted inside it, at {mounts.named(found)}"
                fix = "Serve a directory with nothing mounted inside (--workspace), or unmount them."
                raise SandboxError(f"Mounting {mount.source}", reason, fix)
        try:
            opened = await self._spawner.places(wanted.values())
        except OSError as problem:
            raise self._unavailable(f"a directory it has to mount cannot be opened: {problem.strerror}") from problem
        for descriptor in opened:
            held.callback(os.close, descriptor)
        return dict(zip(wanted, opened, strict=True))

    def _unavailable(self, reason: str) -> SandboxError:
        return SandboxError(f"Starting a {self.name} sandbox", reason, "Run `glovebox doctor`.")


def masks(spec: SandboxSpec, at: str) -> list[str]:
    """Return arguments that cover masked paths below their directory's mount, so that nothing of them can be read.

    A file is covered by a device that may not be opened there, a folder by an empty one.
    """
    argv = []
    for name in spec.masks:
        place = f"{at}/{name.rstrip('/')}"
        if name.endswith("/"):
            argv += ["--perms", "0000", "--size", str(_EMPTY_BYTES), "--tmpfs", place, "--remount-ro", place]
        else:
            argv += ["--ro-bind", "/dev/null", place]
    return argv


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
    return shutil.which(program, path="/usr/bin:/bin:/usr/local/bin")


async def _find_bwrap(trial: tuple[str, ...]) -> tuple[str, str, list[Missing]]:
    """Find bwrap and try these arguments; return its path, its version, and what it lacks."""
    program, version = which("bwrap"), ""
    gap: tuple[str, str] | None = None
    if changes_user() and not Path(SETPRIV).exists():  # noqa: ASYNC240 - once
        gap = "setpriv is not installed", "Run `apt-get install util-linux`."
    elif is_kernels_root():
        gap = ROOT_ALONE, ROOT_FIX
    elif program is None:
        gap = "bwrap is not installed", "Run `apt-get install bubblewrap`."
    else:
        version = (await run([program, "--version"]))[1].removeprefix("bubblewrap ").strip()
        if tuple(int(part) for part in version.split(".") if part.isdigit()) < MINIMUM:
            gap = f"bwrap is version {version}", "Install bubblewrap 0.8 or newer (Debian 12 has it)."
        else:
            code, words = await run([program, *trial])
            gap = (f"it cannot make namespaces: {words}", surroundings.fix(words)) if code else None
    missing = [] if gap is None else [Missing(what=gap[0], fix=gap[1], fatal=True)]
    return program or "bwrap", version, missing
