"""The page at /ui in a real browser: what a user types and clicks, and what is seen then."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bough.protocol.generation import StageStatus, WorkerInfo
from tests.fakes.browser import BROWSER, Page, browser_page
from tests.fakes.http_stack import HttpStack, http_stack

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")

QUESTION = "Why is the <b>sky</b> blue?"
ANSWERED = "!document.querySelector('#send').hidden && document.querySelectorAll('.outcome button').length > 0"
FAILED = "document.querySelector('.failed') != null"
SENT = """window.sent = []; window.answers = {}; window.real = window.fetch; window.fetch = (path, options) => {
    if (options.body) sent.push(JSON.parse(options.body));
    return answers[path] ? Promise.resolve(answers[path](options)) : real(path, options);
}; 0"""  # keeps what the page sends, and answers in the server's place where `answers` has a function
ROUND: dict[str, Any] = {
    "nodes": 4,
    "depth": 2,
    "parents": [-1, 0, 0, 1],
    "tokens": ["The", " sky", " sea", " is"],
    "probabilities": [1, 0.6, 0.3, 0.9],
    "accepted": [1, 3],
    "texts": [" sky", " is", " blue"],
    "drafted": [True, True, False],
    "seconds": {"total": 1, "draft": 0.2, "network": 0.1, "queue": 0, "wait": 0.2, "other": 0.1, "compute": 0.4},
}
ROOT = ROUND | {"nodes": 1, "parents": [-1], "tokens": [" blue"], "probabilities": [1], "accepted": []}
BIG_TREE = """import('/ui/tree.js').then(({ drawTree }) => {
    const parents = [-1], depth = [0];
    for (let node = 1; node < 250; node++) { // the deeper, the fewer
        const parent = Math.floor((node * 7919 % 1000 / 1000) ** 2 * node);
        parents.push(depth[parent] < 16 ? parent : 0);
        depth.push(depth[parents[node]] + 1);
    }
    const accepted = [];
    for (let at = 0; (at = parents.indexOf(at)) > 0;) accepted.push(at);
    const texts = parents.map((_, node) => [' molecules', ' a', '\\n', ' scattering'][node % 4]);
    drawTree(document.querySelector('#tree'), {
        parents, accepted, tokens: texts, probabilities: parents.map(() => .6),
        texts: [...accepted.map((node) => texts[node]), ' light'], drafted: [...accepted.map(() => true), false],
    });
    const boxes = (selector) => Array.from(document.querySelectorAll(`#tree ${selector}`), (each) => each.getBBox());
    const overlaps = (all, least) => all.flatMap((a, i) => all.slice(i + 1).filter((b) =>
        Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > least
        && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > least)).length;
    return [boxes('circle').length, overlaps(boxes('circle'), 1), boxes('text').length > 9, overlaps(boxes('text'), 4)];
})"""


@pytest.fixture
async def page(endpoint: HttpStack, tmp_path: Path) -> AsyncIterator[Page]:
    async with browser_page(tmp_path) as opened:
        await open_page(opened, endpoint)
        yield opened


async def open_page(page: Page, endpoint: HttpStack) -> None:
    await page.open(f"http://127.0.0.1:{endpoint.port}/ui")
    await page.until("document.querySelector('#status').textContent == 'ready'")
    await page.value(SENT)


async def ask(page: Page, question: str, num_tokens: int = 24) -> None:
    await page.fill("#length", str(num_tokens))
    await page.fill("#question", question)
    await page.press_enter()


async def answer_with(page: Page, *rounds: dict[str, Any]) -> None:
    """Answer the next question in the server's place."""
    chunks = [
        {"id": "x", "choices": [{"delta": {"content": "".join(each["texts"])}}], "metrics": {"round": each}}
        for each in rounds
    ]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    await page.value(f"answers['/v1/chat/completions'] = () => new Response({json.dumps(text)}); 0")


async def test_an_answer_is_displayed_with_its_tree(page: Page) -> None:
    assert await page.value("document.querySelectorAll('#tree circle').length") > 5, "an example explains the marks"
    await ask(page, QUESTION)
    await page.until(ANSWERED)
    assert await page.texts(".question") == [QUESTION]
    marked = len(await page.texts(".answer .kept")), len(await page.texts(".answer .bonus"))
    assert min(marked) > 0
    assert sum(marked) == 24
    num_rounds = await page.value("document.querySelectorAll('#rounds .bar').length")
    assert (await page.texts("#place"))[0].endswith(f"of {num_rounds}")
    assert len(await page.texts("#speed dd")) == 2, "with guesses, and plainly"
    assert len(await page.texts("#parts dd")) == 6
    assert "24 tokens" in (await page.texts(".outcome button"))[0]
    await page.click("#why summary")
    await page.until("document.querySelectorAll('#decisions tr').length > 1")
    assert len(await page.texts("#workers tr")) == 3
    assert page.problems == []
    assert (await page.picture()).startswith(b"\x89PNG")


