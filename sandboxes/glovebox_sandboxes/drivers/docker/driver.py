"""Open containers as ``plan`` decided."""

import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio.abc
import anyio.to_thread

from glovebox_sandboxes.contract.base import Capabilities, Driver, Plan, SandboxSpec, SandboxStats, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import janitor, podman, probe, usage
from glovebox_sandboxes.drivers.docker import plan as plans
from glovebox_sandboxes.drivers.docker.engine import AttachedStream, Engine, host_from_environment
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.host.host_view import HostView, look, unseen
from glovebox_sandboxes.host.owner import is_orphan, new_mark
from glovebox_sandboxes.host.process import Janitor, hand_over
from glovebox_sandboxes.seccomp import docker_profile

_AT_ONCE = 2
"""Removals at one time: each costs the daemon about 50 ms of a processor, which the next start needs too."""
_TRIES = 3
_RETRY_SECONDS = 0.5
_SHUTDOWN_SECONDS = 30
"""Longest wait at the end of ``running``: 256 containers take about 10 s."""

_log = logging.getLogger(__name__)


class Remover:
    """Removals under way, and those that failed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns = anyio.CapacityLimiter(_AT_ONCE)
        self._waiting: dict[str, anyio.CancelScope] = {}
        self.tasks: anyio.abc.TaskGroup
        """Of what is done beside the block of ``running``, and ends with the removals."""
        self.leaked: dict[str, str] = {}
        """Containers that could not be removed, and why; the next server's ``reap`` tries again."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work during the block, then until all containers are gone, at most 30 s."""
        problem: Exception | None = None
        try:
            async with anyio.create_task_group() as self.tasks:
                try:
                    yield
                except Exception as raised:  # noqa: BLE001 - raised below, as itself and not in the group's wrapping
                    problem = raised
                finally:
                    # No await from here on: the block may be leaving because it was cancelled. Removals are shielded,
                    # and the task group waits for them.
                    for scope in self._waiting.values():
                        scope.deadline = anyio.current_time() + _SHUTDOWN_SECONDS
        finally:
            for name in sorted(self._waiting):
                self._give_up(name, f"not done within {_SHUTDOWN_SECONDS} s of the server's end")
        if problem is not None:
            raise problem

    def take(self, name: str, identifier: str) -> None:
        """Remove a container by name or id, also for a cancelled task; ``identifier``: empty if not reported."""
        self._waiting[name] = anyio.CancelScope(shield=True)
        self.tasks.start_soon(self._end, name, identifier)

    async def reap(self, label: str) -> None:
        """Remove every container whose ``label`` names a server of this machine that is gone."""
        for container in await self._engine.labelled(label):
            labels: Mapping[str, str] = container.get("Labels") or {}
            if is_orphan(labels.get(label, "")):
                _log.warning("removing container %s, whose server is gone", container["Id"])
                self.take(container["Id"], container["Id"])

    async def _end(self, name: str, identifier: str) -> None:
        with self._waiting[name]:
            async with self._turns:
                await self._remove(name)
                # An Engine that is gone, or was killed in the middle of a start, leaves its processes running.
                if identifier and (killed := await anyio.to_thread.run_sync(usage.end, identifier)):
                    _log.warning("the Engine left processes of container %s: %d are killed", identifier, killed)
                del self._waiting[name]

    async def _remove(self, name: str) -> None:
        for _ in range(_TRIES):
            try:
                await self._engine.remove(name)
            except SandboxError as problem:
                reason = problem.reason
                await anyio.sleep(_RETRY_SECONDS)
            except Exception as problem:  # noqa: BLE001 - of one container; the others are still to be removed
                reason = f"internal error ({type(problem).__name__}: {problem})"
                break
            else:
                return
        self._give_up(name, reason)

    def _give_up(self, name: str, reason: str) -> None:
        self.leaked[name] = reason
        _log.error("container %s could not be removed: %s. Run `docker rm -f %s`.", name, reason, name)


READY_BYTES = 12 * 1024 * 1024
PRELOADED_BYTES = 40 * 1024 * 1024
OWNER_LABEL = plans.LABEL + "owner"
"""On every container: the server process that made it (see ``glovebox_sandboxes.host.owner``)."""
SANDBOX_LABEL = plans.LABEL + "sandbox"


