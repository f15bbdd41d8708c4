"""SGLang plug-in: a paused scheduler waits for the next request, as an idle one does; SGLang's asks
without a break."""

TARGET = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"


def sleep_when_paused(original, scheduler):
    """Sleep while the engine is paused. The original only counts the time, in each turn of a busy
    loop for requests."""
    original(scheduler)
    scheduler.maybe_sleep_on_idle()


def register():
    """Called by SGLang once, before it forks its processes, which inherit the change."""
    from replacing import run_inside

    run_inside(TARGET, sleep_when_paused)
