"""Continued sessions: with the new turn alone or the whole history, at the target that holds it, to their end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from bough.cli.generation.generate import next_turn
from bough.client import Client
from bough.errors import InvalidRequest, NotFound, Unavailable
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message, Prompt, Resume, TextPrompt, TokenPrompt
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import block_hashes
from bough.registry.records import SessionRecord
from bough.tokenization.tokenizer import Tokenizer
from tests.fakes.fleet import FakeDraft, FakeText, Fleet
from tests.fakes.streams import OPTIONS, PROMPT, read, read_rounds
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
TURN = GenerateOptions(session_id="s", seed=3, max_tokens=20, ignore_eos=True)
NEXT = replace(TURN, continues=True)


def chat(*contents: str) -> ChatPrompt:
    """User and assistant in turn."""
    roles = ("user", "assistant") * len(contents)
    return ChatPrompt(tuple(Message(role, content) for role, content in zip(roles, contents, strict=False)))


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (TextPrompt("say: "), TextPrompt(" and now: ")),
        (TokenPrompt((70, 71, 72)), TokenPrompt((73, 74))),
        (chat("hello"), chat("and now?")),
    ],
)
async def test_only_the_new_turn_is_sent_and_computed(fakes: Fleet, first: Prompt, more: Prompt) -> None:
    target, _ = await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        before = await read(client, TURN, first)
        calls = len(target.calls)
        after = await read(client, NEXT, more)
    history = before.started.prompt_tokens + len(before.token_ids)
    assert after.started.prompt_tokens > history
    assert after.end.usage.cached_tokens == history - 1  # all but the last token, which had not been computed yet
    assert len(target.calls[calls].context.tokens) == after.started.prompt_tokens - history
    held = target.held["s"]
    text = FakeText(Tokenizer(fakes.tokenizer))
    assert after.token_ids == text.output(held[: after.started.prompt_tokens], 3, 20)


async def test_a_continued_chat_equals_the_whole_chat(fakes: Fleet) -> None:
    """Turn after turn, whichever way, where the answers' texts are their tokens: the same prompt and answer."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    fakes.tokenizer = replace(fakes.tokenizer, chat_template=template)
    target, _ = await fakes.target("t1")
    target.text = FakeText(
        Tokenizer(fakes.tokenizer), ("a", "b", "try ")
    )  # a character cut in two is not sent back as it was
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        said: list[str] = []
        for question in ("hello", "and now?", "and then?"):
            options = replace(NEXT if said else TURN, session_id="continued")
            continued = await read(client, options, chat(question))
            whole = await read(client, replace(TURN, session_id="whole"), chat(*said, question))
            assert continued.started.prompt_tokens == whole.started.prompt_tokens
            assert continued.token_ids == whole.token_ids
            said += [question, whole.text]
    new = len("\nuser:and then?\nassistant:")
    cached = whole.started.prompt_tokens - new - 1
    assert [turn.end.usage.cached_tokens for turn in (continued, whole)] == [cached, cached]


