"""The JSON Schema of a profile, for editors: generated from the model, kept in ``schema.json``, never read by us."""

import json
from pathlib import Path

from glovebox_profiles.model import Profile

SCHEMA_FILE = Path(__file__).parent / "data" / "schema.json"


def schema_text() -> str:
    """Return what ``schema.json`` must hold; ``python -m glovebox_profiles.schema`` writes it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Profile.model_json_schema(),
        "title": "Glovebox tool profile",
        "description": "Everything one tool may do. Every default is the closed one.",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
