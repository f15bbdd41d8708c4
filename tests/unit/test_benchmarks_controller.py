"""One controller feeds the trainer from 32 servers, by the committed numbers;
its stand-ins' answers."""

import json

import pytest

from benchmarks.bench_controller import LONGEST, VOCABULARY, render_answers
from megatron_dapo.servers.client import generation_of
from tests.helpers import REPOSITORY

pytestmark = pytest.mark.unit


def test_32_servers_of_5000_tokens_a_second_take_at_most_six_tenths_of_a_core():
    results = json.loads((REPOSITORY / "benchmarks/results/controller_cpu.json").read_text())["results"]
    (of_32,) = [result for result in results if result["num_servers"] == 32]
    assert of_32["rate"] == 5000 and of_32["mean_tokens"] == 6000
    assert of_32["trained_tokens_per_s"] > 0.8 * 32 * 5000, "the servers wrote as much as is claimed"
    assert of_32["core_share"] <= 0.6


def test_answers_are_what_a_client_reads_from_sglang():
    answers = render_answers(mean_tokens=300)
    lengths = [answer.num_tokens for answer in answers]
    assert len(set(lengths)) > 30 and max(lengths) <= LONGEST
    for answer in answers[:4]:
        generation = generation_of(json.loads(answer.body(version=7)))
        assert len(generation.tokens) == len(generation.log_probs) == answer.num_tokens
        assert set(generation.weight_versions.tolist()) == {7} and generation.finish_reason == "stop"
        assert generation.tokens.max() < VOCABULARY and generation.log_probs.max() <= 0
