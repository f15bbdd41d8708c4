"""The charts of the page: their metrics and titles."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dapo.telemetry.closing_table import PHASE_TITLES

SHARE = "share of the groups"  # a section of metrics computed here from counts


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    note: str
    series: tuple[tuple[str, str], ...]
    """(metric, label); a metric in / / is a pattern, and the part in brackets is its label."""


CURVES = (
    Panel(
        "Reward",
        "Of all samples, kept or dropped; should rise.",
        (("reward/mean", "shaped"), ("reward/raw_mean", "raw"), ("train/reward_mean", "of the trained groups")),
    ),
    Panel(
        "Accuracy of the samples",
        "By the verifier, before shaping.",
        (("reward/accuracy", "all samples"), ("train/accuracy", "trained groups")),
    ),
    Panel(
        "Loss",
        "Of a run that fine-tunes on conversations: nats per token of the assistant.",
        (("train/loss", "training"), ("val/loss", "held out")),
    ),
    Panel(
        "Held-out accuracy by source",
        "With the weights after the step; step 0 is before the first.",
        (("val/accuracy", "all"), (r"/val\/(.*(?:accuracy|pass@|maj@|best@|mean@|avg@).*)/", "")),
    ),
    Panel(
        "Response length",
        "Tokens.",
        (
            ("response_length/mean", "mean"),
            ("response_length/max", "longest"),
            ("response_length/min", "shortest"),
            ("val/response_length_mean", "held-out, mean"),
        ),
    ),
    Panel(
        "Cut responses",
        "Share that did not end by themselves, and share of these that are judged right.",
        (("dapo/truncation_ratio", "cut"), ("reward/truncated_correct", "right")),
    ),
    Panel(
        "Entropy",
        "Nats per token. A fall to 0 while the accuracy does not rise is a collapse.",
        (("actor/entropy", "exact"), ("actor/entropy_sampled", "from the samples")),
    ),
    Panel(
        "Clip fractions",
        "Share of tokens at a bound of the ratio.",
        (
            ("actor/on_pg_clipfrac", "upper, A > 0"),
            ("actor/on_pg_clipfrac_lower", "lower, A < 0"),
            ("actor/dual_clipfrac", "dual clip"),
        ),
    ),
    Panel(
        "Server and trainer",
        "Distance of their log-probs for the same tokens, before the update. Near 0 while both hold the same weights.",
        (
            ("actor/rollout_abs_diff", "mean |difference|"),
            ("actor/rollout_kl", "KL (k1)"),
            ("actor/rollout_k3", "KL (k3)"),
            ("actor/rollout_abs_diff_all", "mean |difference|, older weights too"),
        ),
    ),
    Panel(
        "KL of the update",
        "From the policy before the step, and from the reference.",
        (("actor/ppo_kl", "from the old policy"), ("actor/kl_loss", "from the reference")),
    ),
    Panel(
        "Gradient norm",
        "Before clipping.",
        (("actor/grad_norm", "policy"), ("critic/grad_norm", "critic")),
    ),
    Panel(
        "Staleness",
        "Weight versions between a token and the step that trains on it.",
        (("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "largest")),
    ),
    Panel(
        "Filtered groups",
        "Share of the groups on which the filter decided: those without signal are dropped.",
        (
            (f"{SHARE}/filtered", "all"),
            (f"{SHARE}/all_correct", "all right"),
            (f"{SHARE}/all_incorrect", "all wrong"),
            (f"{SHARE}/uniform", "equal metric"),
        ),
    ),
    Panel(
        "Critic",
        "Explained variance of the returns, before the update.",
        (("critic/explained_variance", "explained variance"), ("critic/vf_loss", "value loss")),
    ),
)
UTILISATION = (
    Panel(
        "Servers and trainer at work",
        "Shares: of the servers' slots that had a request, of the trainer's time without waiting for samples, "
        "of the servers' KV cache.",
        (
            ("rollout/slots_used", "servers' slots"),
            (f"{SHARE}/trainer_busy", "trainer"),
            ("rollout/kv_used_mean", "KV cache"),
            ("perf/mfu/actor", "MFU of the update"),
        ),
    ),
    Panel(
        "Speed",
        "Tokens per second.",
        (("rollout/tokens_per_s", "generated"), ("perf/throughput", "trained, per rank")),
    ),
)
PHASES = (*PHASE_TITLES.items(), ("other", "other"))


def derived(record: dict) -> dict[str, float]:
    """Return the shares for panels that records hold as counts, or as their complements."""
    shares: dict[str, float] = {}
    waiting = record.get("perf/trainer_waiting")
    if waiting is not None:
        shares[f"{SHARE}/trainer_busy"] = 1.0 - waiting
    num_filtered = record.get("dapo/num_filtered_groups")
    num_groups = (num_filtered or 0.0) + (record.get("dapo/num_kept_groups") or 0.0)
    if num_filtered is not None and num_groups:
        shares[f"{SHARE}/filtered"] = num_filtered / num_groups
        for reason in ("all_correct", "all_incorrect", "uniform"):
            shares[f"{SHARE}/{reason}"] = (record.get(f"dapo/filtered_{reason}") or 0.0) / num_groups
    return shares


def drawn(panels: Iterable[Panel], metrics: Iterable[str]) -> list[dict]:
    """Return the panels with the series that some run has, in the page's format; empty ones are
    left out. Metrics without a panel are not drawn, but can be chosen on the page."""
    names = sorted(metrics)
    shown = []
    for panel in panels:
        series = {metric: label for metric, label in panel.series if metric in names}
        for metric, _ in panel.series:
            if metric.startswith("/"):
                matches = ((name, re.fullmatch(metric.strip("/"), name)) for name in names)
                series |= {name: match[1] for name, match in matches if match and name not in series}
        if series:
            shown.append({"title": panel.title, "note": panel.note, "series": [*map(list, series.items())]})
    return shown
