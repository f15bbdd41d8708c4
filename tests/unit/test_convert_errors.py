"""A converter given something wrong says so in a sentence, exits with 2, and leaves no output."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import hf_to_megatron, megatron_to_hf, verify_checkpoint
from checkpoints_tools.job import choose_sizes, run, torchrun_variables
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.spec_reader import read_model_spec
from megatron_dapo.platform.agreement import SingleRank
from megatron_dapo.storage.file_lock import FileLock
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A small model in several files."""
    from transformers import AutoModelForCausalLM

    path = make_tiny(tmp_path_factory.mktemp("source") / "model", "qwen2", vocab=67, layers=2)
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="150KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "checkpoint"
    assert hf_to_megatron.main(["--hf-model", str(source), "--output", str(out)]) == 0
    return out


@pytest.fixture
def model(source, tmp_path) -> Path:
    return shutil.copytree(source, tmp_path / "model")


def first_file(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


def change_config(model: Path, **changes) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(model: Path, change) -> None:
    """In the first file; the index follows."""
    file, index = first_file(model), model / "model.safetensors.index.json"
    tensors = load_file(file)
    content = json.loads(index.read_text())
    for name in tensors:
        del content["weight_map"][name]
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    content["weight_map"] |= dict.fromkeys(tensors, file.name)
    index.write_text(json.dumps(content))


def lose_a_file(model: Path) -> None:
    first_file(model).unlink()


def cut_a_file(model: Path) -> None:
    first_file(model).write_bytes(first_file(model).read_bytes()[:-100])


def add_a_tensor(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.zeros(3)}))


def lose_a_tensor(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.pop("model.embed_tokens.weight"))


def half_precision(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))


