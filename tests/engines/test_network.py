"""engines/parallel/network.py, as far as one node shows it; `make soak` has two (loop nodes)."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed import HashStore

from config import InputError
from engines.parallel import network
from engines.parallel.network import VARIABLES, Place

HERE = Place("machine 0", "node0", "127.0.0.1")
THERE = Place("machine 1", "node1", "127.0.0.1")


@pytest.fixture
def no_interface_is_named(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_address_on_the_way_to_a_host_belongs_to_an_interface():
    assert network.address_towards("localhost") in ("127.0.0.1", "::1")
    own_address = "127.0.0.1"  # of the loopback interface; it reaches its other addresses from here
    assert network.address_towards("127.0.0.2") == own_address
    assert network.interface_of(own_address) == "lo"
    assert network.interface_of("192.0.2.7") is None


@pytest.mark.parametrize("name", psutil.net_if_addrs())
def test_every_interface_is_found_by_its_addresses(name):
    for entry in psutil.net_if_addrs()[name]:
        assert network.interface_of(entry.address) == name


def test_an_unknown_host_is_one_line():
    with pytest.raises(InputError, match="MASTER_ADDR=no.such.host cannot be reached from "):
        network.address_towards("no.such.host")


def test_only_variables_that_are_not_set_are_chosen(no_interface_is_named, monkeypatch):
    expected = {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "HCCL_SOCKET_IFNAME": "=eth1",
    }
    assert network.variables_for("eth1") == expected
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    del expected["NCCL_SOCKET_IFNAME"]
    assert network.variables_for("eth1") == expected


def test_nothing_is_chosen_on_one_node(no_interface_is_named, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(network.connect_nodes, [store] * 3, range(3), [3] * 3))
    assert not VARIABLES.keys() & os.environ.keys()


def test_a_loopback_address_is_kept_where_there_is_no_other(no_interface_is_named):
    assert network.choose_interface(HERE, [HERE, THERE], is_reported=True) == "127.0.0.1"
    assert not VARIABLES.keys() & os.environ.keys()


OUTSIDE = [
    (name, entry.address)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family == socket.AF_INET and not entry.address.startswith("127.")
]


@pytest.mark.skipif(not OUTSIDE, reason="this machine has a loopback interface only")
@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize("chosen_by_user", [None, "eth7"])
def test_the_interface_that_leads_to_another_node_is_chosen(
    monkeypatch, capsys, is_reported, chosen_by_user
):
    """The way to an address of this machine leads over that address."""
    name, address = OUTSIDE[0]
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is removed afterwards
    if chosen_by_user:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen_by_user)
    places = [HERE, Place(HERE.machine, HERE.name, address), Place("machine 1", "node1", address)]
    assert network.choose_interface(HERE, places[:2], is_reported) == HERE.address
    assert capsys.readouterr().out == ""
    assert network.choose_interface(HERE, places, is_reported) == address
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen_by_user or name)
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={name}"
    printed = capsys.readouterr().out
    if is_reported and not chosen_by_user:
        assert printed.startswith(f"network: node0 reaches the other nodes over {name} ({address})")
    else:
        assert printed == ""


def test_a_node_that_listens_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoints = [["", 0], ["127.0.0.1", listener.getsockname()[1]]]
        assert network.first_problem(HERE, [HERE, THERE], endpoints, ranks=[1]) is None


def test_a_node_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    problem = network.first_problem(HERE, [HERE, THERE], [["", 0], ["127.0.0.1", port]], [1])
    assert problem.startswith("node node0 cannot reach node node1 at 127.0.0.1: ")
    assert "refused" in problem


def test_all_ranks_get_what_each_has_shared():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        numbers = pool.map(
            network.share, [store] * 2, ["n"] * 2, range(2), [2] * 2, [[5], {"a": 1}]
        )
        assert list(numbers) == [[[5], {"a": 1}]] * 2


def test_a_rank_that_shares_nothing_is_not_waited_for_any_longer():
    store = HashStore()
    store.set_timeout(timedelta(seconds=600))
    with pytest.raises(RuntimeError, match="[Tt]imeout"):
        network.share(store, "n", 0, 2, 5, seconds=0.1)