@dataclass(kw_only=True, eq=False)
class DockerSandbox:
    """One container and the connection to its guest."""

    id: str
    name: str
    engine: Engine
    channel: AttachedStream
    action: Mapping[str, Any]
    _group: cgroup.GroupFiles = field(default_factory=lambda: cgroup.GroupFiles({}))
    _bounded: bool = False
    _found: Mapping[str, Any] | None = None
    _located: anyio.Event = field(default_factory=anyio.Event)
    _last: SandboxStats = field(default_factory=SandboxStats)
    _looked: bool = False

    async def locate(self) -> None:
        """Find the container's control groups, and complete its limits: once, beside the guest's own start."""
        try:
            found = self._found = await self.engine.inspect(self.name)
            if found is not None:
                pid, container = found["State"]["Pid"], found["Id"]
                self._group = usage.group(pid, container)
                self._bounded = usage.bound_sockets(self._group)
        except SandboxError as problem:
            _log.warning("the container of sandbox %s cannot be inspected: %s", self.id, problem.reason)
        finally:
            self._located.set()

    async def host_view(self) -> HostView:
        """See ``Sandbox.host_view``."""
        await self._located.wait()
        found, host = self._found, self.action["HostConfig"]
        if found is None:
            return unseen("the Engine does not tell its container's process")
        back = {
            "image": (self.action["Image"], found["Image"]),
            "runtime": (host["Runtime"], found["HostConfig"]["Runtime"]),
        }
        limited = self._group.directories and "Memory" in host
        limits = usage.limits(self._group, host, bounded=self._bounded) if limited else {}
        if host["Runtime"] == "runsc":
            return unseen("the host sees the process of gVisor's kernel, not what runs on it", {**back, **limits})
        if self._first() is None:
            # The number may be another process's here.
            return unseen("the Engine's processes have other numbers here", back)
        return look(found["State"]["Pid"], {**back, **limits})

    def hand_over(self) -> dict[str, int]:
        """See ``OpenSandbox.hand_over``."""
        return hand_over(self.channel, self._first, self._group)

    def _first(self) -> int | None:
        if self._found is None:
            return None
        pid, container = int(self._found["State"]["Pid"]), self._found["Id"]
        return pid if usage.group(pid, container).directories or usage.started(pid, container) else None

    def cpu_seconds(self) -> float | None:
        """See ``Sandbox.cpu_seconds``."""
        return self._group.cpu_seconds()

    async def kill(self) -> None:
        """End every process of the sandbox; return when they are gone. Raises SandboxError."""
        await self._located.wait()
        # The last chance: counters vanish with the processes, and soon after the Engine's record of them. Processes
        # that end from here on are ended by this.
        if not self._looked:
            with suppress(SandboxError):
                await self._look()
                self._looked = True
        await self.engine.kill(self.name)

    def weigh(self, parts: int) -> None:
        """See ``Sandbox.weigh``: in the kernel, if visible; the Engine would take longer than the call."""
        self._group.weigh(parts)

    async def stats(self) -> SandboxStats:
        """Return the kernel's counts, and the Engine's once the container has ended. Raises SandboxError."""
        await self._located.wait()
        if not self._looked:
            await self._look()
        return replace(self._last, detail=self.channel.last_words)

    async def _look(self) -> None:
        reading = self._group.stats()
        if reading is not None:
            self._last = reading
            return
        if self._group.directories:
            # They existed and are gone: so is every process, and the Engine is about to report why.
            killed = await self.engine.ran_out_of_memory(self.name)
        else:
            # Control groups are not visible (this server may be in a container): only the Engine's word.
            found = await self.engine.inspect(self.name)
            killed = found is not None and bool(found["State"]["OOMKilled"])
        self._last = replace(self._last, out_of_memory=self._last.out_of_memory or killed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineLink:
    """A driver's state while the Engine answers."""

    engine: Engine
    host: plans.Host
    remover: Remover
    janitor: Janitor
    mark: str


class DockerDriver:
    """Driver of containers of the local Docker Engine; made by ``connect``."""

    adopt: Final = AttachedStream

    def __init__(self, capabilities: Capabilities, connection: _EngineLink | None) -> None:
        self.name = capabilities.driver
        self.capabilities = capabilities
        self._connection = connection
        self._seccomp = docker_profile()

    @classmethod
    @asynccontextmanager
    async def connect(cls, runtime: plans.Runtime = "runc", data: Path | None = None) -> AsyncIterator["DockerDriver"]:
        """Probe the Engine (``DOCKER_HOST`` or the usual socket), remove what dead servers left, and drive it.

        Without an Engine there is a driver too: its capabilities list what is missing. On leaving, it waits at most 30
        s until every container is removed; one that cannot be removed is logged and is in ``leaked``. The data
        directory lists the environments beside the default.
        """
        async with AsyncExitStack() as stack:
            try:
                engine = await anyio.to_thread.run_sync(Engine, host_from_environment())
                stack.callback(engine.close)
                capabilities, host = await anyio.to_thread.run_sync(probe.probe, engine, runtime, data)
                mark = new_mark()
                filters = ""
                if engine.podman:
                    text = plans.filter_text(docker_profile())
                    file = await anyio.to_thread.run_sync(podman.write_filter, text)
                    engine.filters, filters = {text: str(file)}, str(file.parent)
                    stack.callback(shutil.rmtree, filters, ignore_errors=True)
                cleaner = Janitor(Path(janitor.__file__), engine.socket, f"{OWNER_LABEL}={mark}", filters)
                stack.push_async_callback(cleaner.stop)
                if filters:
                    cleaner.start()
                remover = Remover(engine)
                await stack.enter_async_context(remover.running())
                await remover.reap(OWNER_LABEL)
            except SandboxError as problem:
                driver = cls(probe.unavailable(problem, runtime), None)
            except OSError as problem:  # of Podman's filter, or of the janitor that removes it
                lacking = SandboxError("", problem.strerror or str(problem), "Make room for temporary files (TMPDIR).")
                driver = cls(probe.unavailable(lacking, runtime), None)
            else:
                connection = _EngineLink(engine=engine, host=host, remover=remover, janitor=cleaner, mark=mark)
                driver = cls(capabilities, connection)
            yield driver

    @property
    def leaked(self) -> Mapping[str, str]:
        """Return the containers that could not be removed, and why."""
        return {} if self._connection is None else self._connection.remover.leaked

    def plan(self, spec: SandboxSpec) -> Plan:
        """Return the container that would be created for ``spec``; starts nothing.

        Raises:
            UnsupportedSpecError: a field cannot be enforced by Docker.
            SandboxError: the driver is not usable on this host at all.
        """
        return plans.make(spec, self._connected().host, self._seccomp)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[DockerSandbox]:
        """Create, attach, start; on leaving, the remover takes the container and the guest loses its input.

        Raises:
            SandboxError: the Engine could not do it.
            UnsupportedSpecError: a mount's source leads to a place of the host that no sandbox may see.
        """
        connection = self._connected()
        engine = connection.engine
        plans.check_closed(plan.action)
        for mount in plan.spec.mounts:
            # The Engine follows symbolic links: their present targets count.
            plans.check_source(str(await anyio.Path(mount.source).resolve()), engine.socket)
        connection.janitor.start()
        sandbox_id = secrets.token_hex(8)
        # Named by us, so that it can be removed even if the answer to "create" never came.
        name = f"glovebox-{sandbox_id}"
        labels = {**plan.action["Labels"], OWNER_LABEL: connection.mark, SANDBOX_LABEL: sandbox_id}
        identifier = ""
        try:
            identifier = await engine.create(name, {**plan.action, "Labels": labels})
            with anyio.CancelScope(shield=True):  # a cancellation in the middle would lose the connection
                stream = AttachedStream(await engine.attach(name))
            try:
                await engine.start(name)
                sandbox = DockerSandbox(id=sandbox_id, name=name, engine=engine, channel=stream, action=plan.action)
                connection.remover.tasks.start_soon(sandbox.locate)
                yield sandbox
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()
        finally:
            connection.remover.take(name, identifier)

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """See ``Driver.source``."""
        each = READY_BYTES + PRELOADED_BYTES * bool(plan.spec.preload)
        return nullcontext(Source(open=partial(self.open, plan), bytes_each=each))

    def _connected(self) -> _EngineLink:
        fatal = next((missing for missing in self.capabilities.missing if missing.fatal), None)
        if fatal is not None:
            raise SandboxError("Using Docker", f"it lacks {fatal.what}", fatal.fix)
        if self._connection is None:
            raise RuntimeError("a usable driver is made by connect()")
        return self._connection


def connect(data: Path, server_id: str) -> AbstractAsyncContextManager[Driver]:  # noqa: ARG001 - every driver's
    """See ``Entry.connect``: the Engine keeps the images, and containers have a mark of their own."""
    return DockerDriver.connect(data=data)
