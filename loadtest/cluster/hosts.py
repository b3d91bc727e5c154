"""Hosts as network namespaces on a bridge to which this process is connected, too. Needs root and iproute2."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bough.processes import exit_with_parent

STOP_SECONDS = 30.0  # between SIGTERM and SIGKILL for processes left on a host


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace that stands for a machine."""

    name: str
    namespace: str
    address: str
    port: str  # interface on the bridge

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host; it ends with this process."""
        with log.open("ab") as stream:
            return exit_with_parent.start(
                self.command(command),
                lambda whole: subprocess.Popen(
                    whole, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment
                ),
            )

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on the host."""
        return [_ip(), "netns", "exec", self.namespace, *command]

    def cut_off(self) -> None:
        """Take the host's link down; no connection is reset."""
        _run("link", "set", self.port, "down")

    def bring_back(self) -> None:
        """Take the host's link up again."""
        _run("link", "set", self.port, "up")

    def process_ids(self) -> list[int]:
        """Process ids of all processes on the host."""
        return [int(line) for line in _run("netns", "pids", self.namespace).split()]


def missing() -> str:
    """Why network namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts("probe"):
            return ""
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"no network namespaces here: {exc}"


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Create hosts that reach one another, by name; processes on them end with the block."""
    number = os.getpid() % 250
    bridge, subnet = f"bgh{os.getpid()}", f"10.77.{number}"
    made: dict[str, Host] = {}
    try:
        _run("link", "add", bridge, "type", "bridge")
        _run("addr", "add", f"{subnet}.254/24", "dev", bridge)
        _run("link", "set", bridge, "up")
        for index, name in enumerate(names, 1):
            host = Host(name, f"{bridge}-{name}", f"{subnet}.{index}", f"{bridge}p{index}"[:15])
            _run("netns", "add", host.namespace)
            made[name] = host
            _run("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _run("link", "set", host.port, "master", bridge, "up")
            inside = ("-n", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")
        yield made
    finally:
        _end_all([*made.values()])
        for host in made.values():
            for leftover in ("link", host.port), ("netns", host.namespace):  # a socket with unsent data keeps its link
                with suppress(subprocess.CalledProcessError):
                    _run(leftover[0], "del", leftover[1])
        with suppress(subprocess.CalledProcessError):
            _run("link", "del", bridge)


def _end_all(running: Sequence[Host]) -> None:
    """End the processes on these hosts, by process id."""
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        deadline = time.monotonic() + seconds
        for process_id in (each for host in running for each in host.process_ids()):
            with suppress(ProcessLookupError):
                os.kill(process_id, number)
        while any(host.process_ids() for host in running) and time.monotonic() < deadline:
            time.sleep(0.2)


def _run(*arguments: str) -> str:
    return subprocess.run([_ip(), *arguments], check=True, capture_output=True, text=True).stdout


def _ip() -> str:
    return next((path for path in ("/usr/sbin/ip", "/sbin/ip") if Path(path).exists()), "ip")
