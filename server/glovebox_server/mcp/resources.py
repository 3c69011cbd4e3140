"""Resources: ``artifact://…``, ``audit://calls/{id}``, ``receipt://{id}``, each for its principal alone.

Also notifies clients of changes: ``resources/updated``, and changed lists. Only ``mcp.server`` imports this.
"""

import base64
import codecs
import json
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import mcp_types as types
import rfc8785
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated, ServerEvent
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import event_to_notification
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from glovebox_audit import events, place, read, subscription
from glovebox_audit.chain import Record, canonical, time_of
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.sharing import FairLimiter
from glovebox_server.app import App
from glovebox_server.artifacts.record import Artifact, ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactReader
from glovebox_server.calls import Principal
from glovebox_server.core.rights import MAX_KEYS
from glovebox_server.errors import StoreError
from glovebox_server.guards.redaction.guard import mask_content
from glovebox_server.mcp import catalogue, delivery
from glovebox_server.mcp.catalogue import CAPABILITIES_URI
from glovebox_server.mcp.delivery import CALL_META_KEY, REDACTED_META_KEY, SHA256_META_KEY, Context, risks_meta

#: Most records of one call in one answer; a call makes about ten, plus one per connection.
MAX_RECORDS = 500
#: Seconds for which the manifest is cached: making one asks every driver.
MANIFEST_SECONDS = 5.0
#: Concurrent reads of the audit log, in fair turns: each scans segments of it.
READERS = 2
#: Bytes of the log that reads of one principal scan a second, in the long run: about 5 % of one processor.
LOG_BYTES_PER_SECOND = 64 << 20
#: Bytes that they may scan at once, after a rest.
LOG_BYTES_AT_ONCE = 512 << 20
#: Concurrent artifact reads, in fair turns: each passes through memory whole, twice.
ARTIFACT_READERS = 4
#: Long-lived requests of one principal at a time; each holds a stream open.
MAX_LISTENERS = 32
#: Most ``resources/subscribe`` per principal in the handshake eras; the oldest is dropped first. Over HTTP all share
#: one lifespan, and no principal evicts another's.
MAX_SUBSCRIPTIONS = 128
#: The last second of the year 9999, the latest that can be formatted.
_LAST_TIME = 253402300799.0
#: Longest address repeated to the caller.
_MAX_URI = 256
#: The audit log's directory below the state directory, as the composition root opens it.
AUDIT_DIRECTORY = "audit"

#: Why a file is not shown, and what to do.
_WITHHELD = (
    "It holds what only a secret looks like, and the profile of its tool shows nothing of such a file.",
    "The operator can look at it: glovebox artifact save.",
)

#: Key in a connection's state: this connection is notified of changed lists.
_LISTS = "glovebox.lists"
_CALL_URI = re.compile(r"audit://calls/(c_[0-9a-z]{26})", re.ASCII)
_RECEIPT_URI = re.compile(r"receipt://(c_[0-9a-z]{26})", re.ASCII)

CAPABILITIES = types.Resource(
    uri=CAPABILITIES_URI,
    name="capabilities",
    description="What can be had here, before any call: drivers, limits, network, tools, digests, what is refused.",
    mime_type="application/json",
)

BUDGET = types.Resource(
    uri="glovebox://budget",
    name="budget",
    description="What is left of your budgets, and when each refills.",
    mime_type="application/json",
)

TEMPLATES = (
    types.ResourceTemplate(
        uri_template="artifact://{id}{?offset,length}",
        name="artifact",
        description=(
            "A file that a call of yours wrote to /output, until it expires; one over 512 KiB in parts, offset and "
            "length in bytes."
        ),
    ),
    types.ResourceTemplate(
        uri_template="audit://calls/{call_id}",
        name="audit",
        description="Everything recorded about a call of yours: decision, measured isolation, egress, outcome.",
        mime_type="application/json",
    ),
    types.ResourceTemplate(
        uri_template="receipt://{call_id}",
        name="receipt",
        description="Signed proof of a call of yours: an in-toto statement in a DSSE envelope.",
        mime_type="application/json",
    ),
)


Lists = Callable[[Principal], Mapping[ServerEvent, object]]
"""Return a caller's lists that a policy can change, by the event of their change."""


#: Largest part of an artifact in one answer, in bytes: base64 adds a third, and clients reject messages over 1 MiB.
MAX_PART_BYTES = 512 * 1024
#: Key in a part's ``_meta`` of its ``offset`` and ``bytes``, the total size (``of``) and the address of the ``next``.
PART_META_KEY = "dev.glovebox/part"
#: A field of a part's address, of far more bytes than any store holds.
_PART = re.compile(r"(offset|length)=([0-9]{1,15})", re.ASCII)
Contents = types.TextResourceContents | types.BlobResourceContents


