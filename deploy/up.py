"""`python -m deploy.up [FILE]` (`make serve`): run bough under Ray Serve on this machine until Ctrl-C.

Starts a Ray node that ends with this process, deploys the configuration, waits until it can serve a request, and
prints three example calls. `--simulate PROFILE` needs no weights; with `--haproxy` HTTP bypasses Ray's own proxy.
"""

from __future__ import annotations

import os
from pathlib import Path

from bough.config.flag_parser import FlagParser
from bough.errors import BoughError, ConfigError
from bough.runtime.log_lines import say_error

FOLDER = Path(__file__).parent
DASHBOARD_PORT = 8265
ENVIRONMENT = {  # Ray reads them when it is imported
    "RAY_worker_niceness": "0",  # Ray's default is 15, which programs would inherit
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill a target whose weights fill most of the memory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_gcs_server_port_wait_time_s": "240",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # until an HAProxy of this machine knows that a replica ends
    # Replicas only wait on sockets, and need no thread in addition to that of Ray's calls.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # files have it
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # between proxy and replicas, instead of calls of actors
    "RAY_AUTH_MODE": "token",  # calls to a Ray node can run code there; Ray makes ~/.ray/auth_token
}


def main() -> int:
    """Serve until Ctrl-C; exit with status 2 and a one-line message if something is wrong."""
    parser = FlagParser(description=__doc__)
    default = FOLDER / "one-machine.yaml"
    parser.add_argument("file", type=Path, nargs="?", default=default, help="a configuration for one machine")
    parser.add_argument("--simulate", metavar="PROFILE", default="", help="workers without weights, as for `bough up`")
    parser.add_argument("--port", type=int, help="port of HTTP instead of the file's; `make serve PORT=N`")
    parser.add_argument("--dashboard-port", type=int, default=DASHBOARD_PORT, help=f"of Ray (default {DASHBOARD_PORT})")
    parser.add_argument("--haproxy", action="store_true", help="HTTP comes in through HAProxy; `make serve HAPROXY=1`")
    arguments = parser.parse_args()
    if arguments.haproxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    prepare_environment()
    try:
        try:
            from deploy.local import Stopped, run
        except ImportError as exc:
            raise ConfigError(f"Ray Serve is not installed ({exc}); must be: pip install '.[serve]'") from exc
        try:
            run(arguments.file, arguments.simulate, arguments.port, arguments.dashboard_port)
        except Stopped:
            return 130
    except BoughError as exc:
        say_error(exc)
        return 2
    return 0


def prepare_environment() -> None:
    """Set the environment of Ray and its processes; variables that the user has set stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    root = str(FOLDER.parent)  # replicas import `deploy` from there
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    raise SystemExit(main())
