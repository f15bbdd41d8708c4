"""PPO of examples/classic_control beside the one of stable-baselines3, on CartPole-v1.

Budget of environment steps, seeds, network sizes and settings are the same. Reported are the return
of 100 fresh episodes and the seconds of processor time. Beside them stand the env steps until the
last 100 training episodes first returned 475 on average.

stable-baselines3 goes into a folder of its own, not into .venv:

    .venv/bin/python -m pip install --no-deps -t DIR -r benchmarks/requirements_classic_control.txt
    PYTHONPATH=DIR .venv/bin/python benchmarks/bench_classic_control.py
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.measure import timed
from benchmarks.provider import UnavailableError, need
from benchmarks.report import plain_table, written
from examples.classic_control.train import CARTPOLE, ENV_STEPS, ENVIRONMENT, SOLVED, evaluate, play, training

CPU = torch.device("cpu")


def ours(num_env_steps: int, seed: int) -> tuple[list[float], int | None]:
    """Return (returns of 100 fresh episodes, env steps until solved)."""
    solved_at = None
    for progress in training(ENVIRONMENT, CARTPOLE, num_env_steps, seed):
        solved_at = solved_at or _if_solved(progress.recent, progress.env_steps)
    return evaluate(progress.state, ENVIRONMENT, CARTPOLE), solved_at


def stable_baselines3(num_env_steps: int, seed: int) -> tuple[list[float], int | None]:
    """Return the same of stable-baselines3, with our settings in its words.

    vf_coef: its value loss has no 1/2. Its own: advantages are whitened per mini-batch.
    """
    sb3, common = need("stable_baselines3"), need("stable_baselines3.common.env_util")
    callbacks = need("stable_baselines3.common.callbacks")

    class Watch(callbacks.BaseCallback):
        solved_at, recent = None, ()

        def _on_step(self) -> bool:
            finished = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            self.recent = [*self.recent, *finished][-100:]
            return True

        def _on_rollout_end(self) -> None:
            self.solved_at = self.solved_at or _if_solved(self.recent, self.num_timesteps)

    config, watch = CARTPOLE, Watch()
    model = sb3.PPO(
        "MlpPolicy",
        common.make_vec_env(ENVIRONMENT, config.num_envs, seed=seed),
        learning_rate=config.lr,
        n_steps=config.n_steps,
        batch_size=config.n_steps * config.num_envs // config.n_minibatches,
        n_epochs=config.n_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_eps,
        clip_range_vf=config.clip_eps,
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef / 2,
        max_grad_norm=config.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": list(config.hidden_sizes), "vf": list(config.hidden_sizes)}},
        seed=seed,
        device="cpu",
    )
    per_rollout = config.n_steps * config.num_envs
    model.learn(num_env_steps // per_rollout * per_rollout, callback=watch)
    return play(lambda obs: model.predict(obs.numpy())[0].tolist(), ENVIRONMENT), watch.solved_at


def _if_solved(recent: Sequence[float], env_steps: int) -> int | None:
    return env_steps if len(recent) == 100 and statistics.mean(recent) >= SOLVED else None


IMPLEMENTATIONS = {"ours": ours, "stable-baselines3": stable_baselines3}


def main(arguments: Sequence[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 2048 steps: does it run?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--env-steps", type=int, default=ENV_STEPS, help="of all environments together")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    seeds, num_env_steps = ([0], 2048) if options.quick else (options.seeds, options.env_steps)
    torch.set_num_threads(1)
    rows, skipped = [], []
    for name, implementation in IMPLEMENTATIONS.items():
        try:
            for seed in seeds:
                (returns, solved_at), seconds = timed(CPU, lambda f=implementation, s=seed: f(num_env_steps, s))
                row = {"implementation": name, "seed": seed, "mean_return": statistics.mean(returns)}
                rows.append(row | {"least_return": min(returns), "solved_at": solved_at, "seconds": seconds})
        except UnavailableError as reason:
            skipped.append({"provider": name, "reason": str(reason)})
    show(rows, num_env_steps)
    for left_out in skipped:
        print(f"not measured: {left_out['provider']} ({left_out['reason']}); the head of this file says how to get it")
    result = {"environment": ENVIRONMENT, "env_steps": num_env_steps, "config": asdict(CARTPOLE), "rows": rows}
    others = {row["implementation"] for row in rows} - {"ours"}
    packages = {package: metadata.version(package) for package in ("gymnasium", *others)}
    return written("classic_control", CPU, [result], options.json, skipped=skipped, packages=packages)


def show(rows: Sequence[dict], num_env_steps: int) -> None:
    title = f"{ENVIRONMENT}, {num_env_steps} environment steps, one thread"
    columns = ("", "seed", "mean return of 100", "least", "475 in training after", "seconds")
    table = plain_table(title, columns)
    for row in rows:
        solved_at = "-" if row["solved_at"] is None else str(row["solved_at"])
        cells = (f"{row['mean_return']:.1f}", f"{row['least_return']:.0f}", solved_at, f"{row['seconds']:.1f}")
        table.add_row(row["implementation"], str(row["seed"]), *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
