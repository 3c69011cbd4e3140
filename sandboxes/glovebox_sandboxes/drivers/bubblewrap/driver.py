"""Run sandboxes with bubblewrap, one short-lived set of namespaces per call. No daemon, image or root needed.

As root it first becomes an unprivileged user: a process of the host's uid 0 keeps rights over files owned by root
(``/proc/sys`` among them) even without any capability. It gets root's own directories as open descriptors of a place it
can reach (sandboxes/glovebox_sandboxes/host/staging.py). See bwrap(1), user_namespaces(7).

Prepared sandboxes are forks of a zygote (``_glovebox_guest.zygote``), which forks on request and receives nothing else.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import SocketAttribute, UNIXSocketStream

from _glovebox_guest import landlock
from glovebox_sandboxes import seccomp
from glovebox_sandboxes.contract.base import GUEST, GUEST_UID, SCRATCH, Missing, OpenSandbox, Plan, SandboxSpec, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import NAMESPACES
from glovebox_sandboxes.drivers import boundary
from glovebox_sandboxes.drivers.bubblewrap import wall
from glovebox_sandboxes.host import identity
from glovebox_sandboxes.host.cgroup import Cgroup
from glovebox_sandboxes.host.fork import Fork, fork
from glovebox_sandboxes.host.host_view import ZygoteView
from glovebox_sandboxes.host.identity import changes_user
from glovebox_sandboxes.host.process import Process, ProcessSandbox
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.runtime.runtime import Runtime

NAME = "bubblewrap"
FORK_BYTES = 4 * 1024 * 1024
"""Approximate memory of a waiting fork, beyond what it shares with its zygote."""
_IMPORT_SECONDS = 60.0
"""For all that a profile preloads: half a second for pandas on an idle machine."""
_MAX_WORDS = 4096

# Device nodes bwrap's --dev binds from the host, and the kernel's own file systems: writable, and harmless.
_DEVICES = ("/dev/full", "/dev/null", "/dev/pts", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero", "/proc")


class Bubblewrap(wall.Walled):
    """The bubblewrap driver. Create it with ``connect``."""

    name = NAME
    level = "namespaces"

    def plan(self, spec: SandboxSpec) -> Plan:
        """See ``Driver.plan``."""
        runtime = self._usable(spec)
        return Plan(
            driver=NAME,
            level=self.level,
            spec=spec,
            action={
                "argv": list(self._argv(spec, runtime, zygote=False)),
                "zygote": list(self._argv(spec, runtime, zygote=True)),
                "cgroup": self._settings(spec.limits),
                "seccomp": seccomp.digest(),
                "runtime": runtime.digest,
                "process_1": guest_tree.process_1_for(spec),
            },
            expected=boundary.expected(
                spec,
                writable=_DEVICES,
                files=(GUEST, *map(_shown, spec.masked)),
                namespaces=NAMESPACES,
                hidden=boundary.HIDDEN,
                kept_groups=_kept_groups(),
            ),
            rlimits=() if self._hierarchy else ("memory_bytes", "pids"),
        )

    def _argv(self, spec: SandboxSpec, runtime: Runtime, *, zygote: bool) -> tuple[str, ...]:
        """Return the whole command. ``{root}`` and the like stand for descriptors that differ from call to call."""
        own = boundary.own_mounts(spec)
        argv = [
            self._programs[0],
            *wall.NAMESPACES,
            "--uid", str(GUEST_UID), "--gid", str(GUEST_UID), "--hostname", "sandbox",
            "--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL",
            "--ro-bind-fd", "{root}", "/",
            "--ro-bind-fd", "{guest}", GUEST,
            "--proc", "/proc",
            "--dev", "/dev",
        ]  # fmt: skip
        # A zygote only needs places that modules write to when they are imported.
        for target, size in own.items():
            if not zygote or target == SCRATCH:
                argv += wall.tmpfs(target, size)
        if not zygote:
            argv += ["--disable-userns"]
        elif identity.has_users():
            argv += wall.USERS
        argv += ["--remount-ro", "/dev"]
        for number, mount in enumerate(spec.mounts):
            argv += ["--ro-bind-fd", f"{{mount{number}}}", mount.target]
            argv += wall.masks(spec, mount.target)
        argv += ["--clearenv"]
        for key, value in guest_tree.ENVIRONMENT.items():
            argv += ["--setenv", key, value]
        if zygote:
            # Else each fork looks up the functions that the zygote has not called, and writes them down; see ld.so(8).
            argv += ["--setenv", "LD_BIND_NOW", "1"]
        argv += ["--seccomp", "{seccomp}", "--"]
        argv += guest_tree.command(
            runtime.python,
            spec,
            hidden=boundary.HIDDEN,
            elsewhere=runtime.elsewhere,
            own_filter=self._filter() if zygote else b"",
            program_filter=seccomp.for_programs(process_1=False, children=not self._counted),
            zygote={"tmpfs": list(own.items()), "process_1": bool(guest_tree.process_1_for(spec))} if zygote else None,
        )
        return tuple(argv)

    def open(self, plan: Plan) -> AbstractAsyncContextManager[OpenSandbox]:
        """See ``Driver.open``."""
        return self._start(plan, {"seccomp": self._filter()})

    def _filter(self) -> bytes:
        """Return the guest's filter; if no group counts for it, it puts ``for_programs`` on the program too."""
        return seccomp.bpf() if self._counted else seccomp.bpf_for_filtering()

    @asynccontextmanager
    async def source(self, plan: Plan) -> AsyncIterator[Source]:
        """See ``Driver.source``: a zygote of this plan."""
        outer = replace(plan, action={**plan.action, "argv": plan.action["zygote"]})
        async with self._start(outer, {"seccomp": seccomp.bpf_for_zygote()}) as sandbox:
            try:
                namespaces = await _import_ahead(sandbox.channel)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                await sandbox.kill()
                words = (await sandbox.stats()).detail or "it ended without a word"
                raise SandboxError("Starting a zygote", words, "Run `glovebox doctor`.") from None
            seen = ZygoteView(namespaces=namespaces, filters=(await sandbox.host_view()).parts.get("filters"))

            orders = sandbox.channel.extra(SocketAttribute.raw_socket)  # noqa: S610 - not Django's

            def make() -> Fork:
                name = f"s{secrets.token_hex(8)}"
                group = Cgroup(self._hierarchy, name, plan.action["cgroup"])
                user = None if sandbox.user is None else identity.another(sandbox.user)
                try:
                    return fork(orders, seen, name, group, user)
                except LookupError as words:
                    raise self._unavailable(str(words)) from None
                except OSError as problem:
                    raise self._unavailable(f"its zygote is gone: {problem}") from problem

            yield Source(open=partial(_hold_fork, make), make=make, bytes_each=FORK_BYTES)


