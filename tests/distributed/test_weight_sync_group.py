"""Weight sync among real processes over gloo: the tensors arrive, and no failure is a hang."""

import os
import signal
import time

import pytest

from megatron_dapo.storage.run_folder import RunFolder
from tests.distributed.weight_sync_world import Server, Trainer, expected_sha256

pytestmark = pytest.mark.distributed


def test_every_server_holds_every_stage_and_a_lost_one_is_left_out_until_its_return():
    with (
        Server() as steady,
        Server(die_at_update=7) as doomed,
        Server() as late,
        Trainer([steady.url, doomed.url, late.url], tp=2, pp=2, timeout_s=200) as trainer,
    ):
        late.kill()
        assert {status for status, _ in trainer.order("open")} == {"ok"}

        first = trainer.order(1)
        assert [status for status, _ in first] == ["ok"] * 4
        for server in (steady, doomed):
            assert server.seen()["sha256"] == expected_sha256(pp=2, version=1)
        report = first[0][1]
        assert report.rejoined and report.num_servers == 2 and report.num_rejoins == 0
        # flat and tensor-by-tensor for stage 0, flat only for stage 1
        assert report.num_buckets == 3 and report.num_tensors == len(expected_sha256(2, 1))
        assert list(report.seconds) == ["wait", "pause", "join", "gather", "send", "commit", "resume"]

        (_, report), *_ = trainer.order(2)
        assert not report.rejoined, "the group of the first push serves the second"
        assert doomed.seen()["sha256"] == expected_sha256(pp=2, version=2)
        assert not doomed.seen()["paused"]

        answers = trainer.order(3)  # its first bucket is the doomed server's seventh
        assert {status for status, _ in answers} == {"ok"}, answers
        assert answers[0][1].num_servers == 1 and answers[0][1].rejoined and "recover" in answers[0][1].seconds
        assert steady.seen()["sha256"] == expected_sha256(pp=2, version=3)
        assert not steady.seen()["paused"] and not steady.seen()["open"]
        steady.wait_until_seen(num_groups=2)  # one per stage: broken ones are dropped

        doomed.kill()
        doomed.start()
        late.start()
        for server in (doomed, late):
            server.wait()
        (_, report), *_ = trainer.order(4)
        assert report.rejoined and (report.num_servers, report.num_rejoins) == (3, 2)
        for server in (steady, doomed, late):
            assert server.seen()["sha256"] == expected_sha256(pp=2, version=4)

        doomed.kill()
        doomed.start()  # between pushes: noticed by the version it reports
        doomed.wait()
        late.kill()
        (_, report), *_ = trainer.order(5)
        assert report.rejoined and (report.num_servers, report.num_rejoins) == (2, 1)
        assert doomed.seen()["sha256"] == expected_sha256(pp=2, version=5)

        for server in (steady, doomed):
            server.kill()
        (_, report), *_ = trainer.order(6)
        assert report.num_servers == 0, "nobody is there: the rollout waits for one, not the push"


def test_a_frozen_server_is_left_out_within_the_deadline_reported_and_has_not_the_version(tmp_path):
    """Its process goes on later, with some of the weights: it must not claim them all. The other
    member of the broken group came back by itself, without help."""
    run = RunFolder(tmp_path)
    with (
        Server() as steady,
        Server(freeze_at_update=2) as frozen,
        Trainer([frozen.url, steady.url], pp=2, run=run, timeout_s=30) as trainer,
    ):
        trainer.order("open")
        answers = trainer.order(1)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == 1 and steady.seen()["sha256"] == expected_sha256(pp=2, version=1)
        assert not steady.seen()["paused"]
        assert "no answer" in run.unresponsive(frozen.url).read_text()
        assert not run.unresponsive(steady.url).exists()
        os.kill(frozen.process.pid, signal.SIGCONT)
        assert frozen.seen()["version"] == "-1"


def test_without_the_last_server_the_push_is_over_and_it_takes_part_when_it_goes_on():
    with Server(freeze_at_update=2) as server, Trainer([server.url], pp=2, timeout_s=12) as trainer:
        trainer.order("open")
        answers = trainer.order(1)
        assert [status for status, _ in answers] == ["ok", "ok"], answers
        assert answers[0][1].num_servers == 0
        os.kill(server.process.pid, signal.SIGCONT)
        server.wait_until_seen(paused=False, open=False, version="-1")
        (_, report), *_ = trainer.order(2)
        assert report.num_servers == 1 and server.seen()["sha256"] == expected_sha256(pp=2, version=2)
        server.wait_until_seen(paused=False, num_groups=2)


