"""Threads for work that would block the event loop: building tokenizers, and tokenizing prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

NUM_THREADS = 2  # so that one long prompt does not delay every short one; each keeps words of each tokenizer

Result = TypeVar("Result")


class Tokenizing:
    """Shares one tokenizer among workers with equal ones, and runs slow work in threads.

    The tokenizers library holds the GIL while it builds one, a second for a large vocabulary, so that sharing helps
    more than the thread. It releases the GIL while it encodes. In each thread it keeps the tokens of the first 10,000
    words of each tokenizer, those of deleted tokenizers included, until the thread ends (tokenizers 0.23).
    """

    def __init__(self) -> None:
        self._threads = _new_threads()
        self._building = Lock()
        self._built: WeakValueDictionary[TokenizerFiles, Tokenizer] = WeakValueDictionary()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread; returns or raises what it does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def shared(self, files: TokenizerFiles) -> Tokenizer:
        """The tokenizer of these files; the same object for equal files, while anybody uses it."""
        tokenizer, is_new = await self.run(lambda: self._shared(files))
        if is_new:  # the words of tokenizers that it may have replaced go with the threads
            self._threads.shutdown(wait=False)
            self._threads = _new_threads()
        return tokenizer

    def close(self) -> None:
        """End the threads; queued work is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

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
