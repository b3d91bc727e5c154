"""Makes schemathesis, which is installed apart, read the document at /openapi.json as `narrow` leaves it.

It gives up where many rules have alternatives. A run has one of each, which the number in RULES chooses.
"""

from __future__ import annotations

import os
import random
from typing import Any

import schemathesis

from tests.fakes.openapi_narrowed import narrow


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Narrow the document before requests are made from it."""
    narrow(raw_schema)
    rng = random.Random(os.environ.get("RULES", "1"))
    schemas = raw_schema["components"]["schemas"]
    schemas["CompletionFields"]["properties"]["echo"] = {"enum": [False, None]}  # simulated workers score no prompts
    for schema in schemas.values():
        for rule in schema.get("allOf", ()):
            if choices := [each for each in rule.get("anyOf", ()) if "echo" not in each.get("required", ())]:
                rule["anyOf"] = [rng.choice(choices)]