def test_a_refusal_of_a_server_that_lives_is_named_on_every_rank():
    with (
        Server() as steady,
        Server(refuse_at_update=2) as stubborn,
        Trainer([steady.url, stubborn.url], pp=2, timeout_s=30) as trainer,
    ):
        trainer.order("open")
        for error, _ in trainer.order(1):
            assert stubborn.url in error and steady.url not in error and "out of order" in error
        for server in (steady, stubborn):
            assert not server.seen()["paused"] and server.seen()["version"] == "-1"
        assert {status for status, _ in trainer.order(2)} == {"ok"}


def test_verify_names_the_server_and_the_tensor_that_differ():
    name = "model.layers.1.self_attn.qkv_proj.weight"
    with (
        Server() as good,
        Server(corrupt=name) as bad,
        Trainer([good.url, bad.url], dp=2, timeout_s=30, verify=True, verify_num_tensors=100) as trainer,
    ):
        trainer.order("open")
        for error, _ in trainer.order(1):
            assert f"{name} on server {bad.url}" in error
            assert good.url not in error and error.count(" on server ") == 1


def test_ranks_that_plan_differently_or_do_not_come_are_named():
    with Server() as server:
        with Trainer([server.url], tp=2, odd_rank=1, timeout_s=8) as trainer:
            for error, _ in trainer.order("open"):
                assert "ranks 0 and 1 of stage 0 list different tensors" in error
        with Trainer([server.url], tp=2, timeout_s=4) as trainer:
            trainer.order("open")
            ((error, _),) = trainer.order(1, ranks=[0])
            assert "Ranks 1" in error or "rank 1" in error.lower(), error


# five buckets, four of one size: bytes in a wrong one would fit
IN_FLIGHT = {"num_large": 4, "bucket_size_mb": 1}


def test_buckets_in_flight_arrive_each_in_its_turn_and_phases_sum_up():
    with Server() as one, Server() as other, Trainer([one.url, other.url], pp=2, timeout_s=60, **IN_FLIGHT) as trainer:
        trainer.order("open")
        for version in (1, 2):
            start = time.monotonic()
            answers = trainer.order(version)
            assert [status for status, _ in answers] == ["ok", "ok"], answers
            report = answers[0][1]
            assert report.num_buckets == 6 + 5 and 0 < sum(report.seconds.values()) < time.monotonic() - start
            for server in (one, other):
                assert server.seen()["sha256"] == expected_sha256(2, version, num_large=4)
                assert server.seen()["version"] == str(version)


@pytest.mark.parametrize("fault", ["die_at_update", "freeze_at_update"])
def test_a_server_lost_while_the_next_bucket_is_in_flight_is_left_out(fault: str):
    with (
        Server() as steady,
        Server(**{fault: 2}) as lost,
        Trainer([lost.url, steady.url], timeout_s=30, **IN_FLIGHT) as trainer,
    ):
        trainer.order("open")
        ((status, report),) = trainer.order(1)
        assert status == "ok" and report.num_servers == 1 and "recover" in report.seconds
        assert steady.seen()["sha256"] == expected_sha256(1, 1, num_large=4)
        steady.wait_until_seen(num_groups=1, paused=False, open=False, version="1")


def test_a_refusal_while_the_next_bucket_is_in_flight_is_named_and_no_server_takes_the_version():
    with (
        Server() as steady,
        Server(refuse_at_update=2) as stubborn,
        Trainer([steady.url, stubborn.url], timeout_s=20, **IN_FLIGHT) as trainer,
    ):
        trainer.order("open")
        ((error, _),) = trainer.order(1)
        assert (
            stubborn.url in error and steady.url not in error and "out of order" in error and "bucket 2 of 6" in error
        )
        for server in (steady, stubborn):
            server.wait_until_seen(paused=False, version="-1")
        ((status, _),) = trainer.order(2)
        assert status == "ok"
        for server in (steady, stubborn):
            assert server.seen()["sha256"] == expected_sha256(1, 2, num_large=4)