async def test_bough_chat_sends_the_new_turn_or_the_whole_history_if_needed(
    fakes: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    target, _ = await fakes.target("t1")
    target.text = FakeText(Tokenizer(fakes.tokenizer), ("a", "b", "try "))
    _, server = await fakes.orchestrator()
    history = [Message("user", "hello")]
    async with Client(server.address) as client:
        answer = await next_turn(client, [], history[0], TURN)
        history.append(Message("assistant", answer.text))
        second = await next_turn(client, history, Message("user", "and now?"), TURN)
        await client.close_session("s")
        forgotten = await next_turn(client, history, Message("user", "and now?"), TURN)
    assert answer.finished is not None
    assert second.finished is not None
    assert forgotten.finished is not None
    sizes = [turn.finished.usage.prompt_tokens for turn in (answer, second, forgotten) if turn.finished]
    assert sizes[0] < sizes[1] <= sizes[2]
    assert second.finished.usage.cached_tokens == sizes[0] + 20 - 1
    assert forgotten.finished.usage.cached_tokens == 0
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"session_id": "other"}, NotFound, "session_id: 'other' is not known \\(any more\\); send the full history"),
        ({"session_id": ""}, InvalidRequest, "session_id: must be given with continues true"),
        ({"resume": Resume(3), "request_id": "x"}, NotFound, "request_id: 'x' is not known any more"),
    ],
)
async def test_invalid_continuations_are_refused(
    fakes: Fleet, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        await read(client, TURN)
        with pytest.raises(error, match=message):
            await read(client, replace(NEXT, **changes), TextPrompt("more"))
        assert (await read(client, NEXT, TextPrompt("more"))).end.usage.cached_tokens > 0


async def test_a_repeated_continuation_is_not_applied_twice(fakes: Fleet) -> None:
    """The call's first answer was lost: its prompt is already in the session, and must not come twice."""
    await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    options = replace(NEXT, request_id="second turn")
    async with Client(first.address) as one, Client(second.address) as other:
        begun = await read(one, TURN)
        await read_rounds(one, 3, options)
        again = await read(other, replace(options, resume=Resume(0)))
        assert again.started.prompt_tokens == begun.started.prompt_tokens + 20 + len(PROMPT.text)
        more = await read(other, NEXT, TextPrompt("x"))
    assert more.started.prompt_tokens == again.started.prompt_tokens + 20 + 1


async def test_a_turn_not_yet_in_the_index_is_not_lost(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one once continued from the turn before it, without an error."""
    await fakes.target("t1")
    _, server = await fakes.orchestrator()

    async def fail(record: SessionRecord, first_new: int) -> None:
        raise Unavailable("for a while")

    async with Client(server.address) as client:
        await read(client, TURN)
        with monkeypatch.context() as patch:
            patch.setattr(fakes.registry, "record_session", fail)
            second = await read(client, NEXT, TextPrompt("x"))
            third = await read(client, NEXT, TextPrompt("y"))
        assert third.started.prompt_tokens == second.started.prompt_tokens + 20 + 1
        fourth = await read(client, NEXT, TextPrompt("z"))
    assert fourth.started.prompt_tokens == third.started.prompt_tokens + 20 + 1


async def test_a_reused_request_name_does_not_return_the_first_answer(fakes: Fleet) -> None:
    await fakes.target("t1")
    _, server = await fakes.orchestrator()
    options = replace(NEXT, request_id="always the same")
    async with Client(server.address) as client:
        await read(client, TURN)
        await read(client, options, TextPrompt("one"))
        await fakes.written("always the same")
        with pytest.raises(InvalidRequest, match="request_id 'always the same' must have the same prompt"):
            await read(client, replace(options, resume=Resume(0)), TextPrompt("two"))


async def test_a_fully_cached_prompt_leaves_its_last_token_to_compute(fakes: Fleet) -> None:
    """The last token is the root of the next tree: taken to be held it made a round's context one token less than none,
    which no answer to GetDecisions could carry."""
    await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        first = await read(client, TURN)
        again = await read(client, TURN)
        assert again.token_ids == first.token_ids
        read_first = [decision.num_context for decision in await client.decisions("s") if decision.number == 1]
        assert read_first == [first.started.prompt_tokens - 1, 0]


async def test_a_closed_session_is_forgotten_everywhere(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    _, server = await fakes.orchestrator()
    async with Client(server.address) as client:
        await read(client, TURN)
        await client.close_session("s")
        assert target.held == {}
        assert await fakes.registry.load_session(ScopedId("s")) is None
        for session_id, message in (("s", "session_id: 's' is not known"), ("nobody", "'nobody' is not known")):
            with pytest.raises(NotFound, match=message):
                await client.close_session(session_id)
        with pytest.raises(InvalidRequest, match="session_id: must be given"):
            await client.close_session("")


async def test_sessions_expire(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle for too long, or simply too old."""
    await fakes.target("t1")
    _, server = await fakes.orchestrator("--session-max-seconds", "3600")
    async with Client(server.address) as client:
        await read(client, TURN)
        await read(client, NEXT)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        with pytest.raises(NotFound, match="session_id: 's' is not known"):
            await read(client, NEXT)
    impatient = await fakes.with_own_client(session_seconds=0.5)
    _, server = await impatient.orchestrator()
    async with Client(server.address) as client:
        await read(client, TURN)
        await asyncio.sleep(0.8)
        with pytest.raises(NotFound, match="session_id: 's' is not known"):
            await read(client, NEXT)


async def test_a_new_session_goes_to_the_target_that_has_its_prefix(fakes: Fleet) -> None:
    """And a kept one to its own, though another is less busy."""
    targets = {name: (await fakes.target(name))[0] for name in ("t1", "t2", "t3")}
    _, server = await fakes.orchestrator(num_targets=3)
    system = tuple(index % 200 for index in range(100))
    async with Client(server.address) as client:
        await read(client, TURN, TokenPrompt((*system, 1)))
        (holder,) = [name for name, target in targets.items() if target.calls]

        async def is_noted() -> bool:  # which is done behind the stream's back
            return await fakes.registry.find_prefixes("fake", block_hashes(system), [holder]) == {holder: 3}

        await until(is_noted)
        for index in range(2):
            await read(client, replace(TURN, session_id=f"new {index}"), TokenPrompt((*system, 2 + index)))
        await read(client, NEXT, TextPrompt("more"))
        assert [name for name, target in targets.items() if target.calls] == [holder]
        for index in range(3):
            await read(client, replace(OPTIONS, request_id=""), TextPrompt(f"{index} something else"))


@pytest.mark.parametrize("is_continued", [True, False])
async def test_rounds_of_a_session_do_not_share_random_numbers(fakes: Fleet, is_continued: bool) -> None:
    """A user's seed is that of every turn; the number of a round sets its samples apart (`draft_sampler`)."""
    await fakes.target("t1")
    draft = FakeDraft("d1", fakes.tokenizer)
    await fakes.worker(draft)
    _, server = await fakes.orchestrator("--draft", "workers", "--lookup", "0")
    async with Client(server.address) as client:
        tokens: list[int] = [70, 71]
        for _ in range(3):
            prompt = TokenPrompt((72, 73)) if is_continued and len(tokens) > 2 else TokenPrompt(tuple(tokens))
            seen = await read(client, NEXT if is_continued and len(tokens) > 2 else TURN, prompt)
            tokens += [*seen.token_ids, 72, 73]
    assert len(draft.rounds) == len(set(draft.rounds)) == 3 * 19  # the last token of a turn is no guess
