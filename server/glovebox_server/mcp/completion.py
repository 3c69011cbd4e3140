"""Completions: workspace paths for prompts, and artifact names for their resource template.

The host reads no names of the workspace for a caller. Paths therefore come from a ``list_workspace_files`` call, which
is decided by its profile, runs in a sandbox and is recorded. Only ``mcp.server`` imports this.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

import anyio
import mcp_types as types
from mcp.shared.exceptions import MCPError

from glovebox_server.artifacts.record import Artifact
from glovebox_server.calls import CallResult, Listener, Principal, SilentListener
from glovebox_server.failures import foreseen
from glovebox_server.mcp import prompts

#: Values in one answer, by the specification.
MAX_VALUES: Final = 100

#: Longest input in characters: longer than anything that is completed.
MAX_TYPED: Final = 512

#: Seconds after which the input is stale and the answer is empty.
SECONDS: Final = 5.0

_LIST: Final = "list_workspace_files"
_PATTERN: Final = str.maketrans(dict.fromkeys("*?[]{}", "?"))
"""Pattern characters become ``?``; names that do not match the prefix are dropped afterwards."""


Submit = Callable[[Principal, str, Mapping[str, Any], Listener], Awaitable[CallResult]]

Owned = Callable[[Principal], Awaitable[list[Artifact]]]


async def complete(
    params: types.CompleteRequestParams, principal: Principal, submit: Submit, owned: Owned, tools: Collection[str]
) -> types.CompleteResult:
    """Return the completions of an argument, possibly none; raise MCPError -32602 for unknown prompts and templates."""
    name, typed = params.argument.name, params.argument.value
    values: Sequence[str] = ()
    if isinstance(params.ref, types.PromptReference):
        prompt = prompts.find_prompt(params.ref.name, tools)
        if len(typed) <= MAX_TYPED and name in prompts.PATHS & {each.name for each in prompt.arguments or ()}:
            values = await _paths(typed, principal, submit)
    elif not params.ref.uri.startswith(("artifact://{", "audit://calls/{", "receipt://{")):
        raise MCPError(types.INVALID_PARAMS, "There is no such resource template.")
    elif params.ref.uri.startswith("artifact://{") and name == "id" and len(typed) <= MAX_TYPED:
        wanted = typed.casefold()
        mine = await owned(principal)
        values = [each.id for each in mine if each.id.startswith(typed) or each.name.casefold().startswith(wanted)]
    shown = list(values[:MAX_VALUES])
    more = len(values) > len(shown)
    return types.CompleteResult(
        completion=types.Completion(values=shown, total=None if more else len(shown), has_more=more)
    )


async def _paths(typed: str, principal: Principal, submit: Submit) -> list[str]:
    """Return the matching names in one folder; folders end with a slash, so that typing can continue."""
    pattern = f"{typed.translate(_PATTERN)}*"
    structured: Any = {}
    with anyio.move_on_after(SECONDS):
        try:
            result = await submit(principal, _LIST, {"pattern": pattern, "limit": MAX_VALUES + 1}, SilentListener())
        except Exception as error:
            if not foreseen(error):
                raise
            return []  # refused or unavailable: a call says why, where somebody reads it
        structured = result.structured
    entries = [(each["path"], each["type"]) for each in structured.get("entries", ())]
    paths = [f"{path}/" if kind == "directory" else path for path, kind in entries]
    return [path for path in paths if path.startswith(typed)]
