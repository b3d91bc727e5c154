"""What all objects of request bodies have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

Ignored = Any  # accepted; has no influence on the answer


class Fields(BaseModel):
    """Refuses unknown fields by name, so that a misspelt field is not ignored silently."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Drop nulls: some clients send every field they know, with null for those not set."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data
