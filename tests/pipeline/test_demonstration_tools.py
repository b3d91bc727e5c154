"""Tools with the demonstration model's real weights, by openai's package and by agents built on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bough.client import Client
from tests.conftest import pipeline, settings

openai = pytest.importorskip("openai", reason="extra `clients`")

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}


@pytest.fixture(scope="module")
async def url(smollm: Path) -> AsyncIterator[str]:
    async with pipeline(settings(smollm, smollm, drops="3,14")) as cluster, Client(cluster.address) as client:
        yield f"{(await client.server_info()).http_url}/v1"


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_tool_is_called_and_its_result_is_answered(client: Any) -> None:
    model = (await client.models.list()).data[0].id
    asked = {"model": model, "temperature": 0, "tools": TOOLS, "max_completion_tokens": 60}
    one = asked | {"messages": [QUESTION], "parallel_tool_calls": False}
    message = (await client.chat.completions.create(**one, tool_choice="required")).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    named = {"type": "function", "function": {"name": "weather"}}
    async with client.chat.completions.stream(**one, tool_choice=named) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    answer = await client.chat.completions.create(**asked, messages=[QUESTION, message, result], tool_choice="none")
    assert answer.choices[0].message.content


@pytest.mark.long
async def test_without_a_required_call_the_model_decides(client: Any) -> None:
    model = (await client.models.list()).data[0].id
    answer = await client.chat.completions.create(
        model=model, temperature=0, messages=[QUESTION], tools=TOOLS, max_completion_tokens=60
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls


@pytest.mark.long
async def test_an_agent_calls_a_tool_and_uses_its_result(client: Any) -> None:
    agents = pytest.importorskip("agents", reason="extra `clients`")
    agents.set_tracing_disabled(True)
    called = []

    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return "Sunny."

    model = agents.OpenAIChatCompletionsModel((await client.models.list()).data[0].id, client)
    how = agents.ModelSettings(tool_choice="weather", parallel_tool_calls=False, temperature=0, max_tokens=80)
    tool = agents.function_tool(weather)
    agent = agents.Agent(name="a", tools=[tool], model=model, model_settings=how)
    result = await asyncio.wait_for(agents.Runner.run(agent, str(QUESTION["content"])), 120)
    assert called
    assert result.final_output is not None
