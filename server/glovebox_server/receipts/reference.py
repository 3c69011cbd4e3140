"""Writes the documentation of a receipt's fields from the models. Used by a test and by nothing at run time."""

import csv
import io
from collections.abc import Mapping

from pydantic import BaseModel

from glovebox_server.receipts import statement as parts

_WHERE: Mapping[type[BaseModel], str] = {
    parts.Statement: "statement",
    parts.Subject: "subject[]",
    parts.Predicate: "predicate",
    parts.Call: "predicate.call",
    parts.GivenInput: "predicate.inputs[]",
    parts.Policy: "predicate.policy",
    parts.IsolationFound: "predicate.isolation",
    parts.IsolationField: "predicate.isolation.fields[]",
    parts.Connection: "predicate.egress[]",
    parts.OutcomeTold: "predicate.outcome",
    parts.Position: "predicate.audit",
    parts.Server: "predicate.server",
}


_SEEN_BY: Mapping[str, str] = {
    "subject[]": "broker, from the bytes that came",
    "predicate.isolation": "broker",
    "predicate.isolation host": "see its keys",
    "predicate.isolation.fields[] inside": "guest",
    "predicate.isolation.fields[] outside": "host's kernel, or Engine",
    "predicate.outcome ended": "guest; host's kernel for memory, and broker where the guest said nothing in time",
    "predicate.outcome exit_code": "guest",
    "predicate.outcome reason": "broker, from what `ended` is from",
    "predicate.outcome usage": "see its keys",
}
"""Part, or part and field → from whose observation it is; the broker's where nothing is said."""

HOST = (
    ("kernel", "Release of the host's kernel.", "host's kernel"),
    (
        "mechanism",
        "Version of bwrap, of the Engine and runc, or of runsc.",
        "that program, asked when the server started",
    ),
    (
        "runtime_declared",
        "Digest of the Python tree and the guest, as they were when they were built. Before, it was called `runtime`.",
        "nobody since: the runtime's own manifest declares it",
    ),
    ("image", "Id of the image.", "the Engine, which derives it from the image's configuration"),
    ("seccomp", "Digest of the policy that the filter is made of.", "broker"),
)
"""Keys of ``isolation.host``."""

_USAGE = (
    (
        "wall_ms",
        "Milliseconds from the job to the program's end.",
        "guest; broker where the guest said nothing in time",
    ),
    ("cpu_ms", "Milliseconds of processor time; before `cpu_from` was there, the guest's count.", "`cpu_from`"),
    ("cpu_from", "`group`: all of the sandbox from the job on. `guest`: the program, at least so much.", "broker"),
    ("memory_peak_bytes", "The most memory at one time.", "`memory_from`"),
    ("memory_from", "`group`: all of the sandbox. `guest`: the program's largest process.", "broker"),
    ("egress_…", "Sums over connections.", "broker"),
    ("workspace_…", "Files created, changed and deleted in a copy of the workspace.", "guest"),
)
"""Keys of ``outcome.usage``, which is open: what is added later needs no new version of the predicate."""


def table() -> str:
    """Return docs/operate/receipt-fields.csv: each field of each part."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["part", "field", "meaning", "observed by"])
    for model, where in _WHERE.items():
        for name, field in model.model_fields.items():
            meaning, nested = field.description, field.annotation
            if meaning is None and isinstance(nested, type) and issubclass(nested, BaseModel):
                meaning = nested.__doc__
            by = _SEEN_BY.get(f"{where} {name}") or _SEEN_BY.get(where, "broker")
            lines.writerow([where, field.alias or name, " ".join((meaning or "").replace("``", "`").split()), by])
    lines.writerows(("predicate.isolation.host", *row) for row in HOST)
    lines.writerows(("predicate.outcome.usage", *row) for row in _USAGE)
    return text.getvalue()
