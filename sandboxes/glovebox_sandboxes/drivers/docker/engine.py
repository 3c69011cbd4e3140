"""Call the Engine's API. The only module that uses the SDK at run time and translates its errors.

The SDK is synchronous: each call runs in a thread, is bounded in time, and is never abandoned half-way (an abandoned
"create" would leave an unknown container).
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeVar

import anyio.abc
import anyio.to_thread
import docker
import requests
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from docker.errors import APIError, DockerException, ImageNotFound
from docker.transport import unixconn

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import podman

T = TypeVar("T")
Client: TypeAlias = Any
"""The SDK's low-level client; its stubs leave half of the calls here untyped."""

DEFAULT_HOST = "unix:///var/run/docker.sock"
CALL_SECONDS = 20
"""For one API call. A start takes 0.1 s, and up to a few seconds when all processors are busy."""
_LOOK_SECONDS = 0.02
"""Between two looks at a container that is being removed, which takes about 50 ms."""
_CAUSE_SECONDS = 2.0
"""For the cause of a known end: 0.2 s on two processors with four sandboxes at once."""
_KILLED = 128 + signal.SIGKILL
_THREADS = 8
"""Calls under way at once: beyond that the daemon only queues them itself."""
_REASON_CHARACTERS = 500
_NOT_FOUND, _CONFLICT = 404, 409
_CREATING = "Creating a container"


def host_from_environment() -> str:
    """Return the Engine's address: ``DOCKER_HOST``, or the usual socket."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


class _UnixConnection(unixconn.UnixHTTPConnection):
    """The SDK's connection, closed here: the SDK leaves its socket to the garbage collector if the Engine is silent."""

    def connect(self) -> None:
        with ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(self.timeout)
            sock.connect(self.unix_socket)
            undo.pop_all()
        self.sock = sock


unixconn.UnixHTTPConnection = _UnixConnection  # type: ignore[misc]  # the SDK's pool makes connections by this name


