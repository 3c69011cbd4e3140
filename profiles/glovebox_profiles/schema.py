"""The JSON Schema of a profile, for editors: generated from the model into ``schema.json``, which we never read."""

import json
from pathlib import Path

from glovebox_profiles.model import Profile

SCHEMA_FILE = Path(__file__).parent / "data" / "schema.json"


def schema_text() -> str:
    """Return the content of ``schema.json``; ``python -m glovebox_profiles.schema`` writes it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Profile.model_json_schema(),
        "title": "Glovebox tool profile",
        "description": "Everything one tool may do. Every default is the closed one.",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
