"""What policy says about a call, before anything starts. Pure: a profile, a tool and arguments in, a decision out.

Rules are asked in a fixed order and the first that objects decides. Nothing here can allow what the profile does not.
"""

from collections.abc import Mapping
from typing import Any

from glovebox_profiles.egress import decide_url
from glovebox_profiles.features import named
from glovebox_profiles.model import Profile, digest
from glovebox_profiles.order import value_at
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.plural import counted
from glovebox_server.calls import Decision, Effect
from glovebox_server.tools.base import Grant, Tool

_GRANTED_BY: Mapping[Grant, str] = {"network": "network.mode", "workspace": "files.workspace"}
"""Keys of a profile whose value ``none`` withholds something."""
_NO_OBJECTION = Refusal(rule="allow", reason="The profile allows it.", hint="")


def decide(tool: Tool, arguments: Mapping[str, Any], profile: Profile | None, profile_digest: str = "") -> Decision:
    """Decide one call.

    Args:
        tool: what is to be run.
        arguments: as its argument model read them.
        profile: the one in force for the tool; None where there is none.
        profile_digest: the profile's digest, if it is known already.
    """
    if profile is None:
        return Decision(
            effect="deny",
            rule="profile.missing",
            reason=f"There is no profile for {tool.name}, so it may do nothing.",
            hint="The operator can add one to the profile directory.",
            profile_digest="",
        )
    effect, refusal = _objection(tool, arguments, profile) or ("allow", _NO_OBJECTION)
    return Decision(
        effect=effect,
        rule=refusal.rule,
        reason=refusal.reason,
        hint=refusal.hint,
        profile_digest=profile_digest or digest(profile),
    )


def _objection(tool: Tool, arguments: Mapping[str, Any], profile: Profile) -> tuple[Effect, Refusal] | None:
    """The first rule that does not let the call through, and whether it denies or asks."""
    wall = profile.limits.wall_seconds
    timeout = arguments.get("timeout_seconds")
    if timeout is not None and timeout > wall:
        reason = f"timeout_seconds is {timeout:g}, and this tool's calls may take {counted(wall, 'second')}."
        return _deny("limits.wall_seconds", reason, f"Ask for at most {wall:g}, or leave timeout_seconds out.")
    if arguments.get("inputs") and not profile.files.inputs:
        return _deny("files.inputs", "This tool's profile takes no artifacts as inputs.", "Call it without inputs.")
    for grant in tool.needs:
        if value_at(profile, _GRANTED_BY[grant]) == "none":
            return _deny(_GRANTED_BY[grant], f"This tool's profile grants no {grant}.", "The operator can grant it.")
    if tool.request is not None:
        egress = decide_url(*tool.request(arguments), profile.network.allow)
        if egress.effect == "deny":
            return _deny("network.allow", egress.reason, egress.hint)
    if profile.approval == "ask":
        asking = named("approval", "ask")
        reason = f"This tool's profile wants a person to approve each call; {asking.reason}."
        return "ask", Refusal(rule="approval.ask", reason=reason, hint=asking.instead)
    return None


def _deny(rule: str, reason: str, hint: str) -> tuple[Effect, Refusal]:
    return "deny", Refusal(rule=rule, reason=reason, hint=hint)
