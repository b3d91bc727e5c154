"""Runs several functions side by side, each up to where it asks something; all that is asked is answered at once.

A layer's forward is transformers' own, and cannot be cut in two where its router has chosen. So each chunk of rows runs
in a greenlet, which is left when it asks for its experts and goes on with the answer, in the same thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

Result = TypeVar("Result")


class _Asking(greenlet):  # type: ignore[misc]  # greenlet has no types
    """The greenlet of one of the functions that run side by side."""


def is_side_by_side() -> bool:
    """Whether the caller runs beside others, so that `ask` may be called."""
    return isinstance(getcurrent(), _Asking)


def ask(question: Any) -> Any:
    """The answer to a question, once all the others have asked theirs or have ended."""
    hub = getcurrent().parent
    assert hub is not None, "whoever asks was started by `side_by_side`"
    return hub.switch(question)


def side_by_side(
    functions: Sequence[Callable[[], Result]], answer: Callable[[list[Any]], Sequence[Any]]
) -> list[Result]:
    """Results of all functions; `answer` gets the questions that they have come to, and returns the answers.

    An error of any of them, or of `answer`, ends all.
    """
    tasks, results = [_Asking(function) for function in functions], dict[_Asking, Any]()
    for task in tasks:
        task.gr_context = copy_context()  # by default a greenlet sees none of the caller's context variables
    try:
        given: list[tuple[_Asking, tuple[Any, ...]]] = [(task, ()) for task in tasks]
        while given:
            yielded = [(task, task.switch(*arguments)) for task, arguments in given]
            results |= {task: value for task, value in yielded if task.dead}
            asking = [(task, question) for task, question in yielded if not task.dead]
            answers = answer([question for _, question in asking]) if asking else ()
            given = [(task, (answered,)) for (task, _), answered in zip(asking, answers, strict=True)]
    finally:
        for task in tasks:
            if not task.dead:
                task.throw()  # ends it, so that it gives back what it holds
    return [results[task] for task in tasks]
