"""Threads for what would hold up every stream on the event loop: building tokenizers, and using them on prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

NUM_THREADS = 2  # so that one long prompt does not hold up every short one

Result = TypeVar("Result")


class Tokenizing:
    """Keeps one tokenizer for all workers that have the same, and runs what takes long beside the event loop.

    The library holds Python's global lock while it builds a tokenizer, which takes a second for a large vocabulary:
    the thread helps little there, and that it happens once, whatever number of workers come and go, helps most. It
    gives the lock up while it encodes a text.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizing")
        self._building = Lock()
        self._built: WeakValueDictionary[TokenizerFiles, Tokenizer] = WeakValueDictionary()

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises, called in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def shared(self, files: TokenizerFiles) -> Tokenizer:
        """The tokenizer of these files: the same object for equal files, for as long as anybody has it."""
        return await self.run(lambda: self._shared(files))

    def close(self) -> None:
        """Ends the threads once they have nothing to do; work that has not begun is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _shared(self, files: TokenizerFiles) -> Tokenizer:
        with self._building:
            tokenizer = self._built.get(files)
            if tokenizer is None:
                tokenizer = Tokenizer(files)
                _ = tokenizer.longest_token  # worked out here, and remembered
                self._built[files] = tokenizer
            return tokenizer
