"""The embedded driver: bubblewrap, one short-lived set of namespaces per call. No daemon, no image, no root needed.

As root it first becomes an unprivileged user: a process of the host's uid 0 keeps rights over files owned by root
(``/proc/sys`` among them) even without any capability. What it must see of root's own directories it gets as open
descriptors of a place it can reach (sandboxes/staging.py). See bwrap(1), user_namespaces(7).
"""

import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import anyio
import anyio.abc

from sandboxes import cgroup, guest_tree, seccomp
from sandboxes import runtime as runtimes
from sandboxes.base import Capabilities, Facts, Missing, Plan
from sandboxes.docker.owner import new_owner
from sandboxes.errors import SandboxUnavailable, UnsupportedSpec
from sandboxes.guest import landlock
from sandboxes.janitor import Janitor, reap
from sandboxes.measure import NAMESPACES, Expected
from sandboxes.process import SETPRIV, Process, Spawner, unprivileged
from sandboxes.runtime import PACKAGES, Runtime
from sandboxes.spec import GUEST, GUEST_UID, INPUT, OUTPUT, SCRATCH, SandboxSpec

NAME = "bubblewrap"
MINIMUM = (0, 8, 0)
"""First version with --disable-userns and --size."""
SHM_BYTES = 16 * 1024 * 1024
"""Size of /dev/shm: semaphores and small shared buffers of multiprocessing."""
INPUT_BYTES = 64 * 1024 * 1024
"""Size of /input: the broker sends no more than this of earlier artifacts."""
_DETAIL_BYTES = 8192
"""bwrap's own messages are one line; more is not kept."""
_END_SECONDS = 0.3
"""From a closed wire to the end of every process: a millisecond, and the whole must stay below a second."""
_START_SECONDS = 10.0
"""From exec to namespaces: milliseconds; a host this slow cannot serve."""