@pytest.mark.long
async def test_enter_sends_and_shift_enter_starts_a_line(page: Page) -> None:
    """Enter made a line, and only the button sent."""
    await page.fill("#question", "one")
    await page.press_enter(with_shift=True)
    assert await page.value("document.querySelector('#question').value") == "one\n"
    await page.press_enter()
    await page.until(ANSWERED)
    assert await page.value("sent[0].messages.at(-1).content") == "one"
    assert await page.value("document.querySelector('#question').value") == ""


async def test_a_failed_question_is_not_repeated_with_the_next(page: Page) -> None:
    """It stayed in the conversation with an empty answer, so that every later question failed."""
    await ask(page, "word " * 20_000)
    await page.until(FAILED)
    assert "context" in (await page.texts(".failed"))[0]
    await ask(page, QUESTION)
    await page.until(ANSWERED + " && document.querySelectorAll('.outcome:not(.failed) button').length")
    assert await page.value("sent.at(-1).messages.length") == 1
    await ask(page, "And at night?")
    await page.until("document.querySelectorAll('.outcome:not(.failed) button').length == 2")
    roles = "sent.at(-1).messages.map((each) => each.role)"
    assert await page.value(roles) == ["user", "assistant", "user"]


@pytest.mark.long
async def test_a_failed_question_can_be_tried_again(page: Page) -> None:
    await page.value("answers['/v1/chat/completions'] = () => Promise.reject(new TypeError('gone')); 0")
    await ask(page, QUESTION)
    await page.until(FAILED)
    assert "The server does not answer." in (await page.texts(".failed"))[0]
    await page.value("delete answers['/v1/chat/completions']; 0")
    await page.click(".failed button:last-child")
    await page.until(ANSWERED)
    assert await page.texts(".question") == [QUESTION]


async def test_a_truncated_answer_is_marked(page: Page) -> None:
    await page.value("answers['/v1/chat/completions'] = () => new Response(': keep-alive\\n\\n'); 0")
    await ask(page, QUESTION)
    await page.until(FAILED)
    assert "ended the answer early" in (await page.texts(".failed"))[0]


@pytest.mark.long
async def test_a_past_round_shows_its_tree(page: Page) -> None:
    await answer_with(page, ROUND, ROUND | {"accepted": [2], "texts": [" sea", " is"], "drafted": [True, False]})
    await ask(page, QUESTION)
    await page.until(ANSWERED)
    shown = "Array.from(document.querySelectorAll('#tree .label.kept'), (each) => each.textContent)"
    assert await page.texts("#place") == ["round 2 of 2"]
    assert await page.value(shown) == ["sea"]
    await page.click("#previous")
    assert await page.texts("#place") == ["round 1 of 2"]
    assert sorted(await page.value(shown)) == ["is", "sky"]
    assert [text.strip() for text in await page.texts(".answer .shown")] == ["sky", "is", "blue"]
    await page.click("#rounds .bar:last-child")
    assert await page.texts("#place") == ["round 2 of 2"]
    await page.click(".answer .kept")
    assert await page.texts("#place") == ["round 1 of 2"]


@pytest.mark.long
async def test_after_an_answer_the_last_tree_is_shown_and_not_only_a_root(page: Page) -> None:
    """The last round has few tokens left, often one, and then no guesses."""
    await answer_with(page, ROUND, ROOT | {"texts": ["."], "drafted": [False]})
    await ask(page, QUESTION)
    await page.until(ANSWERED)
    assert await page.texts("#place") == ["round 1 of 2"]
    assert await page.value("document.querySelectorAll('#tree circle').length") == 5, (
        "nodes, and the target's own token"
    )


@pytest.mark.long
async def test_a_new_chat_starts_without_the_old_one(page: Page) -> None:
    await ask(page, QUESTION)
    await page.until(ANSWERED)
    await page.click("#new")
    assert await page.texts("article") == []
    assert await page.texts("#place") == ["example"]
    assert await page.value("document.activeElement.id") == "question"
    await ask(page, "Who are you?")
    await page.until(ANSWERED)
    assert await page.value("sent.at(-1).messages") == [{"role": "user", "content": "Who are you?"}]


async def test_an_answer_can_be_stopped_and_remains(tmp_path: Path) -> None:
    async with http_stack(tmp_path, clock_scale=1) as endpoint, browser_page(tmp_path / "browser") as page:
        await open_page(page, endpoint)
        await ask(page, QUESTION, 2_000)
        await page.until("document.querySelectorAll('.answer span').length > 0")
        await page.click("#stop")
        await page.until(ANSWERED)
        assert "stopped" in (await page.texts(".outcome"))[0]
        await ask(page, "And?", 4)
        await page.until("document.querySelectorAll('.outcome button').length == 2")
        assert await page.value("sent[1].messages.length") == 3


async def test_a_dead_server_shows_no_workers_in_use(tmp_path: Path) -> None:
    """They stayed in use forever."""
    async with browser_page(tmp_path / "browser") as page:
        async with http_stack(tmp_path) as endpoint:
            await open_page(page, endpoint)
            state = (
                "Array.from(document.querySelectorAll('#workers td:nth-child(2)'), (each) => each.textContent).join()"
            )
            assert await page.value(state) == "ready,ready"
        await page.until("document.querySelector('#status').textContent == 'no answer'")
        assert await page.value(state) == "unknown,unknown"
        assert "does not answer" in (await page.texts("#problem"))[0]


