"""Which sockets lie between nodes, for layouts of all kinds."""

from __future__ import annotations

import itertools

from servekit.config import ConfigError
from servekit.runtime.nodes.lines import CONTROL, Listeners, make_lines, reached_by_tcp
from servekit.runtime.ranks import Sizes, make_ranks


def lines_of(**sizes):
    found = Sizes(**sizes)
    return make_lines(found, make_ranks(found))


def test_replicas_of_one_rank_meet_control_alone():
    lines = {line.name: line for line in lines_of(replicas=2, nodes=2)}
    assert set(lines) == {"egress.ipc", "rank0.ipc", "rank1.ipc"}
    assert {name for name, line in lines.items() if line.crosses} == {"egress.ipc", "rank1.ipc"}
    assert {line.binder for line in lines.values()} == {CONTROL}


def test_a_group_over_two_nodes_has_orders_and_a_store_between_them():
    crossing = {line.name: (line.binder, line.node) for line in lines_of(tensor=2, nodes=2) if line.crosses}
    assert crossing == {"orders0-1.ipc": (1, 1), "store0": (0, 0)}


def test_stages_over_two_nodes_send_results_back():
    crossing = {line.name for line in lines_of(tensor=2, pipeline=2, nodes=2) if line.crosses}
    assert crossing == {"orders0-2.ipc", "orders0-3.ipc", "results0.ipc", "store0"}


def test_leaders_of_one_group_on_two_nodes_make_offers():
    crossing = {line.name for line in lines_of(tensor=4, attn_dp=2, nodes=2) if line.crosses}
    assert crossing == {"egress.ipc", "rank1.ipc", "orders0-2.ipc", "orders0-3.ipc", "offers0.ipc", "store0"}


def every_layout():
    for r, t, p, d, n in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4)):
        sizes = Sizes(replicas=r, tensor=t, pipeline=p, attn_dp=d, nodes=n)
        try:
            yield sizes, make_ranks(sizes)
        except ConfigError:
            continue


def test_in_every_layout_each_socket_has_one_owner_and_is_found_from_each_node():
    for sizes, ranks in every_layout():
        lines = make_lines(sizes, ranks)
        assert len({line.name for line in lines}) == len(lines)
        listeners = [Listeners(lines, node, "127.0.0.1") for node in range(sizes.nodes)]
        addresses = {name: where for each in listeners for name, where in each.addresses.items()}
        try:
            for line in lines:
                owner = 0 if line.binder == CONTROL else ranks[line.binder].node
                assert line.node == owner
                assert (line.name in listeners[owner].of(line.binder)) == (line.crosses or line.is_store)
                for node in line.connecting - {owner}:
                    assert line.name in reached_by_tcp(lines, node, addresses)
                assert (line.name in reached_by_tcp(lines, owner, addresses)) == line.is_store
        finally:
            for each in listeners:
                each.close()
