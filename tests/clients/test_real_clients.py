"""Clients that others wrote, as their users call them, against a bough that runs beside them: extra `clients`.

Each runs in a process of its own: what it imports, patches and warns of is not the tests' business. These are
forked from one that has imported the library that most of them use, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import pytest

from bough.client import Client
from bough.processes.launch import Cluster
from tests.fakes.processes.bough_up import bough_up_command

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
CALL_SECONDS = 120
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it asks the internet at its import
}


class Served(NamedTuple):
    """The addresses of both APIs."""

    grpc: str
    base_url: str  # with /v1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`bough up` without weights, on free ports."""
    log = tmp_path_factory.mktemp("clients") / "up.log"
    command = bough_up_command("--simulate", "l40-70b-4bit")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"base URL (\S+/v1)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        address = re.search(r"ready: (\S+)", log.read_text())
        assert address
        yield Served(address[1], found[1])
    finally:
        process.terminate()
        process.wait(30)


# Imports what its arguments name, and then runs each program of standard input, a JSON line of code, arguments, seconds
# that it may take, and files for its output and errors, in a forked process, whose exit status it prints.
FORKS = """
import json, os, signal, sys
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    code, arguments, seconds, *files = json.loads(line)
    if (forked := os.fork()) == 0:
        signal.alarm(seconds)
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<client>", "exec"), globals())
        break
    print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Python:
    """The process that forks, and where programs write."""

    process: subprocess.Popen[str]
    folder: Path

    def check(self, code: str, *arguments: str) -> str:
        """What a program prints. Its assertions are the test's."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        output, errors = self.folder / "output", self.folder / "errors"
        print(
            json.dumps([code, arguments, CALL_SECONDS, str(output), str(errors)]), file=self.process.stdin, flush=True
        )
        assert self.process.stdout.readline() == "0\n", errors.read_text()
        return output.read_text()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    command = [sys.executable, "-c", FORKS, *(["openai"] if find_spec("openai") else [])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT) as process:
        yield Python(process, tmp_path_factory.mktemp("python"))


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: extra `clients`")


OPENAI = """
import sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Why is the sky blue?"}]
asked = dict(model=model, messages=question, seed=7, temperature=0.8, max_completion_tokens=24, reasoning_effort="none",
             extra_body={"chat_template_kwargs": {"enable_thinking": False}})

whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
assert all(len(each.top_logprobs) == 2 for each in whole.choices[0].logprobs.content)

chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text, "streamed and whole differ"
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0

assert len({c.message.content for c in client.chat.completions.create(**asked, n=2).choices}) == 2
completion = client.completions.create(
    model=model, prompt="The sky is", max_tokens=8, seed=1, extra_body={"ignore_eos": True}
)
assert completion.choices[0].finish_reason == "length"

for wanted, changed in (
    (openai.NotFoundError, dict(model="no-such-model")),
    (openai.BadRequestError, dict(messages=[])),
    (openai.BadRequestError, dict(temperature=-1)),
):
    try:
        client.chat.completions.create(**{**asked, **changed})
    except wanted as exc:
        assert exc.body["param"] == next(iter(changed)), exc.body
    else:
        raise AssertionError(f"{changed} was taken")
print(text)
"""


@needs("openai")
def test_openai_client(served: Served, python: Python) -> None:
    """Models, chat whole and streamed, log-probabilities, several choices, completions, and errors by their class."""
    assert python.check(OPENAI, served.base_url).strip()


RESPONSES = """
import sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
extra = {"seed": 7}
asked = dict(model=model, input="Why is the sky blue?", temperature=0.8, max_output_tokens=24, extra_body=extra)

whole = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
chat = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": asked["input"]}], temperature=0.8, max_tokens=24, seed=7
)
text = whole.output_text
assert text and text == chat.choices[0].message.content, (text, chat)
assert len(whole.output[0].content[0].logprobs) == whole.usage.output_tokens == chat.usage.completion_tokens
assert all(len(each.top_logprobs) == 2 for each in whole.output[0].content[0].logprobs)

events = list(client.responses.create(**asked, stream=True))
assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text, "streamed and whole differ"
assert events[-1].response.output_text == text and events[-1].response.usage.input_tokens_details.cached_tokens >= 0
with client.responses.stream(model=model, input="Sky?", max_output_tokens=500, extra_body=extra | {"stop": [" "]}) as s:
    done = [event for event in s if event.type == "response.output_text.done"]
    assert s.get_final_response().output_text == done[0].text and s.get_final_response().status == "completed"

said = [{"role": "user", "content": "Why?"}, *whole.output, {"role": "user", "content": "And at night?"}]
again = client.responses.create(model=model, input=said, instructions="Be short.", max_output_tokens=4)
assert again.usage.input_tokens > whole.usage.input_tokens

for wanted, param, call in (
    (openai.NotFoundError, "model", lambda: client.responses.create(**asked | {"model": "no-such-model"})),
    (openai.BadRequestError, "input", lambda: client.responses.create(**asked | {"input": []})),
    (openai.BadRequestError, "tools[0].type", lambda: client.responses.create(**asked, tools=[{"type": "web_search"}])),
    (openai.BadRequestError, "previous_response_id", lambda: client.responses.create(**asked, previous_response_id="")),
    (openai.NotFoundError, "response_id", lambda: client.responses.retrieve(whole.id)),
    (openai.NotFoundError, "response_id", lambda: client.responses.cancel(whole.id)),
    (openai.NotFoundError, "response_id", lambda: client.responses.delete(whole.id)),
):
    try:
        call()
    except wanted as exc:
        assert exc.body["param"] == param, exc.body
    else:
        raise AssertionError(f"{param} was taken")
print(text)
"""


