"""Ways in that are no endpoint of bough's own services: ports of metrics, the index, Ray Serve's forwarder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from bough.config.addresses import free_port
from bough.errors import BoughError
from bough.registry.registry import Registry
from bough.security.certificates import CertificateFiles
from deploy.index import IndexServer
from deploy.settings import IndexSettings
from tests.fakes.certificates import Authority, Pair
from tests.fakes.intruder.callers import bearer, http_outcome
from tests.fakes.intruder.stage import Stage
from tests.fakes.intruder.strangers import at_http, forged
from tests.fakes.intruder.tally import Tally

HOST, OTHER_HOST = (
    "127.0.0.1",
    "127.0.0.2",
)  # the second is this machine too, in place of an address that others reach
UNANSWERED = "no answer"
NOT_ALLOWED = ("405",)
UNREACHED = ("ConfigError", "Unavailable")  # what the registry makes of an index that refuses it


async def at_metrics(tally: Tally, stage: Stage) -> None:
    """If there are keys these ports only serve the machine itself, and only report metrics."""
    for kind, replicas in stage.stack.replicas.items():
        address = replicas[0][1].metrics
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30, trust_env=False) as client:
            tally.control(f"{kind}'s metrics", await http_outcome(client, "GET", "/metrics"), ["200"])
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                await tally.attempted(f"{kind}'s metrics: {method}", http_outcome(client, method, "/"), NOT_ALLOWED)
        elsewhere = f"http://{address.replace(HOST, OTHER_HOST)}"
        async with httpx.AsyncClient(base_url=elsewhere, timeout=30, trust_env=False) as client:
            for shown in (stage.secrets.alice, stage.secrets.worker):
                outcome = (await http_outcome(client, "GET", "/metrics", bearer(shown))).partition(":")[0]
                tally.attempt(f"{kind}'s metrics at another address", outcome, [UNANSWERED])


async def at_forwarder(tally: Tally, stage: Stage) -> None:
    """The attempts at the HTTP port, through the forwarder of Ray Serve's proxy, if its packages are installed."""
    if find_spec("aiohttp") is None:
        return
    from deploy.forward import Forwarder

    forwarder = Forwarder(stage.url)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await forwarder.forward(Request(scope, receive)))(scope, receive, send)

    transport = httpx.ASGITransport(app)
    try:
        await at_http(tally, "http://serve", stage.secrets, transport)
        async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
            outcome = await http_outcome(client, "GET", "/v1/models", bearer(stage.secrets.alice))
            tally.control("GET /v1/models through Serve", outcome, ["200"])
    finally:
        await forwarder.close()


async def at_index(tally: Tally, stage: Stage, folder: Path) -> None:
    """An index as Ray Serve has it: with a password, and with TLS before it."""
    key = str(folder / "worker.key")
    right = stage.secrets.worker
    settings = IndexSettings(host=HOST, port=free_port(HOST), worker_key_file=key)
    async with _index(settings) as url:
        await _with_passwords(tally, url, {}, stage)
    authority = Authority()
    files = authority.files(folder, "index")
    tls = replace(settings, tls_cert=files.cert, tls_key=files.key, tls_ca=files.authority)
    async with _index(tls) as url:
        shown = authority.pair("process").write(folder, "shown")
        await _with_passwords(tally, url, _query(files, shown), stage)
        plain = _outcome(url.replace("rediss", "redis"), right, {})
        await tally.attempted("the index's TLS front in plain text", plain, UNREACHED)
        for how, pair in _wrong(authority).items():
            query = _query(files, None if pair is None else pair.write(folder, "wrong"))
            await tally.attempted(f"the index's TLS front with {how}", _outcome(url, right, query), UNREACHED)


def _wrong(authority: Authority) -> Mapping[str, Pair | None]:
    return {
        "no certificate": None,
        "a certificate of another authority": Authority("stranger").pair("process"),
        "a certificate that is over": authority.pair("process", days=-1),
    }


def _query(files: CertificateFiles, shown: tuple[Path, Path] | None) -> dict[str, str]:
    """Settings of the index's URL for a process that shows this certificate, or none."""
    certificates = {} if shown is None else {"ssl_certfile": str(shown[0]), "ssl_keyfile": str(shown[1])}
    return {"ssl_ca_certs": files.authority, **certificates}


async def _with_passwords(tally: Tally, url: str, query: Mapping[str, str], stage: Stage) -> None:
    right = stage.secrets.worker
    wrong = {how: headers[0][1].removeprefix("Bearer ") for how, headers in forged(right).items() if headers}
    for how, password in {"nothing": "", **wrong, "a tenant's key": stage.secrets.alice}.items():
        if password != right:  # which is right here without a scheme before it
            outcome = _outcome(url, password, query)
            await tally.attempted(f"the index at {url.partition(':')[0]} with {how}", outcome, UNREACHED)
    tally.control("the index with its password", await _outcome(url, right, query), ["OK"])


async def _outcome(url: str, password: str, query: Mapping[str, str]) -> str:
    """Class of the error that a process gets from an index; OK for none."""
    scheme, _, place = url.partition("://")
    login = f":{quote(password, safe='')}@" if password else ""
    registry = Registry(f"{scheme}://{login}{place}" + (f"?{urlencode(query)}" if query else ""))
    try:
        await registry.ping()
    except BoughError as exc:
        return type(exc).__name__
    finally:
        await registry.close()
    return "OK"


@asynccontextmanager
async def _index(settings: IndexSettings) -> AsyncIterator[str]:
    """A running index; yields its URL without a password."""
    index = IndexServer(settings, HOST)
    try:
        await index.wait()
        yield index.place.url
    finally:
        await index.stop()