class Engine:
    """The client of one Engine, over its unix socket."""

    def __init__(self, host: str) -> None:
        """Connect. Raises SandboxError if nothing answers, or from another machine, whose files are not ours."""
        self.host = host
        if not host.startswith("unix://"):
            reason = "it is not a socket of this machine, so neither workspace nor limits could be checked"
            fix = "Unset DOCKER_HOST, or set it to unix:///path/to/docker.sock."
            raise SandboxError(f"Connecting to the Docker Engine at {host}", reason, fix)
        self.socket = host.removeprefix("unix://")
        self._threads = anyio.CapacityLimiter(_THREADS)
        with translated(f"Connecting to the Docker Engine at {host}"):
            # First by hand: the SDK wraps "no such file" and "refused" in a paragraph, and leaves its socket open.
            with socket.socket(socket.AF_UNIX) as trial:
                trial.settimeout(CALL_SECONDS)
                trial.connect(self.socket)
            self.api: Client = docker.APIClient(
                base_url=host, version="auto", timeout=CALL_SECONDS, max_pool_size=_THREADS
            )
            # A socket needs no proxy settings, which the HTTP client would read from the environment at each request.
            self.api.trust_env = False
            self.version: Mapping[str, Any] = self.api.version()
        self.podman = any(part.get("Name") == "Podman Engine" for part in self.version.get("Components") or ())
        self.filters: dict[str, str] = {}
        """Podman's files of seccomp documents, by their text."""

    def close(self) -> None:
        """Close idle connections."""
        self.api.close()

    async def create(self, name: str, body: Mapping[str, Any]) -> str:
        """Create a container called ``name`` and return its id; raises SandboxError."""

        def create() -> Mapping[str, Any]:
            if not self.podman:
                return dict(self.api.create_container_from_config(dict(body), name=name))
            return self._ask("post", podman.CREATE, json=podman.specification(name, body, self.filters))

        made = await self._call(_CREATING, create)
        if self.podman and (warnings := made["Warnings"]):
            # Podman's way to report that a part was left out.
            raise SandboxError(_CREATING, f"Podman would not do all of it: {'; '.join(warnings)}", podman.FIX)
        return str(made["Id"])

    async def attach(self, name: str) -> anyio.abc.SocketStream:
        """Connect to input and output; before the start, or the first output is lost. Raises SandboxError."""

        def attach() -> int:
            attached = self.api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            # The SDK returns a file around the socket; detached, the connection is ours alone.
            return int(attached._sock.detach())  # noqa: SLF001 - as the SDK's own docker.utils.socket does

        descriptor = await self._call("Attaching to a container", attach)
        return await anyio.abc.UNIXSocketStream.from_socket(descriptor)

    async def start(self, name: str) -> None:
        """Start a container. Raises SandboxError."""
        await self._call("Starting a container", lambda: self.api.start(name))

    async def inspect(self, name: str) -> Mapping[str, Any] | None:
        """Return the Engine's description; None when it is gone. Raises SandboxError."""

        def inspect() -> Mapping[str, Any]:
            if not self.podman:
                return dict(self.api.inspect_container(name))
            # Podman's answer in the Engine's format omits the runtime.
            found = self._ask("get", podman.INSPECT.format(name))
            return {**found, "Image": f"sha256:{found['Image']}", "HostConfig": {"Runtime": found["OCIRuntime"]}}

        return await self._call("Inspecting a container", lambda: _unless((_NOT_FOUND,), inspect))

    async def ran_out_of_memory(self, name: str) -> bool:
        """Return whether memory ended a container, once the Engine has noticed its end. Raises SandboxError."""

        def told() -> bool:
            code = self.api.wait(name, timeout=CALL_SECONDS, condition="not-running")["StatusCode"]
            if self.api.inspect_container(name)["State"]["OOMKilled"]:
                return True
            # With gVisor's kernel the Engine may see the end before the cause, then reports the cause only as an event.
            until = time.monotonic() + _CAUSE_SECONDS
            while code == _KILLED and time.monotonic() < until:
                if remembered():
                    return True
                time.sleep(_LOOK_SECONDS)
            return False

        def remembered() -> bool:
            # It removes ended containers (AutoRemove), but keeps its last 256 events: these, until now.
            filters = {"container": [name], "event": ["oom"]}
            return bool(list(self.api.events(since=1, until=f"{time.time():.9f}", filters=filters, decode=True)))

        def answered() -> bool:
            found = _unless((_NOT_FOUND,), told)
            return remembered() if found is None else found

        return await self._call("Looking at an ended container", answered)

    async def kill(self, name: str) -> None:
        """Kill every process of it and wait until they are gone; does nothing if it has ended. Raises SandboxError."""

        def kill() -> None:
            try:
                self.api.kill(name)
            except APIError:
                # Podman answers with a failure where the Engine reports a conflict: the state counts.
                if self.api.inspect_container(name)["State"]["Running"]:
                    raise

        await self._call("Killing a container", lambda: _unless((_NOT_FOUND, _CONFLICT), kill))

    async def remove(self, name: str) -> None:
        """Kill and remove it with its volumes; wait until it is gone. Does nothing if it is. Raises SandboxError."""

        def remove() -> None:
            _unless((_CONFLICT,), lambda: self.api.remove_container(name, v=True, force=True))
            # A conflict is the Engine removing it itself (AutoRemove). Polled, because waiting for "removed" never ends
            # when the removal was faster than the request.
            for _ in range(int(CALL_SECONDS / _LOOK_SECONDS)):
                self.api.inspect_container(name)
                time.sleep(_LOOK_SECONDS)
            raise TimeoutError(f"{name} is still there after {CALL_SECONDS} s")

        await self._call("Removing a container", lambda: _unless((_NOT_FOUND,), remove))

    async def labelled(self, label: str) -> list[Mapping[str, Any]]:
        """Return every container with this label, running or not. Raises SandboxError."""
        filters = {"label": [label]}
        return await self._call("Listing containers", lambda: list(self.api.containers(all=True, filters=filters)))

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = self.api.request(method, self.api.base_url + path, timeout=CALL_SECONDS, **more)
        return dict(self.api._result(answer, json=True))  # noqa: SLF001 - as each of the SDK's own calls does

    def podman_info(self) -> Mapping[str, Any]:
        """Return Podman's description of its host. Blocking; raises what the SDK raises."""
        return dict(self._ask("get", podman.INFO)["host"])

    async def _call(self, attempted: str, function: Callable[[], T]) -> T:
        def call() -> T:
            with translated(attempted):
                return function()

        return await anyio.to_thread.run_sync(call, limiter=self._threads)


def _unless(statuses: tuple[int, ...], function: Callable[[], T]) -> T | None:
    """Return the function's value, or None if the Engine answers with one of these statuses."""
    try:
        return function()
    except APIError as problem:
        if problem.status_code in statuses:
            return None
        raise


