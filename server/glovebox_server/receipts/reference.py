"""The fields of a receipt as documentation, taken from the models. Used by a test and by nothing at run time."""

from collections.abc import Mapping

from pydantic import BaseModel

from glovebox_server.receipts import statement as parts

_WHERE: Mapping[type[BaseModel], str] = {
    parts.Statement: "The statement",
    parts.Subject: "`subject[]`",
    parts.Predicate: "`predicate`",
    parts.Call: "`predicate.call`",
    parts.GivenInput: "`predicate.inputs[]`",
    parts.Policy: "`predicate.policy`",
    parts.IsolationFound: "`predicate.isolation`",
    parts.IsolationField: "`predicate.isolation.fields[]`",
    parts.Connection: "`predicate.egress[]`",
    parts.OutcomeTold: "`predicate.outcome`",
    parts.Position: "`predicate.audit`",
    parts.Server: "`predicate.server`",
}


def markdown() -> str:
    """The fields section of docs/operate/receipts.md."""
    blocks = []
    for model, where in _WHERE.items():
        fields = []
        for name, field in model.model_fields.items():
            nested = field.annotation
            if field.description is None and isinstance(nested, type) and issubclass(nested, BaseModel):
                meaning = " ".join((nested.__doc__ or "").split())
            else:
                meaning = " ".join((field.description or "").split())
            fields.append(f"- `{field.alias or name}`: {meaning.replace('``', '`')}")
        blocks.append(f"### {where}\n\n" + "\n".join(fields))
    return "\n\n".join(blocks) + "\n"
