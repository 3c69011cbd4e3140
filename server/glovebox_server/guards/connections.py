"""The order in which links stand around one connection of a call. A redirect passes all of them again.

A link is ``async (attempt, connect_next)``: it may hold something while the rest runs. Each line says why it stands
there; ``egress/gate.py`` has the links that need no guard.
"""

from glovebox_server.egress import ConnectionLink, EgressGate
from glovebox_server.guards.credentials.injector import CredentialInjector


def order_links(
    gate: EgressGate, *, injector: CredentialInjector | None = None, count: ConnectionLink | None = None
) -> tuple[ConnectionLink, ...]:
    """Return the links of a call's connections.

    ``injector`` has its keys and placeholders. ``count`` counts a connection against rates and budgets, or refuses it.
    """
    find_stray, inject = (injector.find_stray, injector.inject) if injector else (None, None)
    links = (
        gate.record_refusals,  # outermost: whatever another link refuses is recorded too, within a bound
        gate.read_target,  # what could be read in two ways is refused before anything is decided about it
        find_stray,  # outside the rules: a stray placeholder is reported though they refuse the request
        gate.apply_rules,  # before all that leaves this host: a denied name is never resolved (GB-NET-5)
        gate.open_tunnel,  # the name in a tunnel's TLS is part of what is asked
        inject,  # a request whose key cannot be had uses up no connection
        gate.limit,  # before resolving: a look-up is a message too
        gate.resolve,  # once: a second answer (rebinding) has no effect
        gate.check_addresses,  # of the whole answer, before budgets
        count,  # only what will be dialled is counted (GB-POL-27)
        gate.record,  # on disk with the address, then seen by watch rules, before it is dialled (GB-NET-8)
        gate.dial,  # innermost: connects to an address that was checked
    )
    return tuple(link for link in links if link is not None)
