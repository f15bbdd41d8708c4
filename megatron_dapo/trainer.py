"""The loop: sample, score, update, push the weights, log. Every rank runs it; rank 0 has the
rollout."""

from megatron_dapo.config.derived import is_validation_step
from megatron_dapo.config.schema.config import Config
from megatron_dapo.job import running_job


def train(config: Config) -> bool:
    """Train for the rest of the run. Each rank calls this once, under torchrun or `launch.local`.

    Return True after the last step. Return False if the run was asked to stop earlier: then
    everything is saved, and the run can go on.
    """
    with running_job(config) as job:
        job.wait_for_rollout()
        start = job.checkpoints.restore()  # the finished steps
        job.push_weights(version=start)
        if is_validation_step(config, start) and not job.has_validated(start):
            job.begin_validation(start)
        with job.checkpoints:
            for step in range(start + 1, config.trainer.total_training_steps + 1):
                groups, metrics = job.next_batch(step)  # every group carries signal
                job.begin_training()  # on shared GPUs: the servers sleep
                shard = job.distribute(step, groups)  # mini-batches fixed, then cut by rank
                shard, score_metrics = job.score(step, shard)  # log-probs, values; advantages
                critic_metrics = job.update_critic(shard)  # if there is one
                actor_metrics = job.update_policy(step, shard)  # one optimizer step per mini-batch
                del shard  # its tensors would stay on the GPU while servers sample
                metrics = metrics | score_metrics | critic_metrics | actor_metrics
                with job.logged_if_lost(step, metrics, groups):
                    job.save_before_push(step, actor_metrics)  # if due, on shared GPUs
                    job.finish_validation()  # if under way: the next weights must not answer it
                    sync_metrics = job.push_weights(version=step)  # servers confirm the version
                perf_metrics = job.performance(groups, metrics)  # how well the ranks were used
                job.telemetry.log(step, metrics | sync_metrics | perf_metrics, groups)
                if is_validation_step(config, step):
                    job.begin_validation(step)  # while the next step is sampled and trained
                job.save(step, actor_metrics)  # if due
            job.finish_validation()
            job.finish()  # a signal now does not end it
            return True
    return False  # asked to stop, in the middle of a step or after one
