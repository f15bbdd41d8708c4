"""SGLang plug-in: a paused scheduler waits for the next request, as an idle one does; SGLang's asks without a break."""

TARGET = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"


def sleep_when_paused(original, scheduler):
    """The original only counts the time. It is called in each turn of a loop that looks for requests and, while the
    engine is paused, does nothing else."""
    original(scheduler)
    scheduler.maybe_sleep_on_idle()


def register():
    """SGLang calls this once, before it makes its processes: as forks they inherit what is changed."""
    from replacing import run_inside

    run_inside(TARGET, sleep_when_paused)