# Device nodes bwrap's --dev binds from the host, and the kernel's own file systems: writable, and harmless.
_DEVICES = ("/dev/full", "/dev/null", "/dev/pts", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero", "/proc")
#: Never to be seen inside, whatever is mounted.
HIDDEN = ("/var/run/docker.sock", "/run/docker.sock", "/etc/shadow", "/root", "/home", "/sys/fs/cgroup")


class Bubblewrap:
    """Driver for bubblewrap. Create it with ``detect``."""

    name = NAME

    def __init__(
        self,
        capabilities: Capabilities,
        program: str,
        runtime: Runtime | None,
        hierarchy: cgroup.Hierarchy | None,
        janitor: Janitor | None,
    ) -> None:
        """Take what ``detect`` found."""
        self.capabilities = capabilities
        self._program = program
        self._runtime = runtime
        self._hierarchy = hierarchy
        self._janitor = janitor
        rest = tuple(parent / "tasks" for parent in hierarchy.parents) if hierarchy and hierarchy.version == 1 else ()
        self._spawner = Spawner(rest)

    def plan(self, spec: SandboxSpec) -> Plan:
        """See ``Driver.plan``."""
        fatal = [missing for missing in self.capabilities.missing if missing.fatal]
        if fatal or self._runtime is None:
            missing = fatal[0] if fatal else Missing(what="there is no runtime", fix=_SETUP, fatal=True)
            raise UnsupportedSpec("isolation", f"bubblewrap cannot be used here: {missing.what}", missing.fix)
        if spec.require_cgroup and self._hierarchy is None:
            raise UnsupportedSpec(
                "limits.enforce",
                "this host lets us make no control groups, so limits hold per process only",
                _CGROUP_FIX,
            )
        wanted = dict(cgroup.settings(self._hierarchy.version, spec.limits)) if self._hierarchy else {}
        return Plan(
            driver=NAME,
            level="namespaces",
            spec=spec,
            action={
                "argv": list(self._argv(spec, self._runtime)),
                "cgroup": wanted,
                "seccomp": seccomp.digest(),
                "runtime": self._runtime.digest,
            },
            expected=_expected(spec),
            rlimits=() if self._hierarchy else ("memory_bytes", "pids"),
        )

    def _argv(self, spec: SandboxSpec, runtime: Runtime) -> tuple[str, ...]:
        """The whole command. ``{root}`` and the like stand for descriptors that differ from call to call."""
        limits = spec.limits
        argv = [
            self._program,
            "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup",
            "--disable-userns", "--uid", str(GUEST_UID), "--gid", str(GUEST_UID), "--hostname", "sandbox",
            "--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL",
            "--ro-bind-fd", "{root}", "/",
            "--ro-bind-fd", "{guest}", GUEST,
            "--proc", "/proc",
            "--dev", "/dev",
            *_tmpfs("/dev/shm", SHM_BYTES),  # noqa: S108 - inside the sandbox
            "--remount-ro", "/dev",
            *_tmpfs(SCRATCH, limits.scratch_bytes),
        ]  # fmt: skip
        if spec.output:
            argv += _tmpfs(OUTPUT, limits.output_bytes)
        if spec.inputs:
            argv += _tmpfs(INPUT, INPUT_BYTES)
        for number, mount in enumerate(spec.mounts):
            argv += ["--ro-bind-fd", f"{{mount{number}}}", mount.target]
        argv += ["--clearenv"]
        for key, value in guest_tree.ENVIRONMENT.items():
            argv += ["--setenv", key, value]
        argv += ["--seccomp", "{seccomp}"]
        if self._gated:
            argv += ["--info-fd", "{info}", "--block-fd", "{block}"]
        argv += ["--"]
        argv += guest_tree.command(runtime.python, spec, packages=(PACKAGES,), hidden=HIDDEN)
        return tuple(argv)

    @property
    def _gated(self) -> bool:
        """Whether bwrap has to wait until it has been moved into its control group; on v1 it is born there."""
        return self._hierarchy is not None and self._hierarchy.version > 1

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator["_Sandbox"]:
        """See ``Driver.open``."""
        name = f"s{secrets.token_hex(8)}"
        async with AsyncExitStack() as stack:
            try:
                group = None
                if self._hierarchy is not None:
                    if self._janitor is not None:
                        self._janitor.start()
                    group = cgroup.Cgroup(self._hierarchy, name, plan.action["cgroup"])
                    stack.push_async_callback(_shielded, group.remove)
                sandbox = await self._start(plan, name, group, stack)
            except OSError as problem:  # no descriptor left, or bwrap ended at the gate
                raise _unavailable(f"a step of its start was refused: {problem.strerror}") from problem
            try:
                yield sandbox
            finally:
                with anyio.CancelScope(shield=True):
                    await sandbox.kill()

    async def _start(self, plan: Plan, name: str, group: cgroup.Cgroup | None, stack: AsyncExitStack) -> "_Sandbox":
        with _Descriptors() as held:
            places = await self._open_all(plan, held)
            info = held.pipe("info", places, reading=True) if self._gated else None
            gate = held.pipe("block", places, reading=False) if self._gated else None
            detail = os.memfd_create("bwrap-stderr", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            stack.callback(os.close, detail)
            _bound(detail)
            argv = [_fill(part, places) for part in plan.action["argv"]]
            try:
                process = await self._spawner.start(
                    argv, stderr=detail, descriptors=tuple(places.values()), tasks=group.tasks if group else ()
                )
            except OSError as problem:
                raise _unavailable(f"{argv[0]} cannot be run: {problem.strerror}") from problem
            sandbox = _Sandbox(name, process, group, detail)
            if info is None or gate is None:
                return sandbox
            try:
                held.close([places["info"], places["block"]])
                await self._release(sandbox, await _read_info(info), gate)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await sandbox.kill()
                raise
        return sandbox

    async def _release(self, sandbox: "_Sandbox", first: int | None, gate: int) -> None:
        """Put bwrap and its child, which waits at the gate, into their group; then let it go on."""
        if first is None:
            await sandbox.kill()
            raise _unavailable((await sandbox.facts()).detail or "bwrap ended without a word")
        sandbox.limit(first)
        os.write(gate, b"\0")

    async def close(self) -> None:
        """End the thread that starts sandboxes, and the janitor, which removes this server's control groups."""
        await anyio.to_thread.run_sync(self._spawner.close)
        if self._janitor is not None:
            await self._janitor.stop()

    async def _open_all(self, plan: Plan, held: "_Descriptors") -> dict[str, int]:
        runtime = self._runtime
        if runtime is None:
            raise _unavailable("there is no runtime")
        wanted = {"root": runtime.root, "guest": runtime.guest}
        wanted |= {f"mount{number}": Path(mount.source) for number, mount in enumerate(plan.spec.mounts)}
        try:
            opened = await self._spawner.places(wanted.values())
        except OSError as problem:
            raise _unavailable(f"a directory it has to mount cannot be opened: {problem.strerror}") from problem
        places = {name: held.keep(descriptor) for name, descriptor in zip(wanted, opened, strict=True)}
        places["seccomp"] = held.memory(seccomp.bpf())
        return places


@asynccontextmanager
async def connect(data: Path, server_id: str) -> AsyncIterator[Bubblewrap]:
    """The driver, for the length of the block; the control groups it needed are removed after it."""
    driver = await detect(data, server_id)
    try:
        yield driver
    finally:
        with anyio.CancelScope(shield=True):
            await driver.close()


_SETUP = "Run `glovebox setup`."
_LANDLOCK_FIX = "Boot Linux 5.13 or newer with landlock in its list of security modules (lsm=landlock,…)."
_CGROUP_FIX = (
    "Run the server as root, or in a systemd unit with Delegate=yes; or let the profile accept limits per process: "
    'limits.enforce = "any".'
)


async def detect(data: Path, server_id: str) -> Bubblewrap:
    """Find out, by starting one, what bubblewrap can enforce on this host.

    Args:
        data: the directory that holds the runtime.
        server_id: names the control groups of this server.
    """
    data = data.resolve()  # noqa: ASYNC240 - once; what is mounted is named by a path without links
    program = _which("bwrap")
    missing: list[Missing] = []
    version = ""
    if os.geteuid() == 0 and not Path(SETPRIV).exists():  # noqa: ASYNC240 - once
        missing.append(
            Missing(what="setpriv is not installed", fix="Install it: apt-get install util-linux", fatal=True)
        )
    elif program is None:
        missing.append(Missing(what="bwrap is not installed", fix="Install it: apt-get install bubblewrap", fatal=True))
    else:
        version = (await _run([program, "--version"]))[1].removeprefix("bubblewrap ").strip()
        if tuple(int(part) for part in version.split(".") if part.isdigit()) < MINIMUM:
            fix = "Install bubblewrap 0.8 or newer (Debian 12 has it)."
            missing.append(Missing(what=f"bwrap is version {version}", fix=fix, fatal=True))
        else:
            code, words = await _run([program, *_TRIAL])
            if code != 0:
                missing.append(Missing(what=f"it cannot make namespaces: {words}", fix=_userns_fix(), fatal=True))
    try:
        runtime = await runtimes.usable(data)
    except (runtimes.RuntimeProblem, OSError) as problem:
        runtime = None
        missing.append(Missing(what=f"the guest cannot be installed: {problem}", fix=_SETUP, fatal=True))
    if runtime is None:
        missing.append(Missing(what="the sandbox's Python runtime is not built", fix=_SETUP, fatal=True))
    # The same marks as containers': one rule says for both whose server is gone.
    if landlock.abi_version() == 0:
        missing.append(Missing(what="the kernel has no Landlock", fix=_LANDLOCK_FIX, fatal=True))
    hierarchy = cgroup.detect(replace(new_owner(), nonce=server_id).mark())
    if hierarchy is not None:
        await anyio.to_thread.run_sync(reap, hierarchy.parents)
    if hierarchy is None:
        missing.append(Missing(what="no control groups: limits hold per process", fix=_CGROUP_FIX, fatal=False))
    mechanism = hierarchy.mechanism if hierarchy else "rlimit"
    limits = {"memory_bytes": mechanism, "pids": mechanism, "cpu_seconds": "rlimit", "wall_seconds": "broker",
              "scratch_bytes": "tmpfs", "output_bytes": "tmpfs", "stream_bytes": "broker"}  # fmt: skip
    capabilities = Capabilities(driver=NAME, level="namespaces", version=version, limits=limits, missing=tuple(missing))
    janitor = Janitor(hierarchy.parents) if hierarchy else None
    return Bubblewrap(capabilities, program or "bwrap", runtime, hierarchy, janitor)


# What a sandbox needs of the kernel, tried out on nothing but an empty root.
_TRIAL = ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(GUEST_UID), "--cap-drop", "ALL",
          "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true")  # fmt: skip


def _expected(spec: SandboxSpec) -> Expected:
    writable = [*_DEVICES, "/dev/shm", SCRATCH]  # noqa: S108 - inside the sandbox
    writable += [OUTPUT] * spec.output + [INPUT] * spec.inputs
    return Expected(
        uid=GUEST_UID,
        interfaces=("lo",),
        writable=tuple(sorted(writable)),
        mounts=tuple(sorted(["/", GUEST, *(mount.target for mount in spec.mounts)])),
        namespaces=NAMESPACES,
        hidden=HIDDEN,
    )


class _Sandbox:
    """One running bwrap."""

    def __init__(self, name: str, process: Process, group: cgroup.Cgroup | None, detail: int) -> None:
        self.id = name
        self.channel: anyio.abc.ByteStream = process.stream
        self._process = process
        self._group = group
        self._detail = detail

    def limit(self, first: int) -> None:
        """Put bwrap and the sandbox's first process into their control group, before either has done anything."""
        if self._group is not None:
            self._group.add(self._process.pid)
            self._group.add(first)

    async def kill(self) -> None:
        """End the guest, process 1, and with it everything else; where it does not end by itself, with SIGKILL.

        A guest whose wire is closed ends at once, and bwrap, its parent, reaps it. Killing bwrap ends the guest too
        (--die-with-parent), but then nobody reaps it where the host's process 1 does not, as in many containers.
        """
        await self._process.stream.aclose()
        with anyio.move_on_after(_END_SECONDS):
            await self._process.wait()
            return
        self._process.kill()
        await self._process.wait()

    async def facts(self) -> Facts:
        """See ``Sandbox.facts``."""
        words = os.pread(self._detail, _DETAIL_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()
        if self._group is None:
            return Facts(detail=words[-2000:])
        return Facts(
            out_of_memory=self._group.out_of_memory(),
            memory_peak_bytes=self._group.memory_peak_bytes(),
            detail=words[-2000:],
        )


class _Descriptors:
    """Descriptors that are closed whatever happens."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(self._open)

    def keep(self, descriptor: int) -> int:
        """Take one over."""
        self._open.add(descriptor)
        return descriptor

    def memory(self, content: bytes) -> int:
        """A file that exists only as this descriptor, at its beginning."""
        descriptor = os.memfd_create("glovebox", os.MFD_CLOEXEC)
        self._open.add(descriptor)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def pipe(self, name: str, places: dict[str, int], *, reading: bool) -> int:
        """A pipe: its other end goes to bwrap as ``name``, ours is returned."""
        read, write = os.pipe2(os.O_CLOEXEC)
        self._open |= {read, write}
        places[name] = write if reading else read
        return read if reading else write

    def close(self, descriptors: Iterable[int]) -> None:
        """Close these now."""
        for descriptor in tuple(descriptors):
            self._open.discard(descriptor)
            os.close(descriptor)


def _tmpfs(target: str, size: int) -> list[str]:
    return ["--perms", "0700", "--size", str(size), "--tmpfs", target]


def _fill(part: str, places: Mapping[str, int]) -> str:
    return str(places[part[1:-1]]) if part.startswith("{") and part[1:-1] in places else part


def _bound(descriptor: int) -> None:
    """Give a memory file its final size, so that no flood of messages can make it grow."""
    import fcntl  # noqa: PLC0415 - Linux only, and only here

    os.ftruncate(descriptor, _DETAIL_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


async def _read_info(descriptor: int) -> int | None:
    """Pid of the sandbox's process 1 on the host, from --info-fd; None if bwrap ended instead."""
    text = b""
    with anyio.move_on_after(_START_SECONDS):
        while not text.rstrip().endswith(b"}"):
            await anyio.wait_readable(descriptor)
            part = os.read(descriptor, 4096)
            if not part:
                return None
            text += part
        return int(json.loads(text)["child-pid"])
    return None


async def _shielded(action: Callable[[], Awaitable[None]]) -> None:
    with anyio.CancelScope(shield=True):
        await action()


async def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and last line of a trusted program that ends by itself."""
    with anyio.move_on_after(_START_SECONDS):
        done = await anyio.run_process(unprivileged(command), check=False)
        return done.returncode, (done.stdout or done.stderr).decode(errors="replace").strip()[-300:]
    return 1, "it did not answer"


def _which(program: str) -> str | None:
    # Not the PATH of whoever started us: a sandbox's outer wall comes from the system's directories.
    for directory in ("/usr/bin", "/bin", "/usr/local/bin"):
        path = Path(directory) / program
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None


def _userns_fix() -> str:
    for name, wanted in (
        ("kernel/unprivileged_userns_clone", "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0"),
    ):
        path = Path("/proc/sys") / name
        with suppress(OSError):
            if path.read_text().strip() != wanted:
                return f"Allow user namespaces: sysctl -w {name.replace('/', '.')}={wanted}"
    return "Allow unprivileged user namespaces (inside a container: run it with a seccomp profile that permits them)."


def _unavailable(reason: str) -> SandboxUnavailable:
    return SandboxUnavailable("Starting a bubblewrap sandbox", reason, "Run `glovebox doctor`.")