@pytest.mark.long
async def test_a_server_stopped_during_an_answer_is_shown_as_shutting_down(page: Page) -> None:
    """It was called dead, although its answer continued."""
    await page.value("answers['/v1/chat/completions'] = () => new Promise(() => {}); 0")
    await ask(page, QUESTION)
    await page.value("answers['/cluster'] = () => Promise.reject(new TypeError('refused')); 0")
    await page.until("document.querySelector('#status').textContent == 'shutting down'")
    assert "finishes this answer" in (await page.texts("#problem"))[0]


@pytest.mark.long
async def test_a_server_without_a_target_worker_is_not_shown_as_dead(page: Page) -> None:
    """There are no models then, which the server says by an error."""
    await page.value("answers['/v1/models'] = () => new Response('{}', { status: 503 }); 0")
    await page.value('answers[\'/cluster\'] = () => new Response(\'{"workers": [], "index_problem": ""}\'); 0')
    await page.until("document.querySelector('#status').textContent == 'no target worker is ready'")
    assert await page.value("document.querySelector('#problem').hidden")


@pytest.mark.long
async def test_one_of_several_models_can_be_chosen(page: Page) -> None:
    assert await page.value("document.querySelector('#model').disabled"), "there is one"
    await page.value('answers[\'/v1/models\'] = () => new Response(\'{"data": [{"id": "one"}, {"id": "two"}]}\'); 0')
    await page.until("!document.querySelector('#model').disabled")
    await page.value("document.querySelector('#model').value = 'two'; 0")
    await answer_with(page, ROUND)
    await ask(page, QUESTION)
    await page.until(ANSWERED)
    assert await page.value("sent[0].model") == "two"


@pytest.mark.long
async def test_a_key_is_requested_if_one_is_needed(page: Page) -> None:
    assert await page.value("document.querySelector('#key-field').hidden")
    await page.value(
        "answers['/cluster'] = ({ headers }) => headers.authorization == 'Bearer open'"
        ' ? new Response(\'{"workers": [], "index_problem": ""}\')'
        ' : new Response(\'{"error": {"message": "no such key"}}\', { status: 401 }); 0'
    )
    await page.until("document.querySelector('#status').textContent == 'needs an API key'")
    await page.fill("#key", "open")
    await page.press_enter()
    await page.until("document.querySelector('#status').textContent == 'no target worker is ready'")


async def test_the_stages_of_a_target_are_listed(page: Page) -> None:
    stages = (
        StageStatus("host:1", 20, 40, 2 * 10**9, 5 * 10**6, 2 * 10**9, 10**6),
        StageStatus("host:2", 40, 80, 10**9),
    )
    info = WorkerInfo("target", "t", "m", "", "", "", 1, 1, 1, 1, stages=stages, stage_network_ns=3 * 10**6)
    cluster = {"workers": [{"address": "a", "info": asdict(info), "problem": ""}], "index_problem": ""}
    assert await page.texts("#stages td") == []
    await page.value(f"answers['/cluster'] = () => new Response({json.dumps(json.dumps(cluster))}); 0")
    await page.until("document.querySelectorAll('#stages td').length > 0")
    assert await page.texts("#stages td") == [
        *(
            "stage 1",
            "20 to 39",
            "2.00 GB",
            "1.0 ms waiting for the one before, 5.0 ms for weights, 2.00 s computing",
            "host:1",
        ),
        *(
            "stage 2",
            "40 to 79",
            "1.00 GB",
            "0.0 ms waiting for the one before, 0.0 ms for weights, 0.0 ms computing",
            "host:2",
        ),
        *("network", "", "", "3.0 ms", ""),
    ]


async def test_texts_are_never_markup(page: Page) -> None:
    worker = {"kind": "target", "model_name": "<img src=x>", "model_description": "", "num_sessions": 0}
    worker |= {"kv_used_bytes": 0, "kv_bytes": 0, "num_passes": 0, "stages": []}
    cluster = {"workers": [{"address": "a", "info": worker, "problem": "<b>ill</b>"}], "index_problem": "<i>gone</i>"}
    await page.value(f"answers['/cluster'] = () => new Response({json.dumps(json.dumps(cluster))}); 0")
    await answer_with(page, ROUND | {"texts": [" <img src=y>", " is", " blue"], "tokens": ["<b>", "<b>", "<b>", "<b>"]})
    await ask(page, QUESTION)
    await page.until(ANSWERED)
    await page.until("document.querySelector('#problem').textContent == '<i>gone</i>'")
    assert "<img src=x>" in (await page.texts("#workers"))[0]
    assert "<img src=y>" in (await page.texts(".answer"))[0]
    assert await page.value("document.querySelectorAll('main img, #turns b, #tree b, #workers b').length") == 0


@pytest.mark.long
async def test_a_large_tree_is_drawn_without_overlaps(page: Page) -> None:
    assert await page.value(BIG_TREE) == [251, 0, True, 0]
