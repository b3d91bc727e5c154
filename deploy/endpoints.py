"""Addresses of a bough under Ray Serve on this machine, and example calls that can be pasted into a shell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bough.client import Client
from bough.config.processes import OrchestratorConfig
from bough.errors import ConfigError
from bough.processes.progress import activation
from bough.security.secured import files_towards
from bough.security.worker_key import WorkerKey
from deploy.check import orchestrator_of
from deploy.settings import Role

HOST = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
PROGRAM = f"{Role.ORCHESTRATOR.value}.user_config.program"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The orchestrator's addresses for clients."""

    orchestrator: OrchestratorConfig
    address: str  # for gRPC
    base: str  # URL for OpenAI's clients

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Endpoints:
        """Return the addresses. Raise ConfigError, naming the setting, for a port that is not fixed."""
        orchestrator = orchestrator_of(config, os.environ)
        name, port = "http_options.port", http_port(config)
        if config.get("proxy_location") == "Disabled":
            name, port = f"{PROGRAM}.http_port", orchestrator.http_port
        for where, value in ((f"{PROGRAM}.port", orchestrator.port), (name, port)):
            if value <= 0:
                raise ConfigError(f"{where}: must be fixed, for clients to find it, got {value}")
        scheme = "https" if orchestrator.tls_cert else "http"
        return cls(orchestrator, f"{HOST}:{orchestrator.port}", f"{scheme}://{HOST}:{port}/v1")

    def client(self) -> Client:
        """Return a client; it shows the secret of all processes, if there is one, and may then ask for the status."""
        key_file = self.orchestrator.worker_key_file
        key = WorkerKey(key_file).file.value[0] if key_file else None
        return Client(self.address, api_key=key, certificates=files_towards(self.orchestrator))

    def how_to_ask(self, dashboard_url: str) -> str:
        """Return three example calls; they take an application's key from BOUGH_API_KEY where one is required."""
        has_keys, files = bool(self.orchestrator.keys), files_towards(self.orchestrator)
        curl, bough = {"--cacert": files.authority}, {"--tls-ca": files.authority}
        if files.cert:
            curl |= {"--cert": files.cert, "--key": files.key}
            bough |= {"--tls-cert": files.cert, "--tls-key": files.key}
        text = TEXT if not files.cert else TEXT.replace(OPENAI, "")  # OpenAI's client needs code to show a certificate
        return text.format(
            base=self.base,
            address=self.address,
            dashboard=dashboard_url,
            activation=activation(),
            ready="ready; with a key of yours in BOUGH_API_KEY," if has_keys else "ready;",
            header=' -H "authorization: Bearer $BOUGH_API_KEY"' if has_keys else "",
            api_key='os.environ["BOUGH_API_KEY"]' if has_keys else '"none"',
            ca=f"SSL_CERT_FILE={files.authority} " if files.authority else "",
            curl=_words(curl),
            bough=_words(bough),
        )


def http_port(config: Mapping[str, Any]) -> int:
    """Return the port of Serve's proxy."""
    return int((config.get("http_options") or {}).get("port", DEFAULT_HTTP_PORT))


def _words(flags: Mapping[str, str]) -> str:
    return "".join(f" {flag} {value}" for flag, value in flags.items() if value)


OPENAI = """{ca}python -c '
import os
from openai import OpenAI
client = OpenAI(base_url="{base}", api_key={api_key})
model = client.models.list().data[0].id
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
'

"""
TEXT = (
    """{ready} three ways to ask, from another terminal{activation}:

curl{curl} -N {base}/chat/completions{header} -H 'content-type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64, "stream": true}}'

"""
    + OPENAI
    + """bough generate{bough} --address {address} "Why is the sky blue?"

bough doctor{bough} --address {address} --ray {dashboard} shows nodes, replicas and workers. Ctrl-C ends everything."""
)
