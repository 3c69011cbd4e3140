"""Every name that telemetry uses: conventions of OpenTelemetry, of Grafana dashboard 25252, and our own. Plain data.

Source: https://github.com/open-telemetry/semantic-conventions-genai, in development.
"""

import re
from typing import Final, NamedTuple, get_args

from glovebox_audit.events import EVENTS
from glovebox_audit.query.outcomes import OUTCOMES
from glovebox_profiles.policy.model import WatchAction
from glovebox_server.tools import TOOLS

#: Of a label in place of a value that is none of its own.
OTHER: Final = "_OTHER"
METHOD, TOOL, CALL = "mcp.method.name", "gen_ai.tool.name", "gen_ai.tool.call.id"
SESSION, PROTOCOL, TRANSPORT, ERROR = "mcp.session.id", "mcp.protocol.version", "network.transport", "error.type"
TOOL_CALL, TOOL_ERROR, CANCELLED = "tools/call", "tool_error", "cancelled"
#: Spans inside a call's.
ADMISSION, DECISION, SANDBOX, RUN = "admission", "decision", "sandbox", "run"
CONNECTIONS_MADE, COLLECT, RECEIPT = "connections", "collect", "receipt"

#: Attributes of a call's span by record and field, and of its connections. Arguments and output are on record only
#: where the profile keeps them.
OF_RECORDS: Final = {
    "call.decided": {"effect": "glovebox.decision", "rule": "glovebox.rule", "approval": "glovebox.approval",
                     "role": "glovebox.role", "run": "glovebox.run", "arguments": "gen_ai.tool.call.arguments"},
    "sandbox.started": {"level": "glovebox.isolation.level", "driver": "glovebox.isolation.driver",
                        "verified": "glovebox.isolation.verified"},
    "call.finished": {"ended": "glovebox.ended", "kept": "gen_ai.tool.call.result"},
    "call.cancelled": {"by": "glovebox.ended.by"},
    "call.failed": {"error": "glovebox.failure"},
    "receipt.signed": {"digest": "glovebox.receipt.digest"},
}  # fmt: skip
OF_CONNECTIONS: Final = {
    "scheme": "url.scheme", "host": "server.address", "port": "server.port", "method": "http.request.method",
    "effect": "glovebox.decision", "rule": "glovebox.rule", "status": "http.response.status_code",
    "bytes": "http.response.body.size",
}  # fmt: skip

#: The status of dashboard 25252 for each outcome; of any other it is ``error``.
STATUS: Final = {"succeeded": "success", "denied": "denied", "ask": "denied", "cancelled": "cancelled"}
#: Callers whose name an operator chose, or the system: not the subjects of an authorization server.
CLIENT: Final = re.compile(r"(?:token|local):[A-Za-z0-9._:@-]{1,128}", re.ASCII)
#: Such callers that have series of their own; later ones are counted as ``OTHER``.
MAX_CLIENTS: Final = 256
METHODS: Final = frozenset({
    "completion/complete", "initialize", "logging/setLevel", "notifications/cancelled", "notifications/initialized",
    "notifications/progress", "notifications/roots/list_changed", "ping", "prompts/get", "prompts/list",
    "resources/list", "resources/read", "resources/subscribe", "resources/templates/list", "resources/unsubscribe",
    "server/discover", "subscriptions/listen", "tools/call", "tools/list",
})  # fmt: skip
_CODES = frozenset(map(str, (-32700, *range(-32603, -32599), -32002, -32001, -32000)))
#: The closed set of each label but ``client_id``.
LABELS: Final = {
    METHOD: METHODS,
    PROTOCOL: frozenset({"2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"}),
    TRANSPORT: frozenset({"pipe", "tcp"}),
    ERROR: frozenset({TOOL_ERROR, *OUTCOMES, *_CODES}),
    TOOL: frozenset(TOOLS),
    "tool_name": frozenset(TOOLS),
    "status": frozenset({*STATUS.values(), "error"}),
    "outcome": frozenset(OUTCOMES),
    "effect": frozenset({"allow", "deny", "ask"}),
    "action": frozenset(get_args(WatchAction)),
    "kind": frozenset(EVENTS),
}


class Metric(NamedTuple):
    """One metric."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = "1"
    kind: str = "counter"

    @property
    def prometheus(self) -> str:
        """Return its name in Prometheus."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return self.name.replace(".", "_") + unit + ("_total" if self.kind == "counter" else "")


CALLS: Final = Metric("mcp.tool.calls", "Calls that are over, by status.", ("tool_name", "client_id", "status"))
OUTCOME: Final = Metric("glovebox.calls", "Calls that are over, by outcome.", ("tool_name", "outcome"))
PROCESSOR: Final = Metric("glovebox.calls.cpu", "Processor time of programs.", ("tool_name",), "s")
CONNECTIONS: Final = Metric("glovebox.connections", "Connections out of sandboxes.", ("tool_name", "effect"))
ANSWERS: Final = Metric("glovebox.approvals", "Answers to questions.", ("effect",))
ALARMS: Final = Metric("glovebox.alarms", "Alarms of watch rules.", ("action",))
REFUSED: Final = Metric("glovebox.requests.refused", "Requests that were refused before they became calls.")
RECORDS: Final = Metric("glovebox.records", "Records of the audit log.", ("kind",))
DURATION: Final = Metric(
    "gen_ai.execute_tool.duration", "Time from a call's turn to its end.", (TOOL, ERROR), "s", "histogram"
)
OPERATION: Final = Metric(
    "mcp.server.operation.duration", "Time of a message.", (METHOD, TOOL, ERROR, TRANSPORT, PROTOCOL), "s", "histogram"
)
SESSIONS: Final = Metric("mcp.server.session.duration", "Length of sessions.", (TRANSPORT, PROTOCOL), "s", "histogram")
SERVERS: Final = Metric("glovebox.servers", "Server processes that have the log open.", kind="gauge")
UNCOUNTED: Final = Metric("glovebox.uncounted", "Bytes of the log not counted yet.", unit="By", kind="gauge")
METRICS: Final = {each.name: each for each in [*globals().values()] if isinstance(each, Metric)}


def closed(label: str, value: object) -> str:
    """Return a label's value if it is in its closed set, empty for none, else ``OTHER``."""
    if value is None or value == "":
        return ""
    known = isinstance(value, str) and (CLIENT.fullmatch(value) if label == "client_id" else value in LABELS[label])
    return str(value) if known else OTHER
