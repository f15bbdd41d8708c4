"""A damaged config.json ends in a sentence, within bounds of memory, at each of its readers."""

import json
import os

import pytest

from megatron_dapo.checks.run_checks import load_and_validate
from megatron_dapo.common.errors import UserError
from megatron_dapo.huggingface.model_families import FAMILIES
from megatron_dapo.huggingface.spec_reader import read_critic_spec, read_model_spec, read_vocab_size
from tests.bounded_process import run_bounded
from tests.model_json import MODEL_JSON

pytestmark = pytest.mark.unit

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**400


def put(content: str | bytes):
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def changed(**values: object):
    return lambda path: path.write_text(json.dumps(MODEL_JSON | values))


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def endless(path):
    with path.open("ab") as file:
        file.truncate(60 << 30)


UNREADABLE = {
    "deep": put(f'{{"a": {DEEP}}}'),
    "a list": put("[1]"),
    "cut off": put('{"a'),
    "bytes": put(bytes(range(256))),
    "sixty gigabytes": endless,
}
DAMAGE = {
    **UNREADABLE,
    "a pipe": fifo,
    "a layer count of 1e9": changed(num_hidden_layers=10**9),
    "a layer count that no float holds": changed(num_hidden_layers=HUGE),
    "a layer count that is text": changed(num_hidden_layers="2"),
    "a vocabulary that no float holds": changed(vocab_size=HUGE),
    "an epsilon that no float holds": changed(rms_norm_eps=HUGE),
    "a width that is a list": changed(hidden_size=[64]),
    "an architecture that is an object": changed(architectures=[{"a": 1}]),
    "rope that is text": changed(rope_scaling="yarn"),
    **{
        f"a layer count of 1e9 in {family}": changed(architectures=[family], num_hidden_layers=10**9)
        for family in FAMILIES
    },
}


def refused(call) -> int:
    """2 if a call ends in short sentences that name the file."""
    try:
        call()
    except UserError as error:
        assert "config.json" in str(error) and all(len(sentence) < 1000 for sentence in error.sentences), str(error)
        return 2
    return 0


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_model_is_refused_before_a_run(tmp_path, what):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL_JSON))
    DAMAGE[what](path)
    overrides = [f"actor_rollout_ref.model.path={tmp_path}", "trainer.synthetic_batch=true"]
    ended = run_bounded(lambda: refused(lambda: load_and_validate(None, overrides)))
    assert ended.code == 2, ended.error[-1500:]


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("read", [read_model_spec, read_critic_spec, read_vocab_size])
def test_who_reads_a_damaged_model_gets_a_sentence(tmp_path, read, what):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL_JSON))
    UNREADABLE[what](path)
    ended = run_bounded(lambda: refused(lambda: read(tmp_path)))
    assert ended.code == 2, ended.error[-1500:]
