"""Bodies of very many values: refused before they are made, which would stop all streams for seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.http_api import body
from orchestrator.http_api.body import MAX_ENTRIES, MAX_VALUES, require_entries
from orchestrator.http_api.fields.errors import ApiError

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(alphabet='\\"[]{},:a\n\u00e9', max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text('\\"[{,', max_size=3), inner)),
    max_leaves=20,
)


def num_entries(value: Any) -> int:
    """Objects, arrays and strings, keys among them."""
    match value:
        case dict():
            return 1 + len(value) + sum(map(num_entries, value.values()))
        case list():
            return 1 + sum(map(num_entries, value))
    return int(isinstance(value, str))


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES, is_ascii=st.booleans())
def test_entries_are_counted_and_what_stands_in_texts_is_not(
    monkeypatch: pytest.MonkeyPatch, value: Any, is_ascii: bool
) -> None:
    content = json.dumps(value, ensure_ascii=is_ascii).encode()
    monkeypatch.setattr(body, "MAX_ENTRIES", num_entries(value))
    require_entries(content)
    monkeypatch.setattr(body, "MAX_ENTRIES", num_entries(value) - 1)
    with pytest.raises(ApiError):
        require_entries(content)


@pytest.mark.parametrize("each", ["[]", "{}", "[1]", '""', '{"role": "user"}', '"\\""', "[[[]]]"])
def test_a_body_of_too_many_entries_is_refused(each: str) -> None:
    few, many = (f'{{"prompt": [{", ".join([each] * num)}]}}'.encode() for num in (10_000, MAX_ENTRIES))
    require_entries(few)
    with pytest.raises(ApiError, match=f"body: must have at most {MAX_ENTRIES} objects, arrays and strings"):
        require_entries(many)


def test_many_tokens_are_accepted_and_too_many_are_not() -> None:
    require_entries(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")
    with pytest.raises(ApiError, match=f"{MAX_VALUES} values"):
        require_entries(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")