@needs("openai")
def test_openai_responses_client(served: Served, python: Python) -> None:
    """The same text as by chat, whole, streamed and by the package's own accumulator; and errors by their class."""
    assert python.check(RESPONSES, served.base_url).strip()


TOOLS = """
import json, sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"at": {"enum": ["Rom", "Ulm"]}}, "required": ["at"],
          "additionalProperties": False}
question = {"role": "user", "content": "Sky?"}
asked = dict(model=client.models.list().data[0].id, seed=3, messages=[question], parallel_tool_calls=False,
             tools=[{"type": "function", "function": {"name": "sky", "parameters": schema}}])

message = client.chat.completions.create(**asked, tool_choice="required").choices[0].message
(call,) = message.tool_calls
assert call.type == "function" and call.function.name == "sky", call
assert json.loads(call.function.arguments)["at"] in ("Rom", "Ulm"), call

with client.chat.completions.stream(**asked, tool_choice="required") as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds, kinds
assert final.finish_reason == "tool_calls" and final.message.tool_calls[0].function.name == "sky"
assert final.message.tool_calls[0].function.arguments == call.function.arguments

asked["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "Blue."}]
answer = client.chat.completions.create(**asked, tool_choice="none", max_completion_tokens=4)
assert answer.choices[0].message.tool_calls is None and answer.usage.prompt_tokens_details.cached_tokens > 0
"""
RESPONSE_TOOLS = """
import json, sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"at": {"enum": ["Rom", "Ulm"]}}, "required": ["at"],
          "additionalProperties": False}
said = [{"role": "user", "content": "Sky?"}]
asked = dict(model=client.models.list().data[0].id, extra_body={"seed": 3}, parallel_tool_calls=False,
             tools=[{"type": "function", "name": "sky", "parameters": schema, "strict": True}])

response = client.responses.create(**asked, input=said, tool_choice="required")
(call,) = response.output
assert call.type == "function_call" and call.name == "sky", call
assert json.loads(call.arguments)["at"] in ("Rom", "Ulm"), call

with client.responses.stream(**asked, input=said, tool_choice={"type": "function", "name": "sky"}) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_response()
assert "response.function_call_arguments.delta" in kinds, kinds
assert final.output[0].arguments == call.arguments and final.status == "completed"

said += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Blue."}]
answer = client.responses.create(**asked, input=said, tool_choice="none", max_output_tokens=4)
assert answer.output[0].type == "message" and answer.usage.input_tokens_details.cached_tokens > 0

text = {"format": {"type": "json_schema", "name": "at", "schema": schema}}
formed = client.responses.create(model=asked["model"], input="Sky?", text=text)
assert json.loads(formed.output_text)["at"] in ("Rom", "Ulm"), formed
"""
LANGCHAIN_TOOLS = """
import sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def sky(at: bool) -> str:
    "The sky."
    return "Blue."

for by_responses in (False, True):
    chat = ChatOpenAI(base_url=sys.argv[1], api_key="none", model=sys.argv[2], extra_body={"seed": 3},
                      max_completion_tokens=120, use_responses_api=by_responses)
    messages = [HumanMessage("Sky?")]
    answer = chat.bind_tools([sky], tool_choice="sky", strict=True).invoke(messages)
    (call,) = answer.tool_calls
    assert call["name"] == "sky" and isinstance(call["args"]["at"], bool), answer
    messages += [answer, ToolMessage(sky.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat.bind_tools([sky], tool_choice="none").invoke(messages).usage_metadata["output_tokens"] > 0
"""


