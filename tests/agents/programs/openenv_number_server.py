"""A server of OpenEnv: guess a number that `reset` chose; prints its port."""

import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

PING_S = 0.2  # an unanswered one closes the connection


class Guess(Action):
    number: str


class Hint(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, number=0, **others) -> Hint:
        self.number = number
        return Hint(text="Guess.", done=False)

    def step(self, action: Guess, **others) -> Hint:
        if action.number == str(self.number):
            return Hint(text="Right.", done=True, reward=1.0)
        return Hint(text="Wrong.", done=False, reward=0.0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=8)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(app, log_level="error", ws_ping_interval=PING_S, ws_ping_timeout=PING_S)
    uvicorn.Server(config).run(sockets=[listening])
