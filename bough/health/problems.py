"""Problems of a running system that an orchestrator knows."""

from __future__ import annotations

from itertools import combinations

from bough import __version__
from bough.protocol.generation import ServerInfo


def find_problems(server: ServerInfo) -> list[str]:
    """Problems, one sentence each."""
    problems = [server.index_problem] if server.index_problem else []
    problems += [
        f"{worker.info.worker_id} is not used: {worker.problem}" for worker in server.workers if worker.problem
    ]
    problems += server.unreached
    pairs = combinations([worker.info for worker in server.workers], 2)
    problems += [
        f"{contradiction}; sessions cannot move between them: install the same files in both places and restart"
        for first, second in pairs
        if (contradiction := first.contradiction(second))
    ]
    usable = {worker.info.kind for worker in server.workers if not worker.problem}
    if "target" not in usable:
        problems.append("no target worker: nothing can be generated")
    if "draft" not in usable and not server.is_draftless:
        problems.append("no draft worker: guesses come from a session's own text only")
    if server.bough_version != __version__:
        problems.append(f"the orchestrator is bough {server.bough_version}, this command {__version__}")
    return problems
