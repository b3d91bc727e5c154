"""Threads for work that would block the event loop: building tokenizers, and tokenizing prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

NUM_THREADS = 2  # one long prompt must not delay every short one; each thread caches words of each tokenizer

Result = TypeVar("Result")


class Tokenizing:
    """Shares one tokenizer among workers with equal ones, and runs slow work in threads.

    The tokenizers library holds the GIL while it builds one, a second for a large vocabulary: sharing helps more than
    the thread. It releases the GIL while it encodes. In each thread it keeps the tokens of the first 10,000
    words of each tokenizer, those of deleted tokenizers included, until the thread ends (tokenizers 0.23).
    """

    def __init__(self) -> None:
        self._threads = _new_threads()
        self._is_closed = False
        self._unfinished: set[Future[Any]] = set()  # work of these threads, and of those before them
        self._building = Lock()
        self._built: WeakValueDictionary[TokenizerFiles, Tokenizer] = WeakValueDictionary()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread; returns or raises what it does."""
        future = self._threads.submit(work)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return await asyncio.wrap_future(future)

    async def shared(self, files: TokenizerFiles) -> Tokenizer:
        """The tokenizer of these files; the same object for equal files, while anybody uses it."""
        tokenizer, is_new = await self.run(lambda: self._shared(files))
        if is_new and not self._is_closed:  # the words of tokenizers that it may have replaced go with the threads
            self._threads.shutdown(wait=False)
            self._threads = _new_threads()
        return tokenizer

    def close(self) -> None:
        """End the threads, also replaced ones that still have work; what is queued is dropped."""
        self._is_closed = True
        self._threads.shutdown(wait=False)
        for future in [*self._unfinished]:
            future.cancel()  # unless it runs

    def _shared(self, files: TokenizerFiles) -> tuple[Tokenizer, bool]:
        """The tokenizer, and whether it was built for this call."""
        with self._building:
            known = self._built.get(files)
            if known is not None:
                return known, False
            tokenizer = Tokenizer(files)
            _ = tokenizer.longest_token  # computed and cached here
            self._built[files] = tokenizer
            return tokenizer, True


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, "tokenizing")
