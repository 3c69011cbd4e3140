"""Masks secrets and injected keys in live output, names and the outcome (GB-FILE-11)."""

from collections.abc import Awaitable, Callable

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.core.call import Call, Ran, Show
from glovebox_server.core.chain import Next
from glovebox_server.core.result import withholding
from glovebox_server.core.rights import Rights
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.redaction.masking import finish_live, mask_live, mask_outcome, mask_text


def mask(forms_of: Callable[[Rights], Forms], call: Call, call_next: Next[Ran]) -> Awaitable[Ran]:
    """Mask what a call gives back. Guards outside see masked output only; observers saw it before."""
    now = call.now
    redact, rights, counts = now.profile.result.redact, now.rights, now.redacted
    live: Show | None = None

    def values() -> Forms:
        return forms_of(rights)

    def wrap(show: Show) -> Show:
        nonlocal live
        live = mask_live(show, redact, values)
        return live

    async def transform(outcome: Outcome, normal: bool) -> Outcome:
        if live is not None:
            finish_live(live, normal=normal)
        outcome, secrets = await mask_outcome(outcome, values())
        counts.update(secrets)
        if redact == "refuse" and counts:
            call.now.withheld = withholding(counts)
        return outcome

    now.mask_name = lambda name: mask_text(name, values(), counts)
    now.wrap_live.append(wrap)
    now.transforms.append(transform)
    return call_next(call)
