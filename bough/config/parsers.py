"""Parsers of setting values. For invalid text they raise ValueError with the text "must be ..."."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf, nan
from typing import Any
from urllib.parse import urlsplit

AUTO = "auto"
DTYPE_NAMES = ("bfloat16", "float16", "float32")
DRAFT_BITS = ("auto", "4", "8", "16")
_UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}


def parse_bytes(text: str) -> int:
    """Bytes from "512MB", "1.5GiB" or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B|)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("must be a size such as 512MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers from "12-15,20"; empty text is no layers."""
    layers: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        begin, end = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if begin > end:
            raise ValueError("must be layers such as 12-15,20")
        layers.extend(range(begin, end + 1))
    return tuple(layers)


def parse_names(text: str) -> tuple[str, ...]:
    """Names from "a,b"; empty text is no names."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    if not all(names):
        raise ValueError("must be names such as a,b")
    return names


def parse_device(text: str) -> str:
    """A device name of torch, or "auto"; whether the device exists is checked when the model is loaded."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", text) is None:
        raise ValueError("must be auto, cpu, cuda or cuda:1")
    return text


def parse_shares(text: str) -> tuple[tuple[str, int], ...]:
    """GPUs and bytes of each from "cuda:1=10GB,cuda:2=8GB"; the empty text is none."""
    shares = []
    for part in text.split(",") if text else ():
        device, _, size = part.strip().partition("=")
        if re.fullmatch(r"cuda:[0-9]+", device) is None or not size:
            raise ValueError("must be GPUs and the memory to use of each, such as cuda:1=10GB,cuda:2=8GB")
        shares.append((device, parse_bytes(size)))
    if len({device for device, _ in shares}) < len(shares):
        raise ValueError("must name each GPU once")
    return tuple(shares)


def parse_stages(text: str) -> tuple[tuple[str, int], ...]:
    """Names of machines and bytes of each from "first:24GB,second:24GB"; at least two, the head first."""
    stages = []
    for part in text.split(","):
        name, _, size = part.strip().rpartition(":")
        try:
            stages.append((name, parse_bytes(size)))
        except ValueError:
            name = ""
        if not name:
            raise ValueError("must be machines and the memory to use of each, such as first:24GB,second:24GB")
    if len({name for name, _ in stages}) < max(2, len(stages)):
        raise ValueError("must name two machines or more, each once; the first is the head")
    return tuple(stages)


def parse_endpoint(text: str) -> str:
    """The URL of a gRPC server with scheme, host and port only; empty text is none."""
    try:
        url = urlsplit(text)
        is_plain = url.path in ("", "/") and not (url.query or url.fragment or url.username or url.password)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        is_plain = is_url = False
    if text and not (is_plain and is_url):
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT, without path, user or password")
    return text


def parse_address_or_none(text: str) -> str:
    """HOST:PORT of a gRPC server; empty text is none."""
    try:
        url = urlsplit(f"//{text}")
        is_address = bool(url.hostname and url.port) and url.netloc == text and "@" not in text
    except ValueError:
        is_address = False
    if text and not is_address:
        raise ValueError("must be HOST:PORT")
    return text


def number(kind: type[int] | type[float], low: float = -inf, high: float = inf) -> Callable[[str], Any]:
    """A parser of numbers from `low` to `high`."""
    limits = f", {low} to {high}" if high < inf else f", {low} or more" if low > -inf else ""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = nan
        if not low <= value <= high:
            raise ValueError(f"must be {'a whole number' if kind is int else 'a number'}{limits}")
        return value

    return parse


def one_of(*values: Any) -> Callable[[str], Any]:
    """A parser of one of these values."""

    def parse(text: str) -> Any:
        for value in values:
            if text == str(value):
                return value
        raise ValueError(f"must be {', '.join(str(value) for value in values if value)}")

    return parse


def parse_switch(text: str) -> bool:
    """True or false from yes, no, true or false."""
    answer = {"yes": True, "true": True, "no": False, "false": False}.get(text.lower())
    if answer is None:
        raise ValueError("must be yes or no")
    return answer


parse_count = number(int, 1)
parse_natural = number(int, 0)
MAX_PORT = 65535
parse_port = number(int, 0, MAX_PORT)
parse_seconds = number(float, 0.001)
parse_amount = number(float, 0)
