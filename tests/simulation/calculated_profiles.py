"""Profiles of GPUs, calculated by the `bough plan` command that their source states.

`python -m tests.simulation.calculated_profiles` writes the shipped ones again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.cli.main import argument_parser
from bough.cli.planning.plan import settings_from
from bough.cli.planning.plan_model import make_plan
from bough.simulation import profile
from bough.simulation.profile import shipped_profiles
from bough.sizing.cost_model import SweepModel

NAMES = sorted({*shipped_profiles()} - {"two-cores", "two-cores-resident"})
FROM_PAPERS = {"a100-70b-16bit", "a100-70b-4bit", "l40-70b-16bit"}  # of whose systems only the products are calculated
ROW_STEP = 16
STEPS = [16, 32, 64, 80, *(rows for more in range(128, 1025, 128) for rows in (more, more + ROW_STEP)), 2048, 4096]
COMMAND = re.compile(r"`bough plan (\S+) ([^`]*)`")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-70B": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "meta-llama/Meta-Llama-3-8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


def calculated(name: str, source: str) -> tuple[dict[str, Any], SweepModel]:
    """Fields of the target of a profile, by the command in its source, and its sweeps; miss_seconds are of experts."""
    found = COMMAND.search(source)
    assert found is not None, source
    model, flags = found.groups()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        plan = make_plan(settings_from(argument_parser().parse_args(["plan", folder, *flags.split()])))
    sweep, fixed = plan.sweep, plan.placement.fixed
    fields = {"compute_curve": [[rows, _rounded(sweep.compute_seconds(rows))] for rows in STEPS], "row_step": ROW_STEP}
    if name not in FROM_PAPERS:
        fields["link_seconds"] = _rounded(max(sweep.link_seconds, sweep.disk_seconds))
        fields["miss_seconds"] = _rounded(sweep.expert_seconds)
        fields["kv_tokens"] = fixed.kv // plan.shapes.kv.row_bytes
    return fields, sweep


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def main() -> None:
    """Write the calculated fields."""
    for name in NAMES:
        file = Path(profile.__file__).parent / "profiles" / f"{name}.json"
        content = json.loads(file.read_text())
        fields, _ = calculated(name, content["source"])
        if (misses := fields.pop("miss_seconds", 0)) and "experts" in content["target"]:
            content["target"]["experts"]["miss_seconds"] = misses
        curve = json.dumps(fields["compute_curve"])
        content["target"] |= fields | {"compute_curve": "CURVE"}
        file.write_text(json.dumps(content, indent=2).replace('"CURVE"', curve) + "\n")
        print(name, {key: value for key, value in fields.items() if key != "compute_curve"})


if __name__ == "__main__":
    main()
