"""docs/metrics.md has every metric that the program reports, and no other."""

import re
from pathlib import Path

import pytest

from megatron_dapo.rollout.agent_metrics import AgentMetrics

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
SECTIONS = "actor|agent|critic|dapo|data|perf|prompt_length|replay|response_length|reward|rollout|train|val|weight_sync"

# metrics with names put together by the code
MADE_FROM_PARTS = {
    "agent/NAME",
    "val/SOURCE/accuracy",
    "data/FILE/epoch",
    "rollout/factor/SERVER",
    "rollout/seats/SERVER",
    "weight_sync/PHASE_s",
    "weight_sync/HELD_gb",
    "perf/max_memory_allocated_gb/ppN",
    "perf/max_memory_reserved_gb/ppN",
}


def reported() -> set[str]:
    """Names as they stand in the code, and those of agents, as they are taken."""
    files = (ROOT / "megatron_dapo").rglob("*.py")
    agents = AgentMetrics()
    agents.add({}, {"tool_s": 1.0})
    return {*agents.take()} | {
        name for file in files for name in re.findall(rf'"((?:{SECTIONS})(?:/\w+)+|exp_mask_ratio)"', file.read_text())
    }


def documented() -> set[str]:
    """In a table the first cells name metrics; a name without a section has that
    of the one before it."""
    names = set()
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## All of them")[2].splitlines():
        section = ""
        for name in re.findall(r"`([\w/]+)`", line.split(" | ")[0]):
            section = name.rpartition("/")[0] or section
            names.add(name if "/" in name or not section else f"{section}/{name}")
    return {name for name in names if re.fullmatch(rf"(?:{SECTIONS})(?:/\w+)+|exp_mask_ratio", name)}


def test_the_page_has_every_metric_and_no_other():
    assert documented() - MADE_FROM_PARTS == reported()
    assert len(documented()) > 70
