"""A taskset of verifiers with an environment of its own: its user says higher or lower."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]
ATTEMPTS = 3


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(ATTEMPTS - 1):
                if segment.terminated or segment.last_reply.strip() == str(task.data.number):
                    break
                segment = await interaction.turn("another number")
            won = float(segment.last_reply.strip() == str(task.data.number))
        interaction.trace.record_reward("won", won)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(10):
            yield GuessTask(GuessData(name=f"guess#{number}", prompt="Guess a number.", number=number))