def find_image(api: Client, name: str) -> Mapping[str, Any] | None:
    """Return an image's description, or None."""
    try:
        return dict(api.inspect_image(name))
    except ImageNotFound:
        return None


@contextmanager
def translated(attempted: str) -> Iterator[None]:
    """Turn all errors of the SDK and its HTTP client into SandboxError with the command that helps."""
    try:
        yield
    except ImageNotFound as problem:
        raise SandboxError(attempted, _sentence(problem), "Build the image: glovebox setup --docker") from problem
    except (DockerException, requests.RequestException, OSError) as problem:
        raise SandboxError(attempted, _sentence(problem), _fix(problem)) from problem


def _sentence(problem: Exception) -> str:
    # The kernel's own message, if there is one below the layers of the HTTP client.
    below = (cause.strerror for cause in _chain(problem) if isinstance(cause, OSError) and cause.strerror)
    plain = problem.explanation if isinstance(problem, APIError) else next(below, None)
    return str(plain or problem).strip().rstrip(".")[:_REASON_CHARACTERS]


_FIXES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((PermissionError,),
     "Let this user speak to the Engine (usermod -aG docker USER, then log in anew), or use rootless Docker."),
    ((requests.Timeout, TimeoutError),
     "The Engine is overloaded or hangs: see journalctl -u docker, and restart it if need be."),
    ((FileNotFoundError,), "Install and start it: `apt-get install docker.io && systemctl start docker`"),
    ((OSError,), "Start it: systemctl start docker"),
)  # fmt: skip


def _fix(problem: BaseException) -> str:
    # What the Engine itself answers is an OSError too, by the HTTP client's classes.
    kinds = _FIXES[: 3 if isinstance(problem, APIError) else 4]
    causes = list(_chain(problem))
    fixes = (fix for kind, fix in kinds if any(isinstance(cause, kind) for cause in causes))
    return next(fixes, "See the Engine's log: journalctl -u docker")


def _chain(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__


HEADER_BYTES = 8
STDOUT, STDERR = 1, 2
# Stream 3 carries the Engine's own complaints about the attachment; here they belong to the detail.
ENGINE_ERROR = 3
_DETAIL_BYTES = 2_000
"""Last bytes of errors of runtime and guest that are kept; see ``SandboxStats.detail``."""


class AttachedStream(ByteStream):
    """The guest's standard input and output as one byte stream; only the end of standard error is kept, apart."""

    def __init__(self, socket: ByteStream) -> None:
        self._socket = socket
        self._buffered = BufferedByteReceiveStream(socket)
        self._stream = 0
        self._remaining = 0
        self._words = b""

    @property
    def last_words(self) -> str:
        """Return the end of standard error."""
        return self._words.decode("utf-8", "replace")

    @property
    def is_between(self) -> bool:
        """Return whether it holds no part of a frame: another may then read on from the socket."""
        return not self._remaining and not self._buffered.buffer

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Return the connection's."""
        return self._socket.extra_attributes

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive standard output.

        Raises anyio.EndOfStream: the container has ended, the Engine is gone, or a terminal or another program answers.
        """
        try:
            while True:
                while self._remaining == 0:
                    header = await self._buffered.receive_exactly(HEADER_BYTES)
                    if header[0] not in (STDOUT, STDERR, ENGINE_ERROR) or header[1:4] != b"\0\0\0":
                        raise anyio.EndOfStream
                    self._stream, self._remaining = header[0], int.from_bytes(header[4:])
                data = await self._buffered.receive(min(max_bytes, self._remaining))
                self._remaining -= len(data)
                if self._stream == STDOUT:
                    return data
                self._words = (self._words + data)[-_DETAIL_BYTES:]
        except (anyio.BrokenResourceError, anyio.IncompleteRead) as problem:
            raise anyio.EndOfStream from problem

    async def send(self, item: bytes) -> None:
        """Send bytes to the guest's standard input; raises anyio.BrokenResourceError if it is gone."""
        await self._socket.send(item)

    async def send_eof(self) -> None:
        """Close the guest's standard input, which the guest takes as the end of its host: it exits."""
        await self._socket.send_eof()

    async def aclose(self) -> None:
        """Drop the connection; with ``StdinOnce`` the guest then reads the end of its input and exits."""
        await self._socket.aclose()
