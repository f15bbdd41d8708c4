"""The services of trainer.logger, with modules in the place of the real clients, which
tests/agents/test_loggers.py has."""

import math
import os
import sys
from dataclasses import replace

import pytest

from megatron_dapo.checks.run_checks import validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.config.loader import load_config
from megatron_dapo.storage.run_folder import RunFolder
from megatron_dapo.telemetry.telemetry import Telemetry
from tests.synthetic import synthetic_groups

pytestmark = pytest.mark.unit


def groups_of_20() -> list:
    [group] = synthetic_groups(14, num_groups=1, n=20)
    samples = [replace(sample, response_text="</code>\n\n# I am a heading", reward=0.5) for sample in group.samples]
    return [replace(group, samples=tuple(samples))]


WANDB = """
from types import SimpleNamespace

class Error(Exception):
    pass

errors, calls, Table = SimpleNamespace(Error=Error), [], SimpleNamespace

def init(**given):
    if given["name"] == "nobody":
        raise Error("no API key")
    calls.append(("init", given))
    add = lambda name: lambda *values, **more: calls.append((name, *values, more))
    return SimpleNamespace(log=add("log"), define_metric=add("define_metric"), finish=add("finish"))
"""


def test_weights_and_biases_gets_the_scalars_and_a_resumed_run_goes_on_as_the_same(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    config = load_config(None, ["trainer.logger=[wandb]", "trainer.experiment_name=mine"])
    for resumed_after in (None, 1, None):
        log = Telemetry(config, RunFolder(tmp_path / "run"), resumed_after)
        log.log(2, {"reward/mean": 0.5}, groups_of_20())
        log.log_validation(2, {"val/accuracy": 0.75})
        log.close()
    calls = sys.modules.pop("wandb").calls
    begun = [call[1] for call in calls if call[0] == "init"]
    assert begun[0]["id"] == begun[1]["id"] != begun[2]["id"] and {each["resume"] for each in begun} == {"allow"}
    assert (begun[0]["project"], begun[0]["name"]) == ("megatron_dapo", "mine")
    assert begun[0]["config"]["trainer"]["logger"] == ["wandb"]
    logged = [{k: x for k, x in call[1].items() if "time" not in k} for call in calls if call[0] == "log"]
    tables = [each.pop("samples") for each in logged if "samples" in each]
    assert len(tables) == 3 and len(tables[0].data) == 16
    row = dict(zip(tables[0].columns, tables[0].data[0], strict=True))
    assert (row["step"], row["text"], row["reward"]) == (2, "</code>\n\n# I am a heading", 0.5)
    assert logged[:2] == [{"step": 2, "reward/mean": 0.5}, {"step": 2, "val/accuracy": 0.75}]
    assert ("define_metric", "*", {"step_metric": "step"}) in calls and calls[-1] == ("finish", {})

    with pytest.raises(UserError, match=r"no API key.*WANDB_MODE=offline"):
        Telemetry(load_config(None, ["trainer.logger=[wandb]", "trainer.experiment_name=nobody"]), RunFolder(tmp_path))
    sys.modules.pop("wandb")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_without_its_package_is_refused_before_the_run(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"logger has {name}, which is not installed; pip install -e '.\[{name}\]'"):
        validate(load_config(None, [f"trainer.logger=[{name}]"]), None, check_files=False)


MLFLOW = """
import os
from types import SimpleNamespace

entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
calls = []

class MlflowClient:
    def __init__(self, uri):
        calls.append(("client", uri, os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]))

    def __getattr__(self, name):
        def call(*values, **more):
            calls.append((name, *values, more))
            return SimpleNamespace(experiment_id="1", info=SimpleNamespace(run_id="abc"))
        return call
"""


def test_mlflow_gets_the_config_in_one_call_and_each_record_in_names_that_it_takes(tmp_path, monkeypatch):
    (tmp_path / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(os, "environ", {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5"})
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    config = load_config(None, ["trainer.logger=[mlflow]", "trainer.experiment_name=mine"])
    sent_names = ["val/pass@8", "reward/a//b/mean", "reward/../mean", "data/50%/é", "x" * 300]
    for resumed_after in (None, 2):
        log = Telemetry(config, RunFolder(tmp_path / "run"), resumed_after)
        log.log(3, dict.fromkeys(sent_names, math.nan))
        log.close()
    calls = sys.modules.pop("mlflow").calls
    assert calls[0] == ("client", f"file://{tmp_path}/run/mlflow", "5"), "the user's own variables stay"
    batches = [call for call in calls if call[0] == "log_batch"]
    (config_call, *records) = batches
    parameters = dict(config_call[2]["params"])
    assert parameters["trainer.experiment_name"] == "mine" and len(records) == 2
    names = ["val/pass_at_8", "reward/a/_/b/mean", "reward/_/mean", "data/50_/é", "x" * 250]
    for _, run, points, _ in records:
        assert run == "abc" and [name for name, *_ in points if "time" not in name] == names
        assert {step for *_, step in points} == {3}
    assert [call[0] for call in calls].count("create_run") == 1
    assert calls[-1][:3] == ("set_terminated", "abc", "FINISHED")
