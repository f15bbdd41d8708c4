"""Waits for the servers of all nodes: their health, and the life of their starters."""

import time
from collections.abc import Callable
from functools import partial

from launch.slurm.node import ends
from launch.slurm.plan import SERVERS, JobPlan
from megatron_dapo.servers.server_health import HealthCheck, is_healthy
from megatron_dapo.storage.server_key import key_header, read_server_key

POLL_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0


def wait_for_servers(plan: JobPlan, probe: Callable[[str], bool] | None = None) -> str | None:
    """Wait; return None when all are healthy, else who is not, in one sentence. Tells each that
    becomes healthy."""
    if probe is None:
        headers = key_header(read_server_key(plan.server_key_file))
        probe = partial(is_healthy, check=HealthCheck.GENERATES, headers=headers, timeout_s=PROBE_TIMEOUT_S)
    started = time.monotonic()
    missing = [*plan.server_urls, *([plan.reward_model_url] if plan.reward_model_url else [])]
    while True:
        for url in [url for url in missing if probe(url)]:
            missing.remove(url)
            print(f"  {url} is healthy after {time.monotonic() - started:.0f} s", flush=True)
        if not missing:
            return None
        if ended := ends(plan, SERVERS):
            return f"the servers of {', '.join(ended)} ended before all were healthy"
        if time.monotonic() - started > plan.server_timeout_s:
            return f"not healthy within {plan.server_timeout_s:g} s: {', '.join(missing)}"
        time.sleep(POLL_INTERVAL_S)
