"""Masks secret files of the workspace, and withholds what a program put out if one appears while it runs."""

from functools import partial

from glovebox_server.core.call import Call, Program, Ran
from glovebox_server.core.chain import Next
from glovebox_server.guards.secret_files.hiding import Hiding


async def mask(hiding: Hiding, call: Call, call_next: Next[Ran]) -> Ran:
    """Mask secret files in the sandbox, and watch the workspace until the program has ended (GB-FILE-12)."""
    now = call.now
    if now.spec is None:
        raise AssertionError(call.request.id)
    async with hiding.guarding(now.spec, call.tool, now.reveal) as hidden:
        now.spec = hidden.spec
        now.wrap_live.append(hidden.printed)

        def watched(program: Program) -> Program:
            return partial(hidden.run, program)

        now.wrap_program.append(watched)
        return await call_next(call)
