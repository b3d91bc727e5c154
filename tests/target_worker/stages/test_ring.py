"""Frames around a ring of real gRPC links on one event loop, and what ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from bough.concurrency.tasks import background
from bough.errors import InvalidRequest, NoAnswer, RingLost, StaleEpoch, Unavailable
from bough.rpc.server import open_channel, serving
from bough.rpc.services import STAGES, add_service, stub_of
from bough.rpc.status_map import to_error
from bough.security.access import OPEN, Access
from bough.security.keys import WorkerKey
from bough.security.tls import Tls
from loadtest.chaos.proxy import LinkProxy
from target_worker.stages import codec
from target_worker.stages.frames import MAX_BODY_BYTES, PIECE_BYTES, Frame, Heartbeat, Hello, Piece, RingEnd
from target_worker.stages.ring import SILENCE_SECONDS, WINDOW_BYTES, Ring
from tests.fakes.certificates import Authority
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow

HEARTBEAT_SECONDS = 0.1
PATIENCE_SECONDS = 30.0
MIB = 1024 * 1024


class Member:
    """A ring's member with a server; a stage adds its number to the header of each frame, in a thread."""

    def __init__(self, number: int, access: Access = OPEN, silence_seconds: float = SILENCE_SECONDS) -> None:
        self.number, self.access = number, access
        self.ring = Ring(access, number == 0, HEARTBEAT_SECONDS, silence_seconds)
        self.address = ""
        self.seen: list[tuple[int, bytes | None, bytes]] = []  # what `next` has returned, with the frames' headers
        self.may_compute = threading.Event()
        self.may_compute.set()
        self._stack = AsyncExitStack()

    async def start(self, port: int = 0) -> None:
        add = partial(add_service, STAGES, self.ring)
        server = serving(
            "127.0.0.1",
            port,
            STAGES.full_name,
            add,
            grace_seconds=0.0,
            auth_interceptors=self.access.auth_interceptors,
            credentials=self.access.worker_credentials,
            window_bytes=WINDOW_BYTES,
        )
        served = await self._stack.enter_async_context(server)
        self.address = f"127.0.0.1:{served.port}"
        if self.number:
            thread = threading.Thread(target=self._compute)
            thread.start()
            self._stack.push_async_callback(asyncio.to_thread, thread.join)
            self._stack.callback(self.may_compute.set)
        self._stack.push_async_callback(self.ring.close)

    async def stop(self) -> None:
        await self._stack.aclose()

    def _compute(self) -> None:
        while (step := self.ring.next()) is not None:
            epoch, payload, frame = step
            self.seen.append((epoch, payload, b"" if frame is None else frame.header))
            if frame is not None:
                self.may_compute.wait()
                with suppress(RingLost):
                    self.ring.send(epoch, Frame(frame.header + b"%d" % self.number, frame.body))


class Circle:
    """A head and its stages."""

    def __init__(self, num_stages: int, access: Access = OPEN, silence_seconds: float = SILENCE_SECONDS) -> None:
        self.members = [Member(number, access, silence_seconds) for number in range(num_stages + 1)]
        self.addresses: list[str] | None = None  # None while one is missing
        self.ring = self.members[0].ring

    async def send(self, *headers: bytes, body: bytes = b"") -> None:
        """Send frames in the present epoch, as the head's compute thread."""
        for header in headers:
            await asyncio.to_thread(self.ring.send, self.ring.epoch, Frame(header, body))

    async def receive(self, epoch: int | None = None) -> Frame:
        return await asyncio.wrap_future(self.ring.receiving(epoch or self.ring.epoch, PATIENCE_SECONDS))

    async def is_up(self, after: int = 0) -> int:
        """Wait for an epoch higher than `after`."""
        await until(lambda: self.ring.epoch > after)
        return self.ring.epoch


