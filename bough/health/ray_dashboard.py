"""A client of the HTTP API of a Ray cluster's dashboard, without Ray."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bough.errors import ConfigError, Unavailable

TIMEOUT_SECONDS = 60.0  # the first call starts a process on the head
NODES = "/api/v0/nodes?detail=1&limit=1000"
APPLICATIONS = "/api/serve/applications/"
INTERNAL = ("memory", "object_store_memory")  # resources that bough never requests, in addition to Ray's own node:...


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    host: str
    is_alive: bool
    resources: Mapping[str, float]  # total, used or not
    problem: str = ""  # why it is dead

    def describe_resources(self) -> str:
        """Resources that a deployment may request, such as "CPU 8, target_gpu 1"."""
        names = sorted(name for name in self.resources if not name.startswith("node:") and name not in INTERNAL)
        return ", ".join(f"{name} {self.resources[name]:g}" for name in names) or "nothing"


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a deployment."""

    host: str  # empty before it is placed
    state: str
    process_id: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment of an application, with its replicas."""

    name: str
    status: str
    message: str
    num_wanted: int
    replicas: tuple[Replica, ...]
    user_config: Mapping[str, Any]

    @property
    def is_healthy(self) -> bool:
        return self.status == "HEALTHY"


@dataclass(frozen=True, slots=True)
class Application:
    """A deployed application."""

    name: str
    status: str
    message: str
    deployments: tuple[Deployment, ...]

    @property
    def problem(self) -> str:
        """Messages of unhealthy deployments, or else of the application; empty if it runs."""
        if self.status == "RUNNING":
            return ""
        messages = [f"{each.name}: {each.message}" for each in self.deployments if each.message and not each.is_healthy]
        return "; ".join(messages) or self.message


@dataclass(frozen=True, slots=True)
class RayDashboard:
    """The dashboard at a URL such as http://10.0.0.1:8265."""

    url: str

    def nodes(self) -> tuple[Node, ...]:
        """All nodes, dead ones included. Raises Unavailable."""
        rows = self._call("GET", NODES)["data"]["result"]["result"]
        return tuple(
            Node(row["node_ip"], row["state"] == "ALIVE", row.get("resources_total") or {}, row["state_message"] or "")
            for row in rows
        )

    def applications(self) -> tuple[Application, ...]:
        """All applications of Serve. Raises Unavailable."""
        return tuple(_application(name, row) for name, row in self._call("GET", APPLICATIONS)["applications"].items())

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Replace Serve's applications by this configuration; returns before they run.

        Raises:
            ConfigError: Ray rejects the configuration.
            Unavailable: the dashboard does not answer.
        """
        self._call("PUT", APPLICATIONS, config)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json"}
        if token := ray_token(os.environ):
            headers["authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=TIMEOUT_SECONDS) as reply:
                text = reply.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as exc:
            detail = (exc.read().decode(errors="replace").strip().splitlines() or [""])[-1]  # a traceback's last line
            kind = ConfigError if exc.code in (400, 401, 403) else Unavailable
            raise kind(f"{self.url}{path}: {exc.code} {detail or exc.reason}") from exc
        except (OSError, HTTPException, ValueError) as exc:
            raise Unavailable(f"the Ray dashboard at {self.url} does not answer: {exc}") from exc


def ray_token(environ: Mapping[str, str]) -> str:
    """The token that Ray's tools send with RAY_AUTH_MODE=token; empty if there is none."""
    if token := environ.get("RAY_AUTH_TOKEN", ""):
        return token
    path = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() if path.is_file() else ""


def _application(name: str, row: Mapping[str, Any]) -> Application:
    deployments = tuple(_deployment(each) for each in row["deployments"].values())
    return Application(name, row["status"], row["message"], deployments)


def _deployment(row: Mapping[str, Any]) -> Deployment:
    replicas = tuple(
        Replica(each.get("node_ip") or "", each["state"], each.get("pid") or 0) for each in row.get("replicas") or ()
    )
    config = (row.get("deployment_config") or {}).get("user_config") or {}
    return Deployment(row["name"], row["status"], row["message"], row["target_num_replicas"], replicas, config)
