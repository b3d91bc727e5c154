"""How an answer marks its thoughts, and where the prompt has left it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Beginning(Enum):
    """Where an answer begins."""

    INSIDE = auto()  # in thoughts that the prompt has opened
    BEFORE = auto()  # before thoughts, which the model may open or not
    AFTER = auto()  # after thoughts that the prompt has closed, so that there are none


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around the thoughts of one answer."""

    begin: str
    end: str
    beginning: Beginning


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer of messages, whose headers tell which are thoughts (OpenAI's harmony format)."""

    header: str  # what the prompt has of the first message
