"""Summary of all parts: the first figures of the JSON line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BESIDE_GRPC = ("demonstration", "doors")  # parts that compare APIs; the first that was run is reported
HTTP_DOORS = ("http", "proxy")


def verdict(parts: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """Summarise the figures by part; some parts may be missing."""
    return {
        "ttft_ratio": _ratios(parts, "ttft_ratio"),
        "tpot_ratio": _ratios(parts, "tpot_ratio"),
        "overload_goodput_ratio": parts.get("overload", {}).get("goodput_ratio"),
        "failed_requests": sum(figures.get("failed", 0) for figures in _all(parts)),
        "unequal_texts": sum(figures.get("unequal", 0) for figures in _all(parts)),
        "bad_exits": sum(figures.get("bad_exits", 0) for figures in _all(parts)),
        "leaks": parts.get("soak", {}).get("leaks", []),
        "clients": clients,
    }


def has_failed(told: Mapping[str, Any]) -> bool:
    """Whether a summary tells of something that must not happen, however slow the machine is."""
    return any(told[name] for name in ("failed_requests", "unequal_texts", "bad_exits", "leaks"))


def _ratios(parts: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Ratios to direct gRPC by API."""
    part = next((each for each in BESIDE_GRPC if each in parts), "")
    doors = {door: parts[part][door][name] for door in HTTP_DOORS if part and door in parts[part]}
    told = {door: {key: each[key] for key in ("geomean", "interval")} for door, each in doors.items() if each}
    return {"of": part, **told} if told else None


def _all(parts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The figures of each part, and those of its steps."""
    for figures in parts.values():
        steps = [each for value in figures.values() if isinstance(value, list) for each in value]
        yield from [figures, *(step for step in steps if isinstance(step, dict))]