# the damage done to the source, and the words of the sentence
MISTAKES = {
    "another width": (lambda m: change_config(m, hidden_size=32, head_dim=16), ["of another shape", "embed_tokens"]),
    "too few layers": (lambda m: change_config(m, num_hidden_layers=1), ["unexpected", "model.layers.1."]),
    "too many layers": (lambda m: change_config(m, num_hidden_layers=3), ["missing", "model.layers.2."]),
    "tied by mistake": (lambda m: change_config(m, tie_word_embeddings=True), ["tie_word_embeddings", "lm_head"]),
    "another family": (lambda m: change_config(m, architectures=["MixtralForCausalLM"]), ["MixtralForCausalLM"]),
    "no config": (lambda m: (m / "config.json").unlink(), ["--hf-model", "config.json"]),
    "broken config": (lambda m: (m / "config.json").write_text("{"), ["--hf-model", "config.json"]),
    "missing shard": (lose_a_file, ["--hf-model", "model-00001-of"]),
    "cut shard": (cut_a_file, ["model-00001-of", "bytes"]),
    "extra tensor": (add_a_tensor, ["1 unexpected", "model.layers.0.mlp.extra.weight"]),
    "missing tensor": (lose_a_tensor, ["1 missing", "model.embed_tokens.weight"]),
    "mixed types": (half_precision, ["F16", "F32", "--dtype fp32"]),
    "no weights": (lambda m: [f.unlink() for f in m.glob("*.safetensors*")], ["--hf-model", ".safetensors"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_source_is_refused(model, tmp_path, capsys, mistake):
    make, words = MISTAKES[mistake]
    make(model)
    out = tmp_path / "out"
    assert hf_to_megatron.main(["--hf-model", str(model), "--output", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("1 mistake to correct:") and len(said.strip().splitlines()) == 2
    assert all(word in said for word in words), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_experts_that_are_missing_or_too_many_are_listed(tmp_path, capsys):
    path = make_tiny(tmp_path / "model", "qwen3_moe", vocab=67, layers=1, num_experts=4)
    file = path / "model.safetensors"
    tensors = load_file(file)
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight"
    tensors[expert.format(4)] = tensors.pop(expert.format(3))
    save_file(tensors, file, {"format": "pt"})
    assert hf_to_megatron.main(["--hf-model", str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "1 missing" in said and expert.format(3) in said
    assert "1 unexpected" in said and expert.format(4) in said
    assert outputs(tmp_path) == ["model"]


def test_tables_of_old_checkpoints_are_left_out_and_reported(model, tmp_path, capsys):
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for layer in range(2)}
    change_tensors(model, lambda tensors: tensors.update(tables))
    assert hf_to_megatron.main(["--hf-model", str(model), "--output", str(tmp_path / "out")]) == 0
    said = "left out: 2 tensors (model.layers.0.self_attn.rotary_emb.inv_freq ...), tables of rotary embeddings"
    assert said in capsys.readouterr().out
    assert megatron_to_hf.main(["--checkpoint", str(tmp_path / "out"), "--output", str(tmp_path / "back")]) == 0
    assert not any("inv_freq" in name for file in (tmp_path / "back").glob("*.safetensors") for name in load_file(file))


def outputs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def converters(source: Path, converted: Path) -> dict:
    return {
        "hf_to_megatron": (hf_to_megatron.main, ["--hf-model", str(source)]),
        "megatron_to_hf": (megatron_to_hf.main, ["--checkpoint", str(converted)]),
    }


@pytest.mark.parametrize("tool", ["hf_to_megatron", "megatron_to_hf"])
def test_a_disk_that_cannot_be_written_leaves_nothing(source, converted, tmp_path, capsys, monkeypatch, tool):
    main, arguments = converters(source, converted)[tool]
    (tmp_path / "file").touch()
    # a file in place of a folder, and a file system that refuses, also for the superuser
    for out in (tmp_path / "file" / "out", Path("/proc/out")):
        assert main([*arguments, "--output", str(out)]) == 2
        assert str(out) in capsys.readouterr().err
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 1000)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert " kB, its disk has 1.00 kB left" in capsys.readouterr().err
    assert outputs(tmp_path) == ["file"]


@pytest.mark.parametrize("tool", ["hf_to_megatron", "megatron_to_hf"])
def test_a_disk_that_fills_up_on_the_way_leaves_nothing(source, converted, tmp_path, capsys, tool):
    main, arguments = converters(source, converted)[tool]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file may grow beyond that
    try:
        assert main([*arguments, "--output", str(tmp_path / "runs" / "a" / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert "File too large" in said and str(tmp_path) in said
    assert outputs(tmp_path) == []


def test_half_precision_and_a_tied_head_stored_twice_come_back_too(tmp_path):
    source = make_tiny(tmp_path / "model", "llama", vocab=67, layers=2, tied=True)
    there, back = tmp_path / "there", tmp_path / "back"
    tensors = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    change_config(source, dtype="float16")
    assert hf_to_megatron.main(["--hf-model", str(source), "--output", str(there), "--dtype", "fp32"]) == 0
    assert megatron_to_hf.main(["--checkpoint", str(there), "--output", str(back), "--dtype", "fp16"]) == 0
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_conversion_to_bf16_rounds_every_tensor_and_the_config_says_so(source, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    assert hf_to_megatron.main(["--hf-model", str(source), "--output", str(there), "--dtype", "bf16"]) == 0
    assert megatron_to_hf.main(["--checkpoint", str(there), "--output", str(back)]) == 0
    before, after = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (source, back)
    )
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor.bfloat16()) for name, tensor in before.items())
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch, capfd, number):
    staged = []

    def ended(folder, contents):
        staged.extend(tmp_path.iterdir())
        try:
            os.kill(os.getpid(), number)
        except SystemExit as error:  # as torch's writer does
            raise OSError(28, "No space left on device") from error

    monkeypatch.setattr(hf_to_megatron, "write_manifest", ended)
    with pytest.raises(SystemExit) as end:
        hf_to_megatron.main(["--hf-model", str(source), "--output", str(tmp_path / "out")])
    assert end.value.code == 128 + number
    assert {path.name for path in staged} == {".out.staging", ".out.lock"} and outputs(tmp_path) == []
    said = capfd.readouterr().err
    assert said.endswith(f"Ended by {number.name}.\n") and "mistake" not in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_nohup_ignores_does_not_end_a_conversion(source, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        write = hf_to_megatron.write_manifest
        monkeypatch.setattr(
            hf_to_megatron, "write_manifest", lambda *args: (os.kill(os.getpid(), signal.SIGHUP), write(*args))
        )
        assert hf_to_megatron.main(["--hf-model", str(source), "--output", str(tmp_path / "out")]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


ENDS_WITHOUT_THREADS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from checkpoints_tools import hf_to_megatron
assert hf_to_megatron.main(["--hf-model", "/nowhere", "--output", "/nowhere/out"]) == 2
print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


def test_no_thread_of_a_process_group_outlives_a_command():
    """Otherwise a tensor freed at the interpreter's end aborts the process: exit code 134 instead
    of 2, now and then."""
    done = subprocess.run([sys.executable, "-c", ENDS_WITHOUT_THREADS], capture_output=True, text=True, check=True)
    assert "python" in done.stdout and "gloo" not in done.stdout, done.stdout


def test_a_lost_process_is_one_sentence_to_the_others(capsys):
    def work(job):
        raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer [10.213.0.2]:60592. This is typically caused")

    assert run(work) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Another process was lost, perhaps killed for its memory (Connection closed by peer [10.213.0.2])."
    ]


def test_what_a_killed_conversion_left_is_removed_by_the_next(source, tmp_path):
    left = tmp_path / ".out.staging" / "megatron"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    assert hf_to_megatron.main(["--hf-model", str(source), "--output", str(tmp_path / "out")]) == 0
    assert outputs(tmp_path) == ["out"]


def test_an_output_that_exists_is_not_touched(source, converted, tmp_path, capsys):
    for main, arguments in converters(source, converted).values():
        (tmp_path / "out").mkdir(exist_ok=True)
        assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
        assert "exists already" in capsys.readouterr().err
    assert outputs(tmp_path) == ["out"] and not list((tmp_path / "out").iterdir())


def test_an_output_that_another_process_writes_is_refused_and_left_to_it(
    source, converted, tmp_path, capsys, monkeypatch
):
    staged = tmp_path / ".out.staging" / "model"
    staged.mkdir(parents=True)
    monkeypatch.setattr(FileLock, "try_acquire", lambda lock: False)
    monkeypatch.setattr(FileLock, "holder", lambda lock: "process 7 on node2")
    for main, arguments in converters(source, converted).values():
        assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
        assert "out` is being written by process 7 on node2; wait for its end" in capsys.readouterr().err
        assert staged.is_dir() and outputs(tmp_path) == [".out.staging"]


def test_a_damaged_checkpoint_is_not_converted(converted, tmp_path, capsys):
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    file = max((damaged / "megatron").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert megatron_to_hf.main(["--checkpoint", str(damaged), "--output", str(tmp_path / "out")]) == 2
    assert file.name in capsys.readouterr().err
    for folder in (tmp_path / "nowhere", tmp_path):
        assert megatron_to_hf.main(["--checkpoint", str(folder), "--output", str(tmp_path / "out")]) == 2
        assert "checkpoint" in capsys.readouterr().err
    assert outputs(tmp_path) == ["damaged"]


def test_training_does_not_start_from_a_damaged_one(converted, tmp_path):
    from megatron_dapo.checkpointing.model_weights import load_weights

    damaged = shutil.copytree(converted, tmp_path / "damaged")
    file = max((damaged / "megatron").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"is damaged: megatron/{file.name} has .* bytes instead of"):
        # before a model is looked at
        load_weights(None, damaged, SimpleNamespace(agreement=SingleRank()))


def test_a_flipped_bit_is_found_by_name(converted, source, tmp_path, capsys):
    """In the middle of a tensor, which torch reads without a word."""
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    file = max((damaged / "megatron").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    arguments = ["--checkpoint", str(damaged)]
    for tool, more in (
        (megatron_to_hf, ["--output", str(tmp_path / "out")]),
        (verify_checkpoint, ["--hf-model", str(source)]),
    ):
        assert tool.main([*arguments, *more]) == 2
        assert f"{file.name} has another content than was written" in capsys.readouterr().err
    assert outputs(tmp_path) == ["damaged"]


def test_a_training_checkpoint_gives_the_trained_weights(source, tmp_path):
    """As training writes it, with optimizer and generators: only the model is read,
    and every file is standard."""
    from megatron_dapo.checkpointing.manifest import write_manifest
    from megatron_dapo.checkpointing.torch_dist.saving import save
    from megatron_dapo.config.loader import load_config
    from megatron_dapo.models.hf_io import copy_model_files
    from megatron_dapo.platform.parallel import ParallelLayout
    from megatron_dapo.training.policy import Policy

    checkpoint = tmp_path / "step_000001"
    config = load_config(
        None,
        [f"actor_rollout_ref.model.path={source}", "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false"],
    )
    layout = ParallelLayout.initialize()
    policy = Policy(config, layout)
    with torch.no_grad():
        for parameter in policy.model.chunks[0].parameters():
            parameter.add_(1.0)
    save(checkpoint / "megatron", policy.model, layout, optimizer=policy.state.optimizer).finish()
    layout.shutdown()
    (checkpoint / "hf").mkdir()
    copy_model_files(source, checkpoint / "hf")
    write_manifest(checkpoint, ["model", "optimizer", "rng"])

    out, half = tmp_path / "out", tmp_path / "half"
    assert megatron_to_hf.main(["--checkpoint", str(checkpoint), "--output", str(out)]) == 0
    before = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    after = load_file(out / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name] + 1) for name in before)
    options = ["--dtype", "bf16", "--max-file-size", "100KB"]
    assert megatron_to_hf.main(["--checkpoint", str(checkpoint), "--output", str(half), *options]) == 0
    rounded = {name: tensor for file in half.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(rounded[name], after[name].bfloat16()) for name in after)
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((half / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys() and (half / "tokenizer.json").is_file()


def test_verify_tells_equal_from_different(source, converted, model, capsys):
    assert verify_checkpoint.main(["--checkpoint", str(converted), "--hf-model", str(source), "--round-trip"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("checksums", "equal to the bit", "log-probs", "equal to the byte"))
    change_tensors(model, lambda tensors: tensors["model.embed_tokens.weight"][5, 3].add_(0.5))
    assert verify_checkpoint.main(["--checkpoint", str(converted), "--hf-model", str(model), "--round-trip"]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "model.embed_tokens.weight" in lines["tensors"] and "1 of " in lines["tensors"]
    assert "DIFFERS" in lines["log-probs"] and "model-00001-of" in lines["round"]


def test_verify_leaves_nothing_beside_the_checkpoint(source, converted, tmp_path, capsys, monkeypatch):
    checkpoint = shutil.copytree(converted, tmp_path / "checkpoint")
    (tmp_path / ".checkpoint.round-trip.staging").mkdir()  # of a killed process
    arguments = ["--checkpoint", str(checkpoint), "--hf-model", str(source), "--round-trip"]
    assert verify_checkpoint.main([*arguments, "--num-tokens", "0"]) == 0
    assert outputs(tmp_path) == ["checkpoint"]
    assert verify_checkpoint.main([*arguments, "--num-tokens", "1"]) == 2
    assert "--num-tokens 1: the text gives 1; log-probs need two or more" in capsys.readouterr().err

    def refuse(lock):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(FileLock, "try_acquire", refuse)
    assert verify_checkpoint.main([*arguments, "--num-tokens", "0"]) == 2
    said = capsys.readouterr().err
    assert "--round-trip writes beside the checkpoint:" in said and "(Read-only file system)" in said
    assert outputs(tmp_path) == ["checkpoint"]


def test_processes_that_do_not_fit_the_model_are_refused(source):
    spec = read_model_spec(source)  # 2 layers, 4 heads, 2 key-value heads
    assert choose_sizes(spec, 1, None, None) == (1, 1)
    assert choose_sizes(spec, 2, None, None) == (1, 2)
    assert choose_sizes(spec, 4, 2, None) == choose_sizes(spec, 4, None, 2) == (2, 2)
    for world, tp, pp, word in (
        (4, 2, 1, "--tp 2 x --pp 1 is 2 processes, but 4 were"),
        (1, 2, None, "--tp 2 x --pp 1 is 2 processes, but 1 was"),
        (5, 1, 5, "--pp 5"), (4, 4, None, "key-value heads"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=word):
            choose_sizes(spec, world, tp, pp)


def test_the_variables_of_srun_and_mpirun_are_understood():
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    srun |= {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08,11]"}
    variables = torchrun_variables(srun)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"], variables["MASTER_ADDR"]) == (
        "3",
        "4",
        "1",
        "gpu07",
    )
    assert variables["MASTER_PORT"] == torchrun_variables(srun | {"SLURM_PROCID": "0"})["MASTER_PORT"]
    mpirun = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")} | {"OMPI_COMM_WORLD_RANK": "1"}
    assert torchrun_variables(mpirun)["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(UserError, match="MASTER_ADDR"):
        torchrun_variables(mpirun | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    # torchrun has set its own; a batch script outside srun is a single process
    assert torchrun_variables(srun | {"RANK": "0"}) == {}
    assert torchrun_variables({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == {}
