"""The JSON Schema of a profile, for editors: generated from the model into ``schema.json``, which we never read."""

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from glovebox_profiles.model import Profile

SCHEMA_FILE = Path(__file__).parent / "data" / "schema.json"


class _Described(GenerateJsonSchema):
    """Describes keys by the docstrings below them, read here alone: pydantic's own way costs each start 0.1 s."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Add descriptions to the properties of one model."""
        found = super().model_schema(schema)
        (model,) = ast.parse(inspect.getsource(schema["cls"])).body
        for key, text in pairwise(model.body if isinstance(model, ast.ClassDef) else ()):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(told))):
                    found["properties"][name]["description"] = inspect.cleandoc(told)
        return found


def schema_text() -> str:
    """Return the content of ``schema.json``; ``python -m glovebox_profiles.schema`` writes it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Profile.model_json_schema(schema_generator=_Described),
        "title": "Glovebox tool profile",
        "description": "Everything one tool may do. Every default is the closed one.",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
