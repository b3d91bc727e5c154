"""The HTTP API that most tests of this folder call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.http_stack import HttpStack, http_stack


@pytest.fixture(scope="module")
async def endpoint(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpStack]:
    """An orchestrator with simulated workers, served over HTTP, and a client of it."""
    async with http_stack(tmp_path_factory.mktemp("endpoint")) as running:
        yield running