@asynccontextmanager
async def ring_of(
    num_stages: int, access: Access = OPEN, silence_seconds: float = SILENCE_SECONDS
) -> AsyncIterator[Circle]:
    """A ring that keeps itself connected; it begins when the block first waits."""
    circle = Circle(num_stages, access, silence_seconds)
    try:
        for member in circle.members:
            await member.start()
        circle.addresses = [member.address for member in circle.members]
        async with background(circle.ring.run(lambda: circle.addresses, lambda: b"slots")):
            yield circle
    finally:
        for member in circle.members:
            await member.stop()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_frames_of_all_sizes_go_around(num_stages: int) -> None:
    async with ring_of(num_stages) as circle:
        assert circle.ring.why_down == "the ring has not been connected yet"
        epoch = await circle.is_up()
        assert circle.ring.why_down == ""
        for size in (0, 1, PIECE_BYTES, 3 * MIB):
            body = bytes(range(251)) * (size // 251 + 1)
            await circle.send(b"h", body=body[:size])
            header, back, _ = await circle.receive()
            assert header == b"h" + b"".join(b"%d" % number for number in range(1, num_stages + 1))
            assert back == body[:size]
        for member in circle.members[1:]:
            assert member.seen[0] == (epoch, b"slots", b"")
            assert all(payload is None for _, payload, _ in member.seen[1:])


async def test_a_header_and_a_view_of_several_dimensions_are_cut_too() -> None:
    async with ring_of(1) as circle:
        await circle.is_up()
        for shape in ((2, MIB), (0, MIB)):
            body = memoryview(bytes(shape[0] * shape[1])).cast("B", shape) if shape[0] else memoryview(b"")
            await asyncio.to_thread(circle.ring.send, circle.ring.epoch, Frame(b"x" * 3 * MIB, body))
            header, back, _ = await circle.receive()
            assert (header, back) == (b"x" * 3 * MIB + b"1", bytes(shape[0] * shape[1]))


async def test_frames_keep_their_order_and_wait_for_each_other() -> None:
    """A stage that does not compute stops the head: few frames wait in memory, however many are to come."""
    async with ring_of(2, silence_seconds=2.0) as circle:
        await circle.is_up()
        headers = [b"%d " % number for number in range(100)]
        circle.members[2].may_compute.clear()
        sending = asyncio.create_task(circle.send(*headers, body=bytes(MIB)))
        await until(lambda: len(circle.members[1].seen) > 5)
        await asyncio.sleep(3.0)  # longer than a link may be silent, while it is not read
        num_before = len(circle.members[1].seen)
        assert num_before < 20
        circle.members[2].may_compute.set()
        assert [(await circle.receive()).header for _ in headers] == [header + b"12" for header in headers]
        await sending


@pytest.mark.parametrize("number", [1, 2])
async def test_a_stage_that_ends_is_named_and_its_frames_are_forgotten(number: int) -> None:
    async with ring_of(2) as circle:
        epoch = await circle.is_up()
        lost = circle.members[number]
        lost.may_compute.clear()
        await circle.send(b"old", body=bytes(3 * MIB))
        await until(lambda: (epoch, None, b"old" + b"1" * (number - 1)) in lost.seen)
        receiving = asyncio.create_task(circle.receive(epoch))
        stopping = asyncio.create_task(lost.stop())
        with pytest.raises(RingLost, match=f"stage {number} at {lost.address}"):
            await receiving
        with pytest.raises(RingLost, match=f"stage {number} at {lost.address}|epoch {epoch} is over"):
            await asyncio.to_thread(circle.ring.send, epoch, Frame(b"", b""))
        await stopping
        assert f"stage {number} at {lost.address}" in circle.ring.why_down
        restarted = circle.members[number] = Member(number)
        await restarted.start(int(lost.address.partition(":")[2]))
        assert await circle.is_up(epoch) > epoch
        await circle.send(b"new")
        assert (await circle.receive()).header == b"new12"
        assert b"old" not in {header for _, _, header in restarted.seen}


async def test_a_ring_waits_for_stages_that_load() -> None:
    async with ring_of(2) as circle:
        first = await circle.is_up()
        circle.members[2].ring.accepts = False
        circle.members[1].ring.fail(first, "its disk has failed")
        await until(lambda: "loading" in circle.ring.why_down)
        assert circle.ring.why_down == f"stage 2 at {circle.members[2].address}: this stage is still loading its layers"
        assert circle.ring.epoch == 0
        circle.members[2].ring.accepts = True
        await circle.is_up(first)


async def test_reports_of_a_stage_reach_the_head_from_both_sides() -> None:
    async with ring_of(3) as circle:
        epoch = await circle.is_up()
        circle.members[2].ring.fail(epoch, "its disk has failed")
        with pytest.raises(RingLost, match=rf"^stage 2 at {circle.members[2].address}: its disk has failed$"):
            await circle.receive(epoch)


async def test_a_head_without_an_answer_tries_again() -> None:
    async with ring_of(2) as circle:
        epoch = await circle.is_up()
        with pytest.raises(RingLost, match=r"no frame came back within 0.1 s from stage 1 at .*, stage 2 at "):
            await asyncio.wrap_future(circle.ring.receiving(epoch, 0.1))
        await circle.is_up(epoch)


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_silent_link_is_detected_by_missing_heartbeats(number: int) -> None:
    """The proxy before a member drops all bytes of both directions; no connection is closed."""
    async with ring_of(2, silence_seconds=1.0) as circle:
        circle.addresses = None
        proxy = LinkProxy(int(circle.members[number].address.partition(":")[2]))
        async with proxy.running():
            addresses = [member.address for member in circle.members]
            circle.addresses = [*addresses[:number], f"127.0.0.1:{proxy.port}", *addresses[number + 1 :]]
            epoch = await circle.is_up()
            async with background(proxy.swallow(PATIENCE_SECONDS)):
                with pytest.raises(RingLost, match=r"(stage|head).* at .* was silent for 1 s"):
                    await circle.receive(epoch)
            await proxy.swallow(0.0)
            await circle.is_up(epoch)


async def test_a_member_with_another_key_is_refused(tmp_path: Path) -> None:
    def key(name: str, secret: str) -> Access:
        file = tmp_path / name
        file.touch(0o600)
        file.write_text(secret * 64)
        return Access(WorkerKey(str(file)))

    async with ring_of(1, key("ours", "a")) as circle:
        await circle.is_up()
    circle = Circle(1, key("ours", "a"))
    stage = circle.members[1] = Member(1, key("theirs", "b"))
    for member in circle.members:
        await member.start()
    async with background(circle.ring.run(lambda: [member.address for member in circle.members], lambda: b"")):
        await until(lambda: stage.address in circle.ring.why_down)
        assert circle.ring.why_down.startswith(f"stage 1 at {stage.address}: ")
        assert "key" in circle.ring.why_down
    assert stage.ring.epoch == 0
    for member in circle.members:
        await member.stop()


async def test_links_are_encrypted_and_know_each_others_authority(tmp_path: Path) -> None:
    access = Access(tls=Tls(Authority().files(tmp_path), is_server=True))
    async with ring_of(2, access) as circle:
        await circle.is_up()
        await circle.send(b"h", body=bytes(3 * MIB))
        assert (await circle.receive()).body == bytes(3 * MIB)
        assert isinstance(await outcome(circle.members[1].address, hello(99)), NoAnswer)


def hello(epoch: int = 1, members: Sequence[str] = ("127.0.0.1:1", "127.0.0.1:2"), number: int = 1) -> Hello:
    return Hello(epoch, tuple(members), number)


async def outcome(address: str, *messages: object) -> Exception:
    """How a member ends a stream of messages; each is a value of the ring or a message of protobuf."""
    async with open_channel(address) as channel:
        call = stub_of(STAGES, channel).Pass()
        try:
            for message in messages:
                is_value = isinstance(message, Hello | Piece | Heartbeat | RingEnd)
                await call.write(codec.passed_to_wire(message) if is_value else message)  # type: ignore[arg-type]
            while (reply := await call.read()) is not grpc.aio.EOF:
                if reply.why:
                    await call.done_writing()
        except grpc.aio.AioRpcError as exc:
            return to_error(exc, address)
    raise AssertionError("the stream ended without an error")


class Sink:
    """A successor that says nothing wrong and does nothing."""

    async def Pass(self, messages: Any, context: Any) -> None:
        async for _ in messages:
            await context.write(codec.reply_to_wire())


@asynccontextmanager
async def lone_stage() -> AsyncIterator[tuple[Member, Hello]]:
    """A stage, and a hello for it whose head answers."""
    stage = Member(1)
    await stage.start()
    try:
        async with serving("127.0.0.1", 0, STAGES.full_name, partial(add_service, STAGES, Sink())) as served:
            yield stage, hello(members=(f"127.0.0.1:{served.port}", stage.address))
    finally:
        await stage.stop()


PIECE = Piece(1, 0, 1, 4, b"h", b"bo")


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("hello", [Heartbeat()]),
        ("hello", [PIECE]),
        ("kind", [codec.stage_pb2.PassRequest()]),
        ("hello.epoch", [hello(epoch=0)]),
        ("hello.epoch", [hello(epoch=2**63)]),
        ("hello.members", [hello(members=["a:1"])]),
        ("hello.members", [hello(members=["a:1"] * 65)]),
        ("hello.members[1]", [hello(members=["a:1", ""])]),
        ("hello.members[0]", [hello(members=["a\n:1", "b:1"])]),
        ("hello.number", [hello(number=2)]),
        ("hello.number", [hello(number=0)]),
        ("hello", [None, hello(epoch=2)]),
        ("piece.frame", [None, PIECE._replace(frame=2)]),
        ("piece.frame", [None, PIECE._replace(frame=2**64 - 1)]),
        ("piece.offset", [None, PIECE._replace(offset=1)]),
        ("piece.offset", [None, PIECE, PIECE]),
        ("piece.header_bytes", [None, PIECE._replace(header_bytes=2**64 - 1)]),
        ("piece.body_bytes", [None, PIECE._replace(body_bytes=MAX_BODY_BYTES + 1)]),
        ("piece.body_bytes", [None, PIECE, PIECE._replace(offset=3, header=b"", body_bytes=5)]),
        ("piece.header", [None, PIECE._replace(header=b"hh")]),
        ("piece.body", [None, PIECE._replace(body=b"b" * 5)]),
        ("piece.body", [None, PIECE._replace(header=b"")]),
        ("piece.body", [None, PIECE._replace(header=b"", body=b"")]),
        ("piece.header", [None, PIECE, Piece(1, 3, 1, 4, b"h", b"")]),
    ],
)
async def test_malformed_messages_are_refused_by_field(field: str, messages: list[Any]) -> None:
    """None is a valid hello. The stage serves the next epoch, whatever came."""
    async with lone_stage() as (stage, first):
        error = await outcome(stage.address, *(first if message is None else message for message in messages))
        assert isinstance(error, InvalidRequest), error
        assert error.field == field
        await until(lambda: stage.ring.epoch == 0)
        error = await outcome(stage.address, first._replace(epoch=9), RingEnd("enough"))
        assert isinstance(error, RingLost), error
        assert str(error) == "enough"


