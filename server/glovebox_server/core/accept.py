"""Accepts a call: checks its tool, its arguments, and its profile. Pure: no I/O and no MCP.

Rules are checked in a fixed order, and the first objection decides. Nothing here can allow what the profile does not.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from pydantic import ValidationError

from glovebox_audit.events import Effect
from glovebox_profiles.egress.rules import decide_url
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.model import Profile, digest
from glovebox_profiles.order import value_at
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_sandboxes.plural import counted
from glovebox_server.calls import Decision, Trace
from glovebox_server.core.call import Call
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.errors import InvalidArgumentsError, UnknownToolError
from glovebox_server.tools.base import Grant, Tool
from glovebox_server.workspace import NOT_SERVED

#: Problems named in one error; a caller repairs the first few.
MAX_PROBLEMS = 8
#: Characters of a field name in an error: names come from the caller too.
MAX_FIELD = 64


class Origin(TypedDict, total=False):
    """The origin of a call."""

    call_id: str
    """Call id if a listener waits for its records already; else a new one is made."""
    session: str | None
    run: str | None
    trace: Trace | None


def decide_call(call: Call, rights: Rights) -> Decision:
    """Decide a call under these rights. Pure, except for objections of guards."""
    request, tool = call.request, call.request.tool
    refusal = next((found for objection in call.objections if (found := objection(request)) is not None), None)
    if refusal is None and rights.role is not None:
        refusal = rights.refusal(tool)
    decision = decide(
        call.tool,
        request.arguments,
        rights.profiles.by_tool.get(tool),
        rights.profiles.digests.get(tool, ""),
        workspace=rights.workspace is not None,
        objection=refusal,
    )
    if rights.policy_digest:
        return replace(decision, role=rights.role, policy_digest=rights.policy_digest)
    return decision


def same_rights(rights: Rights) -> RightsOf:
    """Return a function that gives every caller the same rights."""
    return lambda _: rights


def find_tool(tools: Mapping[str, Tool], name: str, rights: Rights | None = None) -> Tool:
    """Return the tool of that name; raise ``UnknownToolError``, which lists what these rights show, or else all."""
    if name not in tools:
        raise UnknownToolError(name, tuple(sorted(tools if rights is None else rights.shown(tools))))
    return tools[name]


def validate_arguments(tool: Tool, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` as the tool's argument model reads it, defaults filled in, JSON-compatible.

    Values are not converted: text that looks like JSON stays text, ``"5"`` is not 5. Raises InvalidArgumentsError:
    lists each field that is unknown, missing, of the wrong type or out of bounds.
    """
    try:
        # Through JSON: only there, strict models read an array as a tuple. Lone surrogates stay escaped.
        text = json.dumps(dict(raw))
        return tool.arguments.model_validate_json(text).model_dump(mode="json", exclude_unset=False)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]
        problems = tuple(_sentence(tool, item["type"], _field(item["loc"]), item["msg"]) for item in details)
        fields = tuple(dict.fromkeys(_field(item["loc"]) for item in details))
        raise InvalidArgumentsError(tool.name, problems, fields) from None
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgumentsError(tool.name, ("arguments: must be one JSON object of ordinary depth",)) from None


def _sentence(tool: Tool, kind: str, field: str, message: str) -> str:
    if kind == "extra_forbidden":
        return f"{field}: unknown argument; this tool takes {', '.join(tool.arguments.model_fields)}"
    return f"{field}: required and missing" if kind == "missing" else f"{field}: {message[:1].lower()}{message[1:]}"


def _field(location: tuple[int | str, ...]) -> str:
    parts = (str(part).encode("ascii", "backslashreplace").decode() for part in location)
    return ".".join(part if len(part) <= MAX_FIELD else f"{part[:MAX_FIELD]}…" for part in parts) or "arguments"


_GRANTED_BY: Mapping[Grant, str] = {"network": "network.mode", "workspace": "files.workspace"}
"""Profile keys whose value ``none`` withholds a grant."""
_NO_OBJECTION = Refusal(rule="allow", reason="The profile allows it.", hint="")
_Objection = tuple[Effect, Refusal, str]


def decide(
    tool: Tool,
    arguments: Mapping[str, Any],
    profile: Profile | None,
    profile_digest: str = "",
    *,
    workspace: bool = True,
    objection: Refusal | None = None,
) -> Decision:
    """Decide one call by its objection, or else its profile in effect; without a profile it is denied."""
    found = _objections(tool, arguments, profile, workspace=workspace)
    allowed: _Objection = ("allow", _NO_OBJECTION, "")
    effect, refusal, recorded = next(found, allowed) if objection is None else ("deny", objection, "")
    return Decision(
        effect=effect,
        rule=refusal.rule,
        reason=refusal.reason,
        hint=refusal.hint,
        profile_digest=profile_digest or (digest(profile) if profile and objection is None else ""),
        recorded=recorded,
    )


def _objections(
    tool: Tool, arguments: Mapping[str, Any], profile: Profile | None, *, workspace: bool
) -> Iterator[_Objection]:
    """Yield from each rule that denies or asks, in their order."""
    if profile is None:
        reason = f"There is no profile for {tool.name}, so it may do nothing."
        yield _deny("profile.missing", reason, "The operator can add one to the profile directory.")
        return
    wall, timeout = profile.limits.wall_seconds, arguments.get("timeout_seconds")
    if timeout is not None and timeout > wall:
        reason = f"timeout_seconds is {timeout:g}, and this tool's calls may take {counted(wall, 'second')}."
        yield _deny("limits.wall_seconds", reason, f"Ask for at most {wall:g}, or leave timeout_seconds out.")
    if arguments.get("inputs") and not profile.files.inputs:
        yield _deny("files.inputs", "This tool's profile takes no artifacts as inputs.", "Call it without inputs.")
    for grant in tool.needs:
        if value_at(profile, _GRANTED_BY[grant]) == "none":
            reason = f"This tool's profile grants no {grant}."
            yield _deny(_GRANTED_BY[grant], reason, "The operator can grant it.")
    if "workspace" in tool.needs and not workspace:
        yield "deny", NOT_SERVED, ""
    if tool.request is not None:
        method, url = tool.request(arguments)
        egress = decide_url(method, url, profile.network.allow)
        if egress.effect == "deny":
            recorded = f"No rule allows what was asked of {_place(method, url)} ({egress.rule})."
            yield _deny("network.allow", egress.reason, egress.hint, recorded)
    if profile.approval == "ask":
        reason = "This tool's profile wants a person to approve each call."
        yield "ask", Refusal(rule="approval.ask", reason=reason, hint="Ask the user, then call again."), ""


def _place(method: str, url: str) -> str:
    try:
        target = parse_url(method, url)
    except RefusedError:
        return "an address that cannot be read"
    return f"{target.host} port {target.port}"


def _deny(rule: str, reason: str, hint: str, recorded: str = "") -> _Objection:
    return "deny", Refusal(rule=rule, reason=reason, hint=hint), recorded


def deny(decision: Decision, refusal: Refusal) -> Decision:
    """Return the decision, denied for this reason."""
    return replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint, recorded="")
