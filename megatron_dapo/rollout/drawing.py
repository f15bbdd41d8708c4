"""The draws of a run: its prompts, the queue of groups, the pool of experiences; saved as one."""

import logging
from collections.abc import Callable

from megatron_dapo.common.errors import UserError
from megatron_dapo.config.schema.config import Config
from megatron_dapo.data.prompt_cursor import make_cursor
from megatron_dapo.data.prompt_dataset import PromptDataset
from megatron_dapo.data.samples import Prompt, Sample
from megatron_dapo.queue.experience_replay import make_pool
from megatron_dapo.queue.group_filter import make_queue
from megatron_dapo.queue.prompt_draws import PromptDraws
from megatron_dapo.queue.step_statistics import RolloutStep
from megatron_dapo.rollout.verdicts import VerdictCheck

log = logging.getLogger(__name__)


class Drawing:
    """Draws prompts and decides on their groups.

    `begin` -> `next_prompt` and the queue's methods, `decide` after each finished group -> `take`.
    If too few responses got a verdict, it returns to its state after the last step.
    """

    def __init__(self, config: Config, dataset: PromptDataset, last_traceback: Callable[[], str]) -> None:
        """Start at the first prompt. last_traceback: of the reward function, for error messages."""
        self._prompts = dataset.prompts
        self._reward = config.reward
        self._last_traceback = last_traceback
        self.queue = make_queue(config)
        self.pool = make_pool(config)
        self._cursor = make_cursor(config.data, dataset)
        self._draws = PromptDraws(self._cursor, self.pool, self.queue.limits.gen_batch_size)
        self._verdict_check: VerdictCheck | None = None
        # after the last step, or as loaded; without the samples of open groups, which it would keep
        # alive
        self._state_before_step: dict | None = None

    def begin(self, step: int, weight_version: int) -> None:
        """Ask for a step, with its weights; called again after a push."""
        if self._state_before_step is None:
            self._state_before_step = self._state_of_draws(with_open_samples=False)
            self._forget_without_verdicts(step)
        self.queue.begin(step, weight_version)

    def next_prompt(self) -> tuple[Prompt, Sample | None]:
        """Return the next prompt, with a trajectory for its group to borrow, if any."""
        number, replayed = self._draws.next()
        return self._prompts[number], replayed

    def metrics(self) -> dict[str, float]:
        """Return the epochs drawn so far, for each file of a mixture."""
        return {f"data/{name}": epochs for name, epochs in self._cursor.passes().items()}

    def decide(self, is_waited_for: bool) -> None:
        """Have the queue decide on finished groups. is_waited_for: the trainer waits for the step.

        Groups with too few verdicts are not decided on yet, so that a saved state can sample them
        again. Further groups show whether the function is to blame.

        Raises UserError if a whole wave, or a step's number of groups, has too few. The draws since
        the last step are repeated once the function is corrected.
        """
        check = self._verdict_check
        assert check is not None, "begin() comes first"
        seen = check.after(self.queue.finished_head)
        if seen.are_too_few():
            limits = self.queue.limits
            if seen.num_groups >= limits.train_batch_size or not limits.max_staleness:
                self._go_back()
                seen.check(self._last_traceback())
            if self.queue.num_unfinished or not is_waited_for:
                return
        groups = self.queue.decide()
        for group in groups:
            written = [sample.correct for sample in group.samples if not sample.exp_mask]
            if written:
                self._cursor.note_rate(group.prompt.index, sum(written) / len(written))
        self._verdict_check = check.after(groups)
        if self.pool is not None:
            self.pool.record(groups)

    def take(self) -> RolloutStep:
        """End the ready step and return it."""
        step = self.queue.take()
        self._state_before_step = self._state_of_draws(with_open_samples=False)
        self._renew_verdict_check(step.number + 1)
        if self.pool is not None:
            self.pool.end_step(self._draws.replayed_later)
        return step

    def state_dict(self, with_samples: bool = True) -> dict:
        """Return plain data: the place in the prompts, ready and open groups, the experiences.

        with_samples: False leaves out the samples ahead of the trainer; their prompts are sampled
        again.
        """
        pool = {} if self.pool is None else {"experiences": self.pool.state_dict()}
        return {**self._state_of_draws(with_samples), **pool}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved drawing.

        Raises UserError for a state of trainer.replay, which has no prompts.
        """
        if "replay" in state:
            raise UserError(
                f"the checkpoint is of a replay of {state['replay']}, which drew no prompts to go on from; resume it "
                f"with trainer.replay, or from a checkpoint of a run with servers."
            )
        self._draws.load_state_dict(state)
        self.queue.load_state_dict(state["queue"])
        if self.pool is not None and "experiences" in state:
            self.pool.load_state_dict(state["experiences"])
        self._state_before_step = None
        self._verdict_check = None

    def _state_of_draws(self, with_samples: bool = True, with_open_samples: bool = True) -> dict:
        return {**self._draws.state_dict(), "queue": self.queue.state_dict(with_samples, with_open_samples)}

    def _go_back(self) -> None:
        """Return to the state after the last step.

        The pool took in only groups of earlier steps.
        """
        assert self._state_before_step is not None, "begin() comes first"
        self.load_state_dict(self._state_before_step)
        if self.pool is not None:
            self.pool.forget_step(self._draws.replayed_later)

    def _renew_verdict_check(self, step: int) -> None:
        """Count verdicts anew after a whole step's: few responses say little about the function."""
        if self._verdict_check is None or self._verdict_check.num_groups >= self.queue.limits.train_batch_size:
            self._verdict_check = VerdictCheck(self._reward, "")
        self._verdict_check.what = f"rollout step {step}"

    def _forget_without_verdicts(self, step: int) -> None:
        """Sample a saved state's open groups again if too few of their responses got a verdict.

        Perhaps the run was stopped because of them, and the function corrected.
        """
        self._renew_verdict_check(step)
        if VerdictCheck(self._reward, "").after(self.queue.open_groups).are_too_few():
            log.warning(
                "rollout step %d: too few responses of the saved state's groups got a verdict; the groups are sampled "
                "again",
                step,
            )
            self.queue.forget_samples()
