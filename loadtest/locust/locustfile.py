"""The file that locust runs: `python -m locust -f loadtest/locust/locustfile.py`, with a plan in the environment.

`python -m loadtest.locust` runs it so. locust's own report has the rows "first token", "per token", "longest gap" and
"whole answer" for each API; ignore its "Aggregated" row, which mixes them. Exact figures come from the samples file.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import gevent
import grpc.experimental.gevent as grpc_gevent
from gevent.event import Event
from gevent.pool import Pool
from locust import LoadTestShape, User, events, task
from locust.exception import StopUser

from loadtest.common.prompts import load_prompts
from loadtest.locust.apis import Api, Conversation, GrpcApi, HttpApi
from loadtest.locust.climb import Climb
from loadtest.locust.plan import Mix, Question, holds_conversations, plan_from_environment
from loadtest.locust.samples import UNFINISHED, Sample, write_sample

grpc_gevent.init_gevent()  # before any channel, as gRPC would otherwise block all users while it waits in C

PLAN = plan_from_environment()
STARTED = time.monotonic()
SAMPLES: list[Sample] = []
FILE = Path(PLAN.samples_path).open("w", buffering=1)  # noqa: SIM115 - as long as the process
numbers = itertools.count()
is_stopping = Event()  # set at the end of the test: no new requests


def open_api(number: int) -> Api:
    """The client of a user, by its number from 0."""
    if PLAN.apis[number % len(PLAN.apis)] == "grpc":
        return GrpcApi(PLAN.address, PLAN.timeout_seconds, STARTED)
    return HttpApi(PLAN.http_url, PLAN.timeout_seconds, STARTED)


def ask(environment: Any, api: Api, conversation: Conversation, question: Question, users: int) -> Sample:
    """Send a request and record it; requests cut off by the end of the test are marked as such."""
    began = time.monotonic() - STARTED
    try:
        sample = api.ask(conversation, question, users)
    except gevent.GreenletExit:
        write_sample(FILE, Sample(api.name, began, time.monotonic() - STARTED - began, users=users, error=UNFINISHED))
        raise
    note(environment, sample)
    return sample


def note(environment: Any, sample: Sample) -> None:
    """Record a request in locust's statistics and in the samples file."""
    SAMPLES.append(sample)
    write_sample(FILE, sample)
    fire = environment.events.request.fire
    common = {"request_type": sample.api, "response_length": sample.num_tokens, "context": {}, "response": None}
    if sample.error:
        name = "refused" if sample.is_refused else "whole answer"
        problem = None if sample.is_refused else RuntimeError(sample.error)
        fire(name=name, response_time=1000 * sample.seconds, exception=problem, **common)
        return
    rows = {
        "first token": sample.first_token_seconds,
        "per token": sample.token_seconds,
        "longest gap": sample.longest_gap_seconds,
        "whole answer": sample.seconds,
    }
    for name, seconds in rows.items():
        fire(name=name, response_time=1000 * seconds, exception=None, **common)


class Person(User):
    """A user who sends requests with pauses; or, at an offered rate, the source of all requests."""

    def on_start(self) -> None:
        """Give the user a connection, a client and a sequence of questions."""
        self.number = next(numbers)
        self.mix = Mix(PLAN.kinds, load_prompts(), PLAN.seed + self.number)
        self.api = open_api(self.number)
        self.holds_conversations = holds_conversations(self.number // len(PLAN.apis), PLAN.conversations)

    def on_stop(self) -> None:
        """Close the user's connection."""
        self.api.close()

    @task
    def live(self) -> None:
        """Run one conversation or one request; with a rate, all arrivals."""
        if PLAN.rate:
            self._offer()
            raise StopUser
        conversation = Conversation.begin() if self.holds_conversations else Conversation()
        for _ in range(PLAN.turns if self.holds_conversations else 1):
            num_users = self.environment.runner.user_count
            sample = ask(self.environment, self.api, conversation, self.mix.question(), num_users)
            gevent.sleep(sample.retry_seconds if sample.is_refused else self.mix.pause(PLAN.think_seconds))
            if sample.error:
                return

    def _offer(self) -> None:
        """Send requests as a Poisson process, each over its own connection, without waiting for others."""
        pool, due = Pool(), time.monotonic()
        try:
            for number in itertools.count():
                due += self.mix.pause(1 / PLAN.rate)
                if is_stopping.wait(max(0.0, due - time.monotonic())):
                    break
                pool.spawn(self._arrive, number, len(pool))
            pool.join()  # locust limits the wait
        finally:
            pool.kill()

    def _arrive(self, number: int, num_open: int) -> None:
        api = open_api(number)
        try:
            ask(self.environment, api, Conversation(), self.mix.question(), num_open)
        finally:
            api.close()


if PLAN.step_users:

    class Steps(LoadTestShape):
        """The load shape that climbs until latency rises; locust discovers it by its class."""

        climb = Climb(PLAN.step_users, PLAN.step_seconds, PLAN.max_users, PLAN.bend, PLAN.most_seconds)

        def tick(self) -> tuple[int, float] | None:
            """The number of users now, and their spawn rate per second."""
            users = self.climb.users_at(time.monotonic() - STARTED, SAMPLES)
            return None if users is None else (users, float(PLAN.step_users))


@events.test_stopping.add_listener  # type: ignore[untyped-decorator]
def stop_arrivals(**_: object) -> None:
    """Stop new requests; running ones may finish."""
    is_stopping.set()


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def close_file(**_: object) -> None:
    """Flush and close the samples file before the command reads it, and keep what the climb has found."""
    FILE.close()
    if PLAN.step_users:
        PLAN.write_bent_at(Steps.climb.bent_at)
