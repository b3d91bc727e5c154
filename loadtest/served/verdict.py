"""What all parts together come to: the figures that stand first in the JSON line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BESIDE_GRPC = ("demonstration", "doors")  # parts that compare doors; the first that was run is told of
HTTP_DOORS = ("http", "proxy")


def verdict(parts: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """Of the figures by part, of which some may not have been run."""
    return {
        "ttft_ratio": _ratios(parts, "ttft_ratio"),
        "tpot_ratio": _ratios(parts, "tpot_ratio"),
        "overload_goodput_ratio": parts.get("overload", {}).get("goodput_ratio"),
        "failed_requests": sum(figures.get("failed", 0) for figures in _all(parts)),
        "unequal_texts": sum(figures.get("unequal", 0) for figures in _all(parts)),
        "leaks": parts.get("soak", {}).get("leaks", []),
        "clients": clients,
    }


def _ratios(parts: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """By door, over direct gRPC."""
    part = next((each for each in BESIDE_GRPC if each in parts), "")
    doors = {door: parts[part][door][name] for door in HTTP_DOORS if part and door in parts[part]}
    told = {door: {key: each[key] for key in ("geomean", "interval")} for door, each in doors.items() if each}
    return {"of": part, **told} if told else None


def _all(parts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Figures of each part; of `carrying`, of each of its steps."""
    for figures in parts.values():
        steps = [each for value in figures.values() if isinstance(value, list) for each in value]
        yield from [step for step in steps if isinstance(step, dict)] or [figures]
