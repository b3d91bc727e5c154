"""`python -m bough.health ADDRESS [SERVICE]`: whether a process serves, by its exit status; for containers.

ADDRESS is a host and port of any of the three programs. SERVICE is a full name such as bough.v1.Generation; without one
the whole process is checked. For a process with TLS, set the variables that it has (BOUGH_TLS_CERT, ...), and use an
address that is among its certificate's names. Exit status 0 is SERVING, 1 anything else.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough.config.flag_parser import FlagParser
from bough.errors import ConfigError
from bough.rpc.status_map import explained
from bough.runtime.log_lines import say
from bough.security.certificates import CertificateFiles
from bough.security.tls import add_certificates, channels, files_from

PATIENCE_SECONDS = 3.0
PLAIN = CertificateFiles()


async def status_of(address: str, service: str = "", files: CertificateFiles = PLAIN) -> str:
    """SERVING or NOT_SERVING, or why there is no answer. Raises ConfigError for unusable `files`."""
    (peer,) = channels(files, address)
    async with peer.opened() as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as exc:
            return f"{exc.code().name}: {explained(exc.details() or f'no service {service!r}')}"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the health status; returns 0 if it is SERVING."""
    parser = FlagParser(prog="bough.health", description=__doc__)
    parser.add_argument("address", metavar="ADDRESS")
    parser.add_argument("service", metavar="SERVICE", nargs="?", default="")
    add_certificates(parser)
    arguments = parser.parse_args(argv)
    files = files_from(arguments)
    ways = [files]
    if files.cert and not files.authority:  # the checked process's own certificate is trusted
        ways = [
            CertificateFiles(authority=files.cert),
            replace(files, authority=files.cert),
        ]  # if one is required
    status = ""
    for way in ways:
        try:
            status = asyncio.run(status_of(arguments.address, arguments.service, way))
        except ConfigError as exc:
            status = f"error: {exc}"
        if status == "SERVING":
            break
    say(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
