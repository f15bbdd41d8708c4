"""A failing step fails on all ranks, and names the place; with real groups: tests/distributed."""

import pytest

from megatron_dapo.common.errors import JobError, RankFailure, SharedUserError, UserError
from megatron_dapo.platform.agreement import Agreement, SingleRank, _Outcome
from megatron_dapo.weight_sync.weight_sync_error import WeightSyncError

pytestmark = pytest.mark.unit

FINE = _Outcome(result=7)
FULL = _Outcome(failure="OSError: full")
MISTAKE = _Outcome(error=UserError("mistake", "Traceback"))


def three(first: _Outcome, last: _Outcome) -> Agreement:
    """The middle one of three ranks; the outcome of the others' parts is given."""

    class Middle(SingleRank):
        def gather(self, value: object) -> list:
            return [first, value, last]

    agreement = Middle()
    agreement.rank = 1
    agreement._hosts = ["node1", "node2", "node3"]
    return agreement


def test_all_results_are_in_rank_order():
    assert three(FINE, FINE).all("writing", lambda: 8) == [7, 8, 7]
    assert three(FINE, FINE).each("writing", lambda: 8) == 8


def test_an_error_of_any_rank_is_raised_on_all_with_rank_host_and_step():
    with pytest.raises(JobError, match="writing failed; rank 2 on node3: OSError: full") as caught:
        three(FINE, FULL).all("writing", lambda: 8)
    assert caught.value.step == "writing" and caught.value.failures == (RankFailure(2, "node3", "OSError: full"),)
    with pytest.raises(JobError, match="rank 1 on node2: ZeroDivisionError.*rank 2 on node3: OSError: full") as caught:
        three(FINE, FULL).each("writing", lambda: 1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_mistakes_of_the_user_stay_so_with_the_sentences_of_all_ranks():
    def err() -> None:
        raise UserError(["mine", "mistake"])

    with pytest.raises(SharedUserError) as caught:
        three(MISTAKE, FULL).all("choosing", err)
    assert caught.value.sentences == ["mistake", "mine"] and caught.value.details == "Traceback"


def test_an_error_of_the_agreements_own_kind_is_raised_as_it_is():
    class Refusal(WeightSyncError):
        pass

    refusal = _Outcome(error=Refusal("server http://a:1 refuses"))
    with pytest.raises(Refusal, match="^server http://a:1 refuses$"):
        three(refusal, refusal).raising(WeightSyncError).all("send", lambda: None)
    with pytest.raises(
        WeightSyncError, match="^server http://a:1 refuses; send failed; rank 2 on node3: OSError: full$"
    ):
        three(refusal, FULL).raising(WeightSyncError).all("send", lambda: None)


def test_a_job_of_one_process_agrees_with_itself():
    assert SingleRank().leader("step", divmod, 7, 2) == (3, 1)
    with pytest.raises(WeightSyncError, match="step failed; rank 0 on .*: ZeroDivisionError"):
        SingleRank(WeightSyncError).leader("step", lambda: 1 / 0)
