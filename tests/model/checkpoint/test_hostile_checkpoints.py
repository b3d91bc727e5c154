"""A model's folder is data: nothing in it is run, and nothing in it leads out of where models are kept."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants

from bough.errors import BoughError, CheckpointError
from bough.model.architecture.architecture import load_config
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import cached, is_hub_id, load_tokenizer_files
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from bough.model.sizes.model_sizes import find_model
from loadtest.common.tiny_model import TINY, save_model

ROOT = Path(__file__).parents[2]
PROGRAMS = ("bough", "orchestrator", "target_worker", "draft_worker", "deploy")
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Config: pass\nclass Tokenizer: pass\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model with its own code, and a file that this code makes; a user who is asked whether to run it says yes."""
    folder, marker = save_model(tmp_path / "hostile", TINY), tmp_path / "it ran"
    config = json.loads((folder / "config.json").read_text())
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "hostile.Config")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "hostile", "auto_map": auto_map}))
    tokenizer = {"tokenizer_class": "HostileTokenizer", "auto_map": {"AutoTokenizer": ["hostile.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "hostile.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder, marker


def test_code_in_a_checkpoint_is_never_run(hostile: tuple[Path, Path]) -> None:
    """transformers would ask on the terminal, and run it for a yes."""
    folder, marker = hostile
    for read in (load_config, load_tokenizer_files, lambda place: find_model(str(place))):
        with suppress(BoughError):
            read(folder)
        assert not marker.exists(), read


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt", "tokenizer.json"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    folder, marker = save_model(tmp_path / "pickled", TINY), tmp_path / "it ran"
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / name).write_bytes(pickle.dumps(_Payload(marker)))
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)
    with suppress(BoughError):
        load_tokenizer_files(folder)
    assert not marker.exists()


def _parsed() -> Iterator[tuple[Path, ast.AST]]:
    for program in PROGRAMS:
        for file in sorted((ROOT / program).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                yield file.relative_to(ROOT), node


UNPICKLERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNNERS = {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
RUNNERS |= {"torch.load", "numpy.load", "np.load", "torch.hub.load", "commands.getoutput"}


@pytest.mark.slow
def test_no_program_unpickles_evaluates_or_uses_a_shell() -> None:
    found = []
    for file, node in _parsed():
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{file}: import {name}" for name in names if name.partition(".")[0] in UNPICKLERS]
        if isinstance(node, ast.Call):
            if (called := ast.unparse(node.func)) in RUNNERS:
                found.append(f"{file}:{node.lineno}: {called}")
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and not is_false:
                    found.append(f"{file}:{node.lineno}: {keyword.arg}")
    assert not found


OUTSIDE = [
    "../x",
    "a/..",
    "../..",
    "./x",
    "/etc/x",
    "~/x",
    "a/../b",
    "..%2f/x",
    "a\\..\\b/x",
    "a/b/../../c",
    "a/\0",
    "/",
]


@pytest.mark.parametrize("model", OUTSIDE)
def test_a_hub_id_never_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    if is_hub_id(model):
        with pytest.raises(CheckpointError):
            cached(model)


def test_a_cache_entry_that_points_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache names a snapshot by the content of a file, which is joined to its folder unchanged."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "elsewhere", TINY)
    entry = tmp_path / "cache" / "models--some--body"
    (entry / "refs").mkdir(parents=True)
    (entry / "snapshots").mkdir()
    (entry / "refs" / "main").write_text("../../../elsewhere")
    with pytest.raises(CheckpointError, match="some/body"):
        cached("some/body")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{root}/outside.safetensors", "a/../../outside.safetensors"]
)
def test_a_file_index_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path / "model", TINY)
    file = next(folder.glob("*.safetensors"))
    (tmp_path / "outside.safetensors").write_bytes(file.read_bytes())
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    tensor = next(key for key in header if key != "__metadata__")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {tensor: name.format(root=tmp_path)}}))
    with pytest.raises(CheckpointError, match=r"outside\.safetensors"):
        Checkpoint.open(folder)
