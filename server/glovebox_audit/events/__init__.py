"""The events of the audit log, by family; their drafts, and calls under way.

A new event is a class in the module of its family, with its kind: so it is a dataclass, and in ``EVENTS``.
"""

from glovebox_audit.events.approvals import *  # noqa: F403 - all its events
from glovebox_audit.events.base import *  # noqa: F403 - what each is made of
from glovebox_audit.events.calls import *  # noqa: F403 - all its events
from glovebox_audit.events.drafts import *  # noqa: F403 - for their writers
from glovebox_audit.events.log import *  # noqa: F403 - all its events
from glovebox_audit.events.promotions import *  # noqa: F403 - all its events
from glovebox_audit.events.server import *  # noqa: F403 - all its events
from glovebox_audit.events.stops import *  # noqa: F403 - all its events
from glovebox_audit.events.under_way import *  # noqa: F403 - for their writers and verifiers
