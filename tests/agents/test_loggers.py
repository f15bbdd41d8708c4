"""The real clients of MLflow and Weights & Biases, without their services: a run's records arrive."""

import json
import os
import subprocess
import sysconfig
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dapo.telemetry.sample_table import COLUMNS
from tests.agents.environments import PROGRAM_S, PROGRAMS, python_of
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.e2e

PACKAGES = sysconfig.get_path("purelib")


def record(step: int, is_validation: bool = False, **metrics: float) -> dict:
    return {"step": step, "metrics": metrics, "is_validation": is_validation}


class Writer:
    """write_records.py with a folder; call it with a record, get the answer."""

    def __init__(self, logger: str, folder: Path, resumed_after: str = "", **environment: str) -> None:
        environment |= {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "PYTHONPATH": str(REPOSITORY)}
        self.program = subprocess.Popen(
            [python_of("loggers"), PROGRAMS / "write_records.py", logger, folder, PACKAGES, resumed_after],
            env=environment,
            cwd=folder.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start = self.answer()

    def __call__(self, record: dict) -> str:
        self.say(json.dumps(record))
        return self.answer()

    def say(self, line: str) -> None:
        self.program.stdin.write(line + "\n")
        self.program.stdin.flush()

    def answer(self) -> str:
        for line in self.program.stdout:
            assert "secret" not in line
            if line.startswith('"'):  # else a client's own
                return json.loads(line)
        raise AssertionError("the program has ended")

    def close(self) -> str:
        self.program.stdin.close()
        answer = self.answer()
        assert self.program.wait(PROGRAM_S) == 0
        return answer

    def crash(self) -> None:
        self.say("crash")
        self.program.wait(PROGRAM_S)


def read(program: str, *arguments: str | Path) -> list | dict:
    done = subprocess.run(
        [python_of("loggers"), PROGRAMS / program, *arguments], capture_output=True, text=True, timeout=PROGRAM_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_for_points(folder: Path, number: int) -> None:
    """A thread of the program writes them."""
    (points,) = folder.glob("mlflow/*/*/metrics/reward/mean")
    deadline = time.monotonic() + PROGRAM_S
    while len(points.read_text().splitlines()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_mlflow_has_every_metric_of_a_run_that_went_on_twice(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    hard = {"val/aime/pass@8": float("nan"), "reward/math-ai/../5%/mean": 1.0}
    for number, resumed_after in enumerate(("", "1", "2")):
        write = Writer("mlflow", folder, resumed_after)
        assert write.start == "OK"
        assert write(record(2, **{"reward/mean": number / 2, "time/rollout": 2.0})) == "OK"
        assert write(record(2, is_validation=True, **{"time/rollout": 3.0}, **hard)) == "OK"
        if number == 1:
            wait_for_points(folder, 2)
            write.crash()
            assert read("read_mlflow.py", (folder / "mlflow").as_uri())[0]["status"] == "RUNNING"
        else:
            assert write.close() == "OK"
    (run,) = read("read_mlflow.py", (folder / "mlflow").as_uri())
    assert (run["name"], run["status"], run["id"]) == ("mine", "FINISHED", (folder / "mlflow_id").read_text())
    assert run["params"]["trainer.logger"] == "['mlflow']" and len(run["params"]) > 200
    metrics = run["metrics"]
    assert metrics["reward/mean"] == [[2, "0.0"], [2, "0.5"], [2, "1.0"]]
    assert metrics["val/aime/pass_at_8"][0] == [2, "nan"]
    assert {*metrics} == {
        "reward/mean",
        "time/rollout",
        "time_validation/rollout",
        "val/aime/pass_at_8",
        "reward/math-ai/_/5_/mean",
    }
    write = Writer("mlflow", folder)
    assert write.close() == "OK" and len(read("read_mlflow.py", (folder / "mlflow").as_uri())) == 2


class Server(ThreadingHTTPServer):
    """The calls of MLflow's server that a run needs. With the gate closed they wait; a failing
    server hangs up."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Calls)
        self.gate, self.has_waiting, self.is_failing = threading.Event(), threading.Event(), False
        self.gate.set()
        self.steps: list[int] = []
        self.statuses: list[str] = []


class Calls(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: dict) -> None:
        if not self.server.gate.is_set():
            self.server.has_waiting.set()
            assert self.server.gate.wait(PROGRAM_S)
        if self.server.is_failing:
            self.close_connection = True
            return
        run = {"info": {"run_id": "abc", "experiment_id": "1"}, "data": {}}
        match self.path.partition("/mlflow/")[2].partition("?")[0]:
            case "experiments/create":
                self.reply(200, {"experiment_id": "1"})
            case "runs/create" | "runs/get":
                self.reply(200, {"run": run})
            case "runs/log-batch":
                self.server.steps += [int(metric["step"]) for metric in body.get("metrics", ())]
                self.reply(200, {})
            case "runs/update":
                self.server.statuses.append(body["status"])
                self.reply(200, {"run_info": run["info"]})
            case _:
                self.reply(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": ""})

    def reply(self, status: int, answer: dict) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def server():
    with Server() as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        try:
            yield served
        finally:
            served.gate.set()
            served.shutdown()


def at(served: Server) -> dict[str, str]:
    return {
        "MLFLOW_TRACKING_URI": f"http://me:secret@127.0.0.1:{served.server_port}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }


def test_no_step_waits_for_a_server_and_one_that_comes_back_gets_every_record_in_order(tmp_path):
    with server() as served:
        write = Writer("mlflow", tmp_path, **at(served))
        assert write.start == "OK"
        served.gate.clear()
        assert write(record(1, x=1.0)) == "OK"
        assert served.has_waiting.wait(PROGRAM_S)
        assert write(record(2, x=1.0)) == "OK"
        served.is_failing = True
        served.gate.set()
        last = 2
        while (answer := write(record(last + 1, x=1.0))) == "OK":
            last += 1
            time.sleep(0.01)  # a thread of the program meets the failure
        assert "MLFLOW_TRACKING_URI" in answer
        served.is_failing = False
        write(record(last + 2, x=1.0))
        assert write.close() == "OK"
    assert served.steps == [*range(1, last + 3)] and served.statuses[-1] == "FINISHED"


def test_a_server_that_is_not_there_is_one_sentence_without_its_password(tmp_path):
    with server() as served:
        served.is_failing = True
        write = Writer("mlflow", tmp_path, **at(served))
    assert "trainer.logger has mlflow, which cannot be started" in write.start
    assert "correct MLFLOW_TRACKING_URI" in write.start and not (tmp_path / "mlflow_id").exists()


def test_a_database_without_its_package_is_one_sentence(tmp_path):
    write = Writer("mlflow", tmp_path, MLFLOW_TRACKING_URI="sqlite:///mlflow.db")
    assert "cannot be started" in write.start and "leave mlflow out" in write.start and "\n" not in write.start


def test_weights_and_biases_gets_metrics_and_samples_under_their_own_names(tmp_path):
    for resumed_after in ("", "1"):  # a resumed run goes on as the same one
        write = Writer("wandb", tmp_path, resumed_after, WANDB_MODE="offline", WANDB_SILENT="true")
        assert write.start == "OK"
        assert write(record(2, **{"reward/mean": 0.5, "time/rollout": 2.0})) == "OK"
        assert write(record(2, is_validation=True, **{"val/accuracy": 0.75, "val/aime/pass@8": 1.0})) == "OK"
        assert write.close() == "OK"
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one id"
    for file in files:
        run = read("read_wandb.py", file)
        step, validation = run["history"]
        assert (step["step"], step["reward/mean"], step["time/rollout"]) == (2, 0.5, 2.0)
        assert (validation["step"], validation["val/accuracy"], validation["val/aime/pass@8"]) == (2, 0.75, 1.0)
        assert (step["samples._type"], step["samples.nrows"]) == ("table-file", 8)
        table = json.loads((file.parent / "files" / step["samples.path"]).read_text(encoding="utf-8"))
        assert table["columns"] == list(COLUMNS) and len(table["data"]) == 8
        assert ["*", "step"] in run["axes"]
