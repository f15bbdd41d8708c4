"""The loop of supervised fine-tuning: draw conversations, update, report. Every rank runs it."""

from megatron_dapo.config.derived import is_validation_step
from megatron_dapo.config.schema.config import Config
from megatron_dapo.sft_job import running_sft_job


def fine_tune(config: Config) -> bool:
    """Fine-tune for the whole run, or for what is left of it. Each rank calls this once.

    Return True when the last step is done. Return False where the run was asked to stop before its last step: then
    everything is saved, and the run can go on.
    """
    with running_sft_job(config) as job:
        start = job.checkpoints.restore()  # the steps that are done
        if is_validation_step(config, start):
            job.validate(start)
        with job.checkpoints:
            for step in range(start + 1, config.trainer.total_training_steps + 1):
                mini_batch = job.next_batch(step)  # fixed, then this rank gets its part of it
                metrics = job.update(step, mini_batch)  # one optimizer step
                job.log(step, metrics)
                if is_validation_step(config, step):
                    job.validate(step)
                job.save(step)  # where due
            job.finish()  # a signal that comes now does not end it
            return True
    return False  # asked to stop, after a step