@asynccontextmanager
async def _hold_fork(make: Callable[[], Fork]) -> AsyncIterator[ProcessSandbox]:
    with anyio.CancelScope(shield=True):
        made = await anyio.to_thread.run_sync(make)
        process = Process(made.pid, made.pidfd, await UNIXSocketStream.from_socket(made.wire), ours=False)
    sandbox = ProcessSandbox(made.id, process, made.group, made.detail, zygote=made.zygote)
    try:
        yield sandbox
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.kill()
            await made.group.remove()
            os.close(made.detail)


async def _import_ahead(channel: UNIXSocketStream) -> Mapping[str, int]:
    """Wait until its imports are done; return the inode numbers of its own namespaces.

    Raises SandboxError if a module cannot be imported, and anyio.EndOfStream if it ended without a word.
    """
    attempted = "Importing what a profile preloads"
    fix = "Correct python.preload in the profile, or install the module in the sandboxes' Python."
    try:
        with anyio.fail_after(_IMPORT_SECONDS):
            words = (await channel.receive(_MAX_WORDS)).decode(errors="replace")
    except TimeoutError:
        raise SandboxError(attempted, f"it took longer than {_IMPORT_SECONDS:.0f} seconds", fix) from None
    try:
        namespaces: Mapping[str, int] = json.loads(words)["namespaces"]
    except (ValueError, TypeError, KeyError):
        raise SandboxError(attempted, words, fix) from None
    return namespaces


_LANDLOCK_FIX = "Boot Linux 5.13 or newer with landlock in its list of security modules (lsm=landlock,…)."


def connect(data: Path, server_id: str) -> AbstractAsyncContextManager[Bubblewrap]:
    """Find out what bubblewrap can enforce here, and provide it during the block; ``server_id`` names our groups."""
    missing = []
    if landlock.abi_version() == 0:
        missing.append(Missing(what="the kernel has no Landlock", fix=_LANDLOCK_FIX, fatal=True))
    try:
        seccomp.bpf()
    except SandboxError as problem:
        missing.append(Missing(what=problem.reason, fix=problem.fix, fatal=True))
    return Bubblewrap.connected(_TRIAL, data, server_id, {}, missing)


# A sandbox's needs of the kernel, tried with nothing but an empty root.
_TRIAL = ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(GUEST_UID), "--cap-drop", "ALL",
          "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true")  # fmt: skip


_OVERFLOW_GID = Path("/proc/sys/kernel/overflowgid")
"""The number shown for a group without one inside, see user_namespaces(7)."""


def _kept_groups() -> tuple[int, ...]:
    """Return the groups that stay with a user's processes: setgroups(2) is privileged."""
    if changes_user() or not set(os.getgroups()) - {os.getegid()}:
        return ()
    return (int(_OVERFLOW_GID.read_text()),)


def _shown(path: str) -> str:
    """Return a path as proc_pid_mountinfo(5) writes it."""
    return "".join(f"\\{ord(each):03o}" if each in "\\ \t\n" else each for each in path.rstrip("/"))
