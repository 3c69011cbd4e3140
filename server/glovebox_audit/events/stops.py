"""Events of stops, watch rules and tokens. They belong to no call: clients do not hear them."""

from glovebox_audit.events.base import Event


class StopMade(Event, kind="stop.made"):
    """Something is stopped from now on, until ``stop.lifted``: calls under way end, new ones are refused."""

    stop: str
    """Its id."""
    scope: str
    """What is named: ``call``, ``run``, ``principal``, ``workflow``, ``tool`` or ``all``."""
    name: str
    """The name; empty for everything."""
    because: str
    """Why; callers read it too, but of a watch rule's stop only that the operator's rules stopped them."""
    by: str
    """Who made it: a principal, or ``watch:`` and the rule."""


class StopLifted(Event, kind="stop.lifted"):
    """A stop is no longer in force."""

    stop: str
    """Its id."""
    by: str
    """Who lifted it."""


class WatchAlarm(Event, kind="watch.alarm"):
    """A watch rule found what it looks for. What it found is not in here: it may be a secret."""

    rule: str
    """Id of the rule."""
    action: str
    """What it did: ``record``, ``slow``, ``ask`` or ``stop``."""
    where: str
    """In what: ``stdout``, ``stderr``, ``value``, ``arguments``, ``url``, ``request``, ``file``, ``picture`` or, of
    what is counted, ``calls``."""
    what: str
    """What was found, in a few words of ours: a kind of secret, the id of a canary, a number, or a host."""
    call: str | None = None
    """Id of the call."""
    tool: str | None = None
    """Name of its tool."""
    principal: str
    """Id of the caller."""
    client: str | None = None
    """What the client calls itself; self-reported."""
    run: str | None = None
    """Id of the run."""
    workflow: str | None = None
    """Name of the workflow."""


class TokenCreated(Event, kind="token.created"):
    """An operator is about to make a token. On disk before it is."""

    principal: str
    """Who comes with it: ``token:<name>``."""
    by: str
    """Who makes it: ``local:<uid>``."""
    role: str | None = None
    """The role it is bound to."""
    workflow: str | None = None
    """The workflow its calls belong to."""
    expires: str | None = None
    """When it ends, in UTC; absent where it does not."""


class TokenRevoked(Event, kind="token.revoked"):
    """An operator ended a token. It is gone before this is written, so that nothing can keep it in force."""

    principal: str
    """Who came with it: ``token:<name>``."""
    by: str
    """Who ended it: ``local:<uid>``."""
