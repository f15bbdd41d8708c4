"""The agreement on the starts of a server over several nodes, by files of the run folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from megatron_dapo.common.files import remove_folder
from megatron_dapo.servers.several_nodes import start_orders
from megatron_dapo.servers.several_nodes.start_orders import FollowedOrders, StartOrders

pytestmark = pytest.mark.unit


def test_what_an_earlier_supervisor_left_counts_for_nothing(tmp_path):
    folder = tmp_path / "starts"
    earlier, followed = StartOrders(folder, 1), FollowedOrders(folder, 1)
    earlier.start()
    followed.report(followed.read(), "it was killed")
    assert earlier.failure() == "it was killed"
    orders = StartOrders(folder, 1)
    assert followed.read() is None
    orders.start()
    assert orders.failure() is None
    first = followed.read()
    orders.start()
    followed.report(first, "late")
    assert followed.read() != first and orders.failure() is None


@contextmanager
def full_disk() -> Iterator[None]:
    with mock.patch.object(start_orders, "write_whole", side_effect=OSError(28, "No space left on device")):
        yield


def test_an_order_and_a_report_that_a_full_disk_refuses_are_written_later(tmp_path, caplog):
    orders, followed = StartOrders(tmp_path / "starts", 1), FollowedOrders(tmp_path / "starts", 1)
    with full_disk():
        orders.start()
        for _ in range(3):
            followed.report("x", "ended")
            assert orders.failure() is None and followed.read() is None
    assert caplog.text.count("cannot be written") == 2, "each of them once"
    assert orders.failure() is None
    followed.report(followed.read(), "ended")
    assert orders.failure() == "ended"


def test_an_order_and_a_report_that_somebody_removed_are_written_again(tmp_path):
    """As by the next start of a run in the same folder, beside servers that go on."""
    orders, followed = StartOrders(tmp_path / "starts", 1), FollowedOrders(tmp_path / "starts", 1)
    orders.start()
    order = followed.read()
    remove_folder(tmp_path / "starts")
    assert orders.failure() is None and followed.read() == order
    for _ in range(2):
        followed.report(order, "ended")
        assert orders.failure() == "ended" and followed.read() == order
        remove_folder(tmp_path / "starts")