class Watches:
    """Subscriptions of the handshake eras in one lifespan of the SDK's server, each a task."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.tasks = tasks
        self.scopes: OrderedDict[tuple[str, str | None, str], anyio.CancelScope] = OrderedDict()


class Resources:
    """The handlers of resources and listening."""

    def __init__(self, app: App, stopping: anyio.Event, lists: Lists = lambda _: {}) -> None:
        self._app = app
        self._lists = lists
        self._stopping = stopping
        self._readers = FairLimiter(READERS, shared=True)
        self._artifacts = FairLimiter(ARTIFACT_READERS, shared=True)
        self._making = anyio.Lock()
        self._manifests: OrderedDict[tuple[object, ...], tuple[str, float]] = OrderedDict()
        self._listeners: Counter[str] = Counter()
        self._paid: OrderedDict[str, float] = OrderedDict()
        """Time at which each principal's scans of the log are paid for."""

    async def read(self, principal: Principal, uri: str, run: str | None = None) -> types.ReadResourceResult:
        """Return the content behind ``uri``.

        Raises MCPError: ``-32602`` in the same words for what is missing and what is another's; ``-32603`` if a store
        fails.
        """
        try:
            if uri == CAPABILITIES_URI:
                text = await self._capabilities(principal)
            elif uri == BUDGET.uri:
                budgets, rights = self._app.guards.budgets, self._app.guards.rights_of(principal)
                left = [] if budgets is None else await budgets.left(principal, run, rights)
                text = json.dumps({"left": [asdict(each) for each in left]})
            elif uri.startswith(("audit://", "receipt://")):
                text = await self._read_call(principal, uri)
            else:
                return await self._read_artifact(principal, uri)
            contents = types.TextResourceContents(uri=uri, mime_type="application/json", text=text)
            return types.ReadResourceResult(contents=[contents])
        except RefusedError as error:
            raise MCPError(types.INVALID_PARAMS, str(error), {"uri": uri[:_MAX_URI], "rule": error.rule}) from None
        except StoreError as error:
            raise MCPError(types.INTERNAL_ERROR, str(error.refusal)) from error
        except (ArtifactStoreError, place.AuditError) as error:
            raise MCPError(types.INTERNAL_ERROR, str(error)) from error

    async def owned(self, principal: Principal) -> list[Artifact]:
        """Return the artifacts a principal can read, newest first; empty if the store fails, which a read reports."""
        async with self._artifacts.turn(principal.id):
            try:
                return await self._app.artifacts.owned(principal)
            except ArtifactStoreError:
                return []

    async def _capabilities(self, principal: Principal) -> str:
        app, rights = self._app, self._app.guards.rights_of(principal)
        async with self._making:
            text, made_anew_at = self._manifests.get(rights.key, ("", 0.0))
            if not text or anyio.current_time() >= made_anew_at:
                drivers, environments = app.broker.sandboxes.drivers, app.environments
                manifest = await catalogue.build_manifest(
                    tools=app.tools, rights=rights, environments=environments, drivers=drivers, version=app.version
                )
                text = json.dumps(manifest)
                self._manifests[rights.key] = text, anyio.current_time() + MANIFEST_SECONDS
                if len(self._manifests) > MAX_KEYS:
                    self._manifests.popitem(last=False)
            return text

    async def _read_artifact(self, principal: Principal, uri: str) -> types.ReadResourceResult:
        address, asked, query = uri.partition("?")
        async with self._artifacts.turn(principal.id), self._app.artifacts.open(address, principal) as reader:
            artifact, meta = reader.artifact, dict[str, Any]()
            if asked:
                content, meta = await _read_part(reader, query)
            else:
                uri, content = artifact.uri, await reader.read(MAX_PART_BYTES)
            redact, values = self._app.redaction(principal, artifact.tool)
            content, secrets = (content, {}) if redact == "none" else await mask_content(content, values)
            if secrets and redact == "refuse":
                raise RefusedError("result.redact", *_WITHHELD)
        return types.ReadResourceResult(contents=[_contents(uri, artifact, content, secrets, meta)])

    async def _read_call(self, principal: Principal, uri: str) -> str:
        if match := _CALL_URI.fullmatch(uri):
            records = await self._records(principal, match[1])
            return rfc8785.dumps({"records": [delivery.show_record(record) for record in records]}).decode()
        if match := _RECEIPT_URI.fullmatch(uri):
            records = await self._records(principal, match[1], events.ReceiptSigned.kind)
            # Exactly the bytes that the receipt's digest covers.
            return canonical(records[0].data["envelope"]).decode()
        raise _unknown()

    async def _records(self, principal: Principal, call_id: str, kind: str | None = None) -> list[Record]:
        """Return the records of a caller's call, or those of one kind, after the caller's earlier scans are paid for.

        Raises RefusedError: the segments read hold no such record of the caller's.
        """
        paid, most = self._paid, LOG_BYTES_AT_ONCE / LOG_BYTES_PER_SECOND
        while True:
            async with self._readers.turn(principal.id):
                wait = paid.get(principal.id, 0.0) - most - anyio.current_time()
                if wait <= 0:
                    scanned: list[int] = []
                    near = read.records_near(self._app.settings.state_dir / AUDIT_DIRECTORY, call_id, scanned.append)
                    try:
                        records = await anyio.to_thread.run_sync(_chosen, near, principal, kind)
                    finally:
                        now = anyio.current_time()
                        paid[principal.id] = max(paid.pop(principal.id, now), now) + sum(scanned) / LOG_BYTES_PER_SECOND
                        while next(iter(paid.values())) < now:
                            paid.popitem(last=False)
                    break
            await anyio.sleep(wait)
        if not records:
            raise _unknown(call_id)
        return records

    async def subscribe(self, ctx: Context, principal: Principal, session: str | None, uri: str) -> None:
        """Send ``resources/updated`` for ``uri`` on this connection until it unsubscribes or ends."""
        call_id = self._running(principal, uri)
        if call_id is None:
            told = "You have no such running call; only audit://calls/{call_id} changes over time."
            raise MCPError(types.INVALID_PARAMS, told, {"uri": uri[:_MAX_URI]})
        watches: Watches = ctx.lifespan_context
        key = (principal.id, session, uri)
        await self.unsubscribe(ctx, principal, session, uri)
        watches.scopes[key] = scope = anyio.CancelScope()
        watches.tasks.start_soon(self._watch, ctx, principal, call_id, scope)
        own = [known for known in watches.scopes if known[0] == principal.id]
        if len(own) > MAX_SUBSCRIPTIONS:
            watches.scopes.pop(own[0]).cancel()

    async def unsubscribe(self, ctx: Context, principal: Principal, session: str | None, uri: str) -> None:
        """End a subscription, if there is one."""
        scope = ctx.lifespan_context.scopes.pop((principal.id, session, uri), None)
        if scope is not None:
            scope.cancel()

    async def _watch(self, ctx: Context, principal: Principal, call_id: str, scope: anyio.CancelScope) -> None:
        with scope:
            async with self._app.audit.subscribe(call_id=call_id, principal=principal.id) as records:
                async for _ in records:
                    await ctx.session.send_resource_updated(f"audit://calls/{call_id}")

    async def listen_resources(
        self, ctx: Context, principal: Principal, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Serve the modern era's ``subscriptions/listen``: changes of a principal's calls under way and of its lists.

        Only resources that can still change are acknowledged: other calls get no more records, and without a policy no
        list changes.
        """
        bus = InMemorySubscriptionBus()
        handler = ListenHandler(bus)
        async with (
            self._listening(principal),
            self._app.audit.subscribe(principal=principal.id) as records,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_feed, bus, records)
            tasks.start_soon(delivery.call_when, self._stopping, handler.close)
            asked = params.notifications
            uris = dict.fromkeys(asked.resource_subscriptions or ())
            told = [uri for uri in uris if self._running(principal, uri)]
            only = types.SubscriptionFilter(resource_subscriptions=told or None)
            if self._app.in_force.follows:
                only.tools_list_changed = asked.tools_list_changed
                only.prompts_list_changed = asked.prompts_list_changed
                tasks.start_soon(self._tell_lists, principal, bus.publish)
            result = await handler(ctx, params.model_copy(update={"notifications": only}))
            tasks.cancel_scope.cancel()
        return result

    def follow_lists(self, ctx: Context, principal: Principal) -> None:
        """Notify a connection of the handshake eras, which has read a list, of changed lists until it ends."""
        connection = delivery.connection_of(ctx)
        modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
        if modern or not self._app.in_force.follows or _LISTS in connection.state:
            return
        connection.state[_LISTS] = scope = anyio.CancelScope()
        connection.exit_stack.callback(scope.cancel)

        async def tell(event: ServerEvent) -> None:
            await connection.notify(event_to_notification(event, {}).method, None)

        async def follow() -> None:
            with scope:
                await self._tell_lists(principal, tell)

        ctx.lifespan_context.tasks.start_soon(follow)

    async def _tell_lists(self, principal: Principal, tell: Callable[[ServerEvent], Awaitable[None]]) -> None:
        changed, found = self._app.in_force.changed, self._lists(principal)
        while True:
            await changed.wait()
            changed, before, found = self._app.in_force.changed, found, self._lists(principal)
            for event in found:
                if found[event] != before[event]:
                    await tell(event)

    def _running(self, principal: Principal, uri: str) -> str | None:
        """Return the principal's call under way that an address names."""
        match = _CALL_URI.fullmatch(uri)
        return match[1] if match and self._app.audit.owner_of(match[1]) == principal.id else None

    @asynccontextmanager
    async def _listening(self, principal: Principal) -> AsyncIterator[None]:
        count = self._listeners[principal.id]
        if count >= MAX_LISTENERS:
            raise MCPError(types.INTERNAL_ERROR, f"Too many listeners: {count} streams of yours are open. Close one.")
        self._listeners[principal.id] += 1
        try:
            yield
        finally:
            self._listeners -= Counter((principal.id,))


def _chosen(near: Generator[Record, None, None], principal: Principal, kind: str | None) -> list[Record]:
    """Return the records of a principal's call, or of one kind; empty if the first record names another principal."""
    with closing(near) as records:
        first = next(records, None)
        if first is None or first.kind != events.CallDecided.kind or first.data.get("principal") != principal.id:
            return []
        wanted = (record for record in chain([first], records) if kind in {None, record.kind})
        return list(islice(wanted, MAX_RECORDS))


def _unknown(call_id: str = "") -> RefusedError:
    hint = "A call's id is in the _meta and the structured content of its result."
    made = time_of(call_id)
    if made is None:
        return RefusedError("audit.unknown", "You have no such call.", hint)
    when = datetime.fromtimestamp(min(made, _LAST_TIME), UTC)
    part = f"the part of the log of {when:%Y-%m-%d %H:%M:%S} UTC, which its id names"
    reason = f"You have no such call in {part}; no other was read."
    return RefusedError(
        "audit.unknown", reason, f"{hint} Where a clock was wrong, the operator has: glovebox audit show."
    )


async def _feed(bus: InMemorySubscriptionBus, records: subscription.Subscription) -> None:
    async for item in records:
        if isinstance(item, Record):
            await bus.publish(ResourceUpdated(uri=f"audit://calls/{item.call_id}"))


async def _read_part(reader: ArtifactReader, query: str) -> tuple[bytes, dict[str, Any]]:
    """Return one part of an artifact, and its ``_meta``; raise RefusedError for a part beyond its end."""
    artifact = reader.artifact
    offset, length = _numbers(query)
    if offset >= max(1, artifact.bytes):
        raise _no_part(f"offset is {offset}, and the artifact ends at {artifact.bytes}.")
    content = b"".join([piece async for piece in reader.part(offset, length)])
    if _is_text(artifact) and offset + len(content) < artifact.bytes:
        content = _whole_characters(content)
    about: dict[str, Any] = {"offset": offset, "bytes": len(content), "of": artifact.bytes}
    if (end := offset + len(content)) < artifact.bytes:
        about["next"] = f"{artifact.uri}?offset={end}&length={length}"
    return content, {PART_META_KEY: about, SHA256_META_KEY: artifact.sha256}


def _contents(
    uri: str, artifact: Artifact, content: bytes, secrets: Mapping[str, int], meta: Mapping[str, Any]
) -> Contents:
    """Return bytes of an artifact in MCP's form: as text if they are UTF-8."""
    redacted = {REDACTED_META_KEY: dict(secrets)} if secrets else {}
    made_by = {
        "call_id": artifact.call_id, "principal": artifact.owner, "client": artifact.client, "run": artifact.run,
        "workflow": artifact.workflow,
    }  # fmt: skip
    made_by = {name: value for name, value in made_by.items() if value is not None}
    known = {
        "uri": uri,
        "mime_type": artifact.media_type,
        "_meta": {CALL_META_KEY: made_by, **risks_meta(artifact.risks), **redacted, **meta},
    }
    if _is_text(artifact):
        try:
            return types.TextResourceContents(text=content.decode(), **known)
        except UnicodeDecodeError:
            pass
    return types.BlobResourceContents(blob=base64.b64encode(content).decode(), **known)


def _numbers(query: str) -> tuple[int, int]:
    fields = query.split("&")
    named = {match[1]: int(match[2]) for match in map(_PART.fullmatch, fields) if match}
    if len(named) < len(fields):
        raise _no_part("A part is named by offset and length, each at most once, in decimal digits.")
    length = named.get("length", MAX_PART_BYTES)
    if not 0 < length <= MAX_PART_BYTES:
        raise _no_part(f"length is {length}, and may be from 1 to {MAX_PART_BYTES}.")
    return named.get("offset", 0), length


def _no_part(reason: str) -> RefusedError:
    return RefusedError(
        "artifacts.part", reason, f"Begin with ?offset=0&length={MAX_PART_BYTES}; each part names the next."
    )


def _is_text(artifact: Artifact) -> bool:
    return artifact.media_type.startswith("text/") or artifact.media_type == "application/json"


def _whole_characters(content: bytes) -> bytes:
    """Leave an incomplete last character to the next part, unless nothing would remain."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(content)
    except UnicodeDecodeError:
        return content
    return content[: len(content) - len(decoder.getstate()[0])] or content
