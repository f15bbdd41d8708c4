"""The loop of supervised fine-tuning: draw conversations, update, log. Every rank runs it."""

from megatron_dapo.config.derived import is_validation_step
from megatron_dapo.config.schema.config import Config
from megatron_dapo.sft_job import running_sft_job


def fine_tune(config: Config) -> bool:
    """Fine-tune for the rest of the run. Each rank calls this once.

    Return True after the last step. Return False if the run was asked to stop earlier: then
    everything is saved, and the run can go on.
    """
    with running_sft_job(config) as job:
        start = job.checkpoints.restore()  # the finished steps
        if is_validation_step(config, start):
            job.validate(start)
        with job.checkpoints:
            for step in range(start + 1, config.trainer.total_training_steps + 1):
                mini_batch = job.next_batch(step)  # fixed, then cut into the ranks' parts
                metrics = job.update(step, mini_batch)  # one optimizer step
                job.log(step, metrics)
                if is_validation_step(config, step):
                    job.validate(step)
                job.save(step)  # if due
            job.finish()  # a signal now does not end it
            return True
    return False  # asked to stop, after a step
