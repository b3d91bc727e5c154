"""Attempts without TLS, without a certificate, and with certificates of other names or authorities."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from bough.rpc.server import open_channel
from bough.security.certificates import CertificateFiles
from bough.security.private_files import write_private
from loadtest.served.stack import Stack, stack, write_profile
from tests.fakes.certificates import Authority, Pair, flags_of
from tests.fakes.intruder.callers import SERVICES, bearer, grpc_outcome, http_outcome
from tests.fakes.intruder.stage import SWEEP_SECONDS, new_secrets, write_keys
from tests.fakes.intruder.strangers import Secrets
from tests.fakes.intruder.tally import Tally

NAME = "process"  # in the certificates that workers accept
ENDED = ("UNAVAILABLE", "UNAUTHENTICATED")  # statuses of a refused connection, or call
UNREADABLE = ("400", "401")
CALLS = ("Generate", "GetLoads", "Verify", "Grow", "GetServerInfo", "GetTokenizer")


@dataclass(frozen=True, slots=True)
class Authorities:
    """Certificate authorities of the processes, of their clients, and an unknown one."""

    own: Authority
    clients: Authority
    stranger: Authority


@dataclass(frozen=True, slots=True)
class Secured:
    """Processes that use TLS, and require certificates and keys of clients."""

    stack: Stack
    secrets: Secrets
    authorities: Authorities
    addresses: dict[str, str]
    url: str

    def shown(self, pair: Pair | None) -> grpc.ChannelCredentials:
        """Credentials of a caller that trusts the servers and shows this certificate, or none."""
        key, chain = (None, None) if pair is None else (pair.key, pair.certificate)
        return grpc.ssl_channel_credentials(self.authorities.own.certificate, key, chain)


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[Secured]:
    """Run the processes with newly made certificates."""
    authorities = Authorities(Authority(), Authority("clients"), Authority("stranger"))
    files, secrets = authorities.own.files(folder, NAME), new_secrets()
    worker_key, keys = folder / "tls-worker.key", folder / "tls-keys.jsonl"
    write_keys(keys, secrets, with_removed=False)
    write_private("--worker-key-file", str(worker_key), secrets.worker)
    client_ca = authorities.clients.write(folder, "clients")
    of_client = _written(folder, authorities.clients.pair("client"), str(files.authority))
    async with stack(
        write_profile(folder, SWEEP_SECONDS),
        ["--keys", str(keys), "--tls-client-ca", str(client_ca)],
        everywhere_flags=["--worker-key-file", str(worker_key), *flags_of(files)],
        worker_flags=["--tls-peer-names", NAME],
    ) as running:
        url = await running.http_url(secrets.worker, of_client)
        yield Secured(running, secrets, authorities, {kind: running.addresses(kind)[0] for kind in SERVICES}, url)


def _written(folder: Path, pair: Pair, authority: str) -> CertificateFiles:
    certificate, key = pair.write(folder, "client")
    return CertificateFiles(str(certificate), str(key), authority)


async def at_certificates(tally: Tally, bough: Secured) -> None:
    """Make all attempts with valid keys or secrets, but without TLS or with a wrong certificate."""
    await _at_grpc(tally, bough)
    await _at_http(tally, bough)


def _wrong(bough: Secured, kind: str) -> Mapping[str, Pair | None]:
    own, clients, stranger = bough.authorities.own, bough.authorities.clients, bough.authorities.stranger
    wrong = {
        "no certificate": None,
        "a certificate of another authority": stranger.pair(NAME),
        "a certificate that is over": own.pair(NAME, days=-1),
    }
    if kind == "orchestrator":
        return wrong
    return wrong | {
        "a client's certificate": clients.pair(NAME),
        "a certificate of another name": own.pair("other", hosts=("localhost",)),
        "a certificate of a name that is longer": own.pair(NAME + ".other", hosts=()),
    }


async def _at_grpc(tally: Tally, bough: Secured) -> None:
    for kind, address in bough.addresses.items():
        calls = [call for call in SERVICES[kind] if call.method.rpartition("/")[2] in CALLS]
        key = bearer(bough.secrets.alice if kind == "orchestrator" else bough.secrets.worker)
        for call in calls:
            async with open_channel(address) as channel:
                outcome = await grpc_outcome(channel, call, key)
            tally.attempt(f"{kind} {call.method} in plain text", outcome, ENDED)
            for how, pair in _wrong(bough, kind).items():
                async with open_channel(address, bough.shown(pair)) as channel:
                    outcome = await grpc_outcome(channel, call, key)
                tally.attempt(f"{kind} {call.method} with {how}", outcome, ENDED)
            right = bough.authorities.clients.pair("x") if kind == "orchestrator" else bough.authorities.own.pair(NAME)
            async with open_channel(address, bough.shown(right)) as channel:
                outcome = await grpc_outcome(channel, call, key)
                keyless = await grpc_outcome(channel, call)
            tally.attempt(f"{kind} {call.method} with a certificate and no key", keyless, ("UNAUTHENTICATED",))
            is_let_in = outcome not in (*ENDED, "INTERNAL", "DEADLINE_EXCEEDED")
            tally.control(f"{kind} {call.method} with its certificate", outcome, [outcome] if is_let_in else [])


async def _at_http(tally: Tally, bough: Secured) -> None:
    key = bearer(bough.secrets.alice)
    plain = bough.url.replace("https://", "http://", 1)
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
        async with httpx.AsyncClient(base_url=plain, timeout=30, trust_env=False) as client:
            await _refused(tally, f"{method} {path} in plain text", await http_outcome(client, method, path, key))
        for how, pair in _wrong(bough, "orchestrator").items():
            async with _client(bough, pair) as client:
                await _refused(tally, f"{method} {path} with {how}", await http_outcome(client, method, path, key))
        async with _client(bough, bough.authorities.clients.pair("x")) as client:
            tally.control(f"{method} {path} over TLS", await http_outcome(client, method, path, key), ["200"])
            keyless = await http_outcome(client, method, path)
            tally.attempt(f"{method} {path} over TLS without a key", keyless, UNREADABLE)


async def _refused(tally: Tally, what: str, outcome: str) -> None:
    """Record an attempt for which a connection that ends without an answer is a refusal."""
    tally.attempt(what, outcome.partition(":")[0], (*UNREADABLE, "no answer"))


def _client(bough: Secured, pair: Pair | None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cadata=bough.authorities.own.certificate.decode())
    if pair is not None:
        folder = bough.stack.folder
        certificate, key = pair.write(folder, "shown")
        context.load_cert_chain(certificate, key)
    return httpx.AsyncClient(base_url=bough.url, timeout=30, trust_env=False, verify=context)
