"""The page at /ui, and what it asks for: rounds in a stream, why they were so, and the cluster."""

from __future__ import annotations

import asyncio
import re

import pytest

from bough.config.addresses import has_page
from bough.config.processes import OrchestratorConfig, parse
from orchestrator.http_api.app import PAGE, PAGE_FILES
from tests.fakes.http_stack import HttpStack
from tests.fakes.waiting import PATIENCE_SECONDS

CHAT = "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_completion_tokens": 24,
    "seed": 3,
    "ignore_eos": True,
    "stream": True,
}


async def test_a_stream_includes_its_rounds_on_request(endpoint: HttpStack) -> None:
    chunks = await endpoint.chunks(CHAT, BODY | {"stream_options": {"include_rounds": True}})
    rounds = [chunk["metrics"]["round"] for chunk in chunks if "metrics" in chunk]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert "".join(piece for one in rounds for piece in one["texts"]) == text
    assert sum(len(one["texts"]) for one in rounds) == 24
    roots = ["", *(one["texts"][-1] for one in rounds)]  # each round begins with the last token of the one before
    for one, root in zip(rounds, roots, strict=False):
        assert len(one["parents"]) == len(one["tokens"]) == len(one["probabilities"]) == one["nodes"]
        assert one["tokens"][0] == root or not root
        assert one["probabilities"][0] == 1
        assert all(0 <= probability <= 1 for probability in one["probabilities"])
        assert [one["tokens"][node] for node in one["accepted"]] == one["texts"][: len(one["accepted"])]
        assert one["parents"][0] == -1
        assert len(one["accepted"]) >= one["drafted"].count(True)
        path = [0, *one["accepted"]]
        assert [one["parents"][node] for node in path[1:]] == path[:-1], "what is kept is a path from the root"
        seconds = one["seconds"]
        assert sum(seconds.values()) - seconds["total"] == pytest.approx(seconds["total"], rel=0.05)
    plain = await endpoint.chunks(CHAT, BODY)
    assert not any("metrics" in chunk for chunk in plain)


async def test_decisions_about_rounds_are_found_by_the_answers_id(endpoint: HttpStack) -> None:
    chunks = await endpoint.chunks(CHAT, BODY)
    decisions = (await endpoint.client.get(f"/decisions/{chunks[0]['id']}")).json()
    assert sum(one["tokens"] for one in decisions) == 24
    assert {one["mode"] for one in decisions} <= {"draft", "lookup", "probe", "off"}
    named = await endpoint.answer(CHAT, BODY | {"stream": False, "request_id": "user/1"})
    assert (await endpoint.client.get(f"/decisions/{named['id']}")).json(), "a name may have a slash"
    refusal = await endpoint.client.get("/decisions/nobody")
    assert refusal.status_code == 404
    assert "nobody" in refusal.json()["error"]["message"]


async def test_the_cluster_lists_workers_and_their_problems(endpoint: HttpStack) -> None:
    problems = ["not asked yet"]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(problems):  # on a busy machine a worker may be waited for at first, and is said to be
            cluster = (await endpoint.client.get("/cluster")).json()
            problems = [cluster["index_problem"], *(worker["problem"] for worker in cluster["workers"])]
    assert sorted(worker["info"]["kind"] for worker in cluster["workers"]) == ["draft", "target"]
    assert all(worker["address"] for worker in cluster["workers"])


async def test_the_cluster_shows_what_its_workers_have_done_since_their_registration(endpoint: HttpStack) -> None:
    """The figures are current ones, and not those of the first contact."""
    before = await passes(endpoint)
    await endpoint.chunks(CHAT, BODY)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not all(number > before[kind] for kind, number in (await passes(endpoint)).items()):
            await asyncio.sleep(0.05)


async def passes(endpoint: HttpStack) -> dict[str, int]:
    cluster = (await endpoint.client.get("/cluster")).json()
    return {worker["info"]["kind"]: worker["info"]["num_passes"] for worker in cluster["workers"]}


async def test_the_page_loads_nothing_from_elsewhere(endpoint: HttpStack) -> None:
    for path, (name, media_type) in PAGE_FILES.items():
        reply = await endpoint.client.get(path)
        assert reply.headers["content-type"].startswith(media_type)
        assert reply.text == (PAGE / name).read_text()
        assert "default-src 'self'" in reply.headers["content-security-policy"]
    assert {file.name for file in PAGE.iterdir()} == {name for name, _ in PAGE_FILES.values()}
    text = "".join(file.read_text() for file in PAGE.iterdir() if file.suffix != ".svg")
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "setHTML", "srcdoc", "DOMParser"):
        assert sink not in text, "what a model or a worker says must not become markup"
    assert not re.findall(r"\b(?:eval|Function)\(|createContextualFragment", text), "nor code"


async def test_the_root_redirects_browsers_to_the_page_and_programs_to_the_api(endpoint: HttpStack) -> None:
    browser = await endpoint.client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"]) == (307, "/ui")
    program = await endpoint.client.get("/")
    assert program.status_code == 200
    for path in (program.json()["ui"], program.json()["models"], program.json()["health"]):
        assert (await endpoint.client.get(path)).status_code == 200


async def test_tokens_of_rounds_have_texts_without_log_probabilities(endpoint: HttpStack) -> None:
    asked = {"stream_options": {"include_rounds": True}, "prompt": "Once", "max_tokens": 8, "ignore_eos": True}
    chunks = await endpoint.chunks("/v1/completions", asked)
    assert any(chunk.get("metrics", {}).get("round", {}).get("tokens") for chunk in chunks)
    assert all(choice["logprobs"] is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("flags", "is_served"),
    [
        ([], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--ui", "yes"], True),
        (["--ui", "no"], False),
    ],
)
def test_the_page_is_off_by_default_if_others_can_reach_it(flags: list[str], is_served: bool) -> None:
    assert has_page(parse(OrchestratorConfig, "orchestrator", flags, {})) == is_served
