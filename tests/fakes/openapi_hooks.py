"""Makes schemathesis, which is installed apart, read the document at /openapi.json as `narrow` leaves it.

It gives up where many rules have alternatives. A run has one of each, which the number in RULES chooses.
"""

from __future__ import annotations

import os
import random
from typing import Any

import schemathesis

from tests.fakes.openapi_narrowed import narrow

MAX_TOKENS = 64
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


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


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for short answers: the longest that may be asked for take minutes."""
    if case.path in LIMITS:
        case.body.pop("max_completion_tokens", None)  # the same in newer words
        name = LIMITS[case.path]
        case.body[name] = min(case.body.get(name) or MAX_TOKENS, MAX_TOKENS)