AGENTS = """
import asyncio, sys
import httpx
import openai
from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool,
                    set_tracing_disabled)
from pydantic import BaseModel

set_tracing_disabled(True)
called = []

@function_tool
def sky(at: bool) -> str:
    called.append(at)
    return "Blue."

class Answer(BaseModel):
    is_blue: bool

async def main():
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    brace = httpx.post(sys.argv[1].removesuffix("v1") + "tokenize", json={"prompt": "{"}).json()["tokens"][-1]
    likely = {"seed": 3, "logit_bias": {brace: 20}}  # an answer, where the model may as well call again
    settings = ModelSettings(tool_choice="sky", parallel_tool_calls=False, extra_body=likely)
    for kind in OpenAIChatCompletionsModel, OpenAIResponsesModel:
        agent = Agent(name="a", tools=[sky], model=kind(sys.argv[2], client), output_type=Answer,
                      model_settings=settings)
        whole = await Runner.run(agent, "Sky?")
        assert called and isinstance(whole.final_output, Answer), whole
        assert whole.context_wrapper.usage.output_tokens > 0
        called.clear()
        streamed = Runner.run_streamed(agent, "Sky?")
        events = [event async for event in streamed.stream_events()]
        kinds = {event.data.type for event in events if event.type == "raw_response_event"}
        assert {"response.function_call_arguments.delta", "response.output_text.delta"} <= kinds, kinds
        assert called and streamed.final_output == whole.final_output, streamed
        called.clear()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(TOOLS, marks=needs("openai"), id="openai"),
        pytest.param(RESPONSE_TOOLS, marks=needs("openai"), id="openai-responses"),
        pytest.param(LANGCHAIN_TOOLS, marks=[needs("langchain_openai"), pytest.mark.long], id="langchain-openai"),
        pytest.param(AGENTS, marks=[needs("agents"), pytest.mark.long], id="openai-agents"),
    ],
)
async def test_clients_call_tools_and_return_their_results(tiny_cluster: Cluster, python: Python, code: str) -> None:
    """Whole and streamed, by a model whose weights are random: that what it calls is valid is the grammar's doing."""
    async with Client(tiny_cluster.address) as client:
        url, (model,) = (await client.server_info()).http_url, await client.models()
    await asyncio.to_thread(python.check, code, f"{url}/v1", model.model_name)


LANGCHAIN = """
import sys
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
texts = set()
for by_responses in (False, True):
    chat = ChatOpenAI(base_url=sys.argv[1], api_key="none", model=sys.argv[2], max_completion_tokens=16,
                      extra_body={"seed": 3}, use_responses_api=by_responses)
    answer = chat.invoke("Why is the sky blue?")
    assert answer.usage_metadata["output_tokens"] == 16, answer
    assert "".join(piece.text for piece in chat.stream("Why is the sky blue?")) == answer.text
    texts.add(answer.text)
    for num_words in (20_000, 200_000):  # the prompt does not fit the context, and neither does the body
        try:
            chat.invoke("word " * num_words)
            raise AssertionError("a conversation that does not fit is served")
        except ContextOverflowError:
            pass
assert len(texts) == 1, texts
"""
LITELLM = """
import sys, litellm
asked = dict(model="openai/" + sys.argv[2], api_base=sys.argv[1], api_key="none", max_tokens=16, seed=3,
             messages=[{"role": "user", "content": "Why is the sky blue?"}])
answer = litellm.completion(**asked)
text = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True))
assert text and text == answer.choices[0].message.content
server = {name: asked[name] for name in ("model", "api_base", "api_key")}
asked = server | {"input": "Why is the sky blue?"}
response = litellm.responses(**asked, max_output_tokens=16, extra_body={"seed": 3})
assert response.output[0].content[0].text == text, (response, text)
kinds = [event.type.value for event in litellm.responses(**asked, max_output_tokens=16, stream=True)]
assert kinds[0] == "response.created" and kinds[-1].startswith("response."), kinds

for num_words in (20_000, 200_000):  # the prompt does not fit the context, and neither does the body
    for stream in (False, True):
        try:
            messages = [{"role": "user", "content": "word " * num_words}]
            litellm.completion(**server, messages=messages, stream=stream)
            raise AssertionError("a conversation that does not fit is served")
        except litellm.exceptions.ContextWindowExceededError:
            pass
"""


def model_of(served: Served) -> str:
    """The one that is served there, by its name."""
    with urlopen(f"{served.base_url}/models", timeout=CALL_SECONDS) as answer:
        return str(json.load(answer)["data"][0]["id"])


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(LANGCHAIN, marks=[needs("langchain_openai"), pytest.mark.long], id="langchain-openai"),
        pytest.param(LITELLM, marks=[needs("litellm"), pytest.mark.long], id="litellm"),
    ],
)
def test_libraries_built_on_the_openai_client(served: Served, python: Python, code: str) -> None:
    """The same seed gives the same text, streamed or not."""
    python.check(code, served.base_url, model_of(served))


@pytest.mark.long
@needs("llm")
def test_llm_command(served: Served, tmp_path: Path) -> None:
    """Simon Willison's command, with the model in its extra-openai-models.yaml."""
    name = model_of(served)
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: bough\n  model_name: {name}\n  api_base: {served.base_url}\n"
    )
    command = [str(BIN / "llm"), "-m", "bough", "-o", "max_tokens", "16", "Why is the sky blue?"]
    environment = {**ENVIRONMENT, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(), "words of the simulated text, of which some are long"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("grpcurl", path=ENVIRONMENT["PATH"]) is None, reason="grpcurl is not installed")
def test_grpcurl_command(served: Served) -> None:
    """By reflection alone: services are listed, and a call made, without a .proto file at hand."""

    def call(*arguments: str) -> str:
        command = ["grpcurl", "-plaintext", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "bough.v1.Generation" in call(served.grpc, "list").split()
    request = json.dumps({"text": "The sky is", "max_tokens": 8, "sampling": {"seed": 1}, "ignore_eos": True})
    answer = call("-d", request, served.grpc, "bough.v1.Generation/Generate")
    assert '"finish_reason": "length"' in answer
