"""The sizer selected by an orchestrator's settings."""

from __future__ import annotations

from bough.config.processes import OrchestratorConfig
from bough.trees.tree_plan import BestFirst
from orchestrator.sizing.fixed_sizer import FixedSizer
from orchestrator.sizing.plans import Sizer
from orchestrator.sizing.tree_sizer import TreeSizer


def configured_sizer(config: OrchestratorConfig) -> Sizer:
    """A FixedSizer or a TreeSizer, as --planner says."""
    size = BestFirst(config.budget, config.width, config.depth)
    if config.planner == "fixed":
        return FixedSizer(size, config.sweep_nodes)
    return TreeSizer(size, config.max_depth)