async def test_only_a_higher_epoch_replaces_the_present_one() -> None:
    async with lone_stage() as (stage, first):
        present = asyncio.create_task(outcome(stage.address, first._replace(epoch=5)))
        await until(lambda: stage.ring.epoch == 5)
        for epoch in (4, 5):
            error = await outcome(stage.address, first._replace(epoch=epoch))
            assert isinstance(error, StaleEpoch)
            assert error.newest == 5
        assert stage.ring.epoch == 5
        async with background(outcome(stage.address, first._replace(epoch=6))):
            await until(lambda: stage.ring.epoch == 6)
            error = await present
            assert isinstance(error, RingLost)
            assert "epoch 5 was replaced by epoch 6" in str(error)


async def test_a_restarted_head_continues_from_the_stages_epoch() -> None:
    """A new head begins with epoch 1, which its stages have seen; they say which is the newest."""
    async with ring_of(2) as circle:
        circle.ring._newest = 40
        await circle.is_up(40)
        old, new = circle.members[0], Member(0)
        circle.addresses = None
        await old.stop()
        await new.start(int(old.address.partition(":")[2]))
        addresses = [member.address for member in circle.members]
        async with background(new.ring.run(lambda: addresses, lambda: b"")):
            await until(lambda: new.ring.epoch > 41)
        await new.stop()


async def test_a_head_accepts_the_epoch_that_it_connects_and_no_other() -> None:
    async with ring_of(1) as circle:
        head, epoch = circle.members[0], await circle.is_up()
        for other in (epoch, epoch + 1, epoch + 2):
            error = await outcome(head.address, hello(other, number=0))
            assert isinstance(error, StaleEpoch), error
        assert circle.ring.epoch == epoch


async def test_a_closed_member_refuses_calls_and_leaves_nothing() -> None:
    tasks, threads = asyncio.all_tasks(), threading.active_count()
    async with ring_of(2) as circle:
        epoch = await circle.is_up()
        for number in (1, 0):
            await circle.members[number].ring.close()
        with pytest.raises(RingLost):
            await asyncio.to_thread(circle.ring.send, epoch, Frame(b"", b""))
        assert await asyncio.to_thread(circle.members[1].ring.next) is None
        error = await outcome(circle.members[1].address, hello(epoch + 9))
        assert isinstance(error, Unavailable)
        assert "ends" in str(error)
    await until(lambda: asyncio.all_tasks() <= tasks)
    await until(lambda: threading.active_count() - threads <= 1 + _pool_threads())


def _pool_threads() -> int:
    """Threads of asyncio's own pool, which stay."""
    return sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
