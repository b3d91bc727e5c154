"""Choice of a GPU's backend: the first whose kernels pass their checks at the shapes of the model.

Results are cached by the card, its libraries, the code and the checks. The reference is not checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bough.config.cache_paths import cache_folder
from bough.errors import AcceleratorFull, AcceleratorLost, ConfigError
from bough.model.backend import REFERENCE_NOTE, RUNGS, Backend, backend_of, choose_backend, computing_by, load
from bough.model.checkpoint.atomic_files import make_folder, replace
from bough.model.faults import named_faults
from bough.model.loading.loading import Skeleton
from bough.model.running.device import await_all, driver, gpu_libraries, working_on
from bough.model.running.kernel_checks import Check, checks_of
from bough.runtime.exit_status import start_again

LOST = "BOUGH_LOST_BY_"  # and a backend's name: a variable with the error, of a process that was started again
MODEL = Path(__file__).parents[1]
CODE = ".", "gpu", "backends", "quant", "running"  # folders whose code decides what a check finds

logger = logging.getLogger(__name__)

_failed: dict[str, str] = {}  # why each backend that was tried before this process's failed


def checked_backend(name: str, devices: Sequence[torch.device], skeleton: Skeleton) -> Backend:
    """The backend of this process, ready for the first device. With `--backend auto` on GPUs it is the first whose
    kernels pass on all of them.

    Raises:
        AcceleratorFull: others have taken the device's memory.
        ConfigError: a named backend cannot compute there, or the cache folder cannot be written to.
    """
    _failed.clear()
    if name != "auto" or devices[0].type == "cpu":
        backend = backend_of(devices[0])
        backend.make_ready(devices[0])
        return backend
    for rung in RUNGS:
        failure = next(filter(None, (_known_failure(rung, device, skeleton) for device in devices)), "")
        if not failure:
            break
        logger.warning("--backend: %s is not used, as it fails its self-check: %s", rung, failure)
        _failed[rung] = failure
    logger.info("--backend: auto is %s", rung)
    torch.cuda.empty_cache()  # before free memory is measured
    backend = choose_backend(rung, devices[0])
    backend.make_ready(devices[0])
    return backend


def backend_notes(device: torch.device) -> Iterator[str]:
    """What a user should know about the backend of this process."""
    for rung, failure in _failed.items():
        yield f"--backend: auto is not {rung}, which fails its self-check: {failure}"
    if backend_of(device).name == "reference":
        yield REFERENCE_NOTE


def card(device: torch.device) -> str:
    """Name of a GPU, its capability, and the libraries that make or run kernels."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"{name} {capability}, {driver()} {torch.__version__}, {gpu_libraries()}"


def _known_failure(rung: str, device: torch.device, skeleton: Skeleton) -> str:
    """The cached result of a backend's checks, or their result now, which is then cached; empty if all are passed."""
    if rung == RUNGS[-1]:
        return ""
    try:
        load(rung).make_ready(device)
        checks = checks_of(skeleton)
    except (AcceleratorFull, AcceleratorLost):
        raise
    except Exception as exc:  # not cached, as what is missing may be installed
        return str(exc) if isinstance(exc, ConfigError) else f"{type(exc).__name__}: {exc}"
    key = hashlib.sha256("\n".join((card(device), str(skeleton.dtype), *(check.name for check in checks))).encode())
    for folder in CODE:
        for code in sorted((MODEL / folder).glob("*.py")):
            key.update(code.read_bytes())
    file, known = cache_folder() / "self-checks" / f"{key.hexdigest()[:32]}.json", dict[str, str]()
    with suppress(OSError, ValueError, AttributeError):  # missing or damaged
        known = {name: str(failure) for name, failure in json.loads(file.read_text()).items()}
    if rung not in known:
        known[rung] = os.environ.get(LOST + rung) or _failure(rung, device, skeleton.dtype, checks)
        make_folder("BOUGH_CACHE_DIR", file.parent)
        replace(file, lambda partial: partial.write_text(json.dumps(known)))
    return known[rung]


def _failure(rung: str, device: torch.device, dtype: torch.dtype, checks: Sequence[Check]) -> str:
    """The first failure of a backend's checks; empty if all are passed.

    If a kernel makes this process lose the device, it starts again with the failure in a variable.
    """
    logger.info("checking the kernels of %s on %s", rung, device)
    with computing_by(rung) as backend, working_on(device), torch.inference_mode():
        for check in checks:
            before = backend.spilling()
            try:
                with named_faults(device, on_lost=lambda _: None):
                    check.run(backend, dtype, device)
                    await_all(device)
            except AcceleratorFull:
                raise
            except AcceleratorLost as exc:
                start_again(LOST + rung, f"{check.name}: {exc}")
            except Exception as exc:  # of the kernel, or of its compiler
                return f"{check.name}: {type(exc).__name__}: {exc}"
            spilling = ", ".join(sorted(backend.spilling() - before))
            if spilling and not check.is_shared:
                return f"{check.name}: {spilling} spills registers"
    return ""
