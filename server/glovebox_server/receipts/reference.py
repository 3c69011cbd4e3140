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


def table() -> str:
    """Return docs/operate/receipt-fields.csv: each field of each part."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["part", "field", "meaning"])
    for model, where in _WHERE.items():
        for name, field in model.model_fields.items():
            meaning, nested = field.description, field.annotation
            if meaning is None and isinstance(nested, type) and issubclass(nested, BaseModel):
                meaning = nested.__doc__
            lines.writerow([where, field.alias or name, " ".join((meaning or "").replace("``", "`").split())])
    return text.getvalue()
