"""Graphs of PipeDream: read, refused, and cut as well as can be by a search of another kind."""

import itertools

import pytest
from planner import optimum
from profiles import GRAPH

from penstock import PlanError, Profile, partition


def test_a_graph_becomes_layers_in_order_and_values_with_their_users(tmp_path):
    (tmp_path / "graph.txt").write_text(GRAPH)
    profile = Profile.from_pipedream(tmp_path / "graph.txt")
    assert [layer.name for layer in profile.layers] == ["node1", "node2", "node3"]
    assert [layer.forward_seconds for layer in profile.layers] == [0.002, 0.0015, 0.001]
    assert [layer.parameter_bytes for layer in profile.layers] == [80, 0, 0]
    assert [(value.num_bytes, value.users) for value in profile.values] == [
        (800, (1, 2)),
        (800, (2,)),
        (400, ()),
    ]
    plan = partition(profile, stages=2, link=8e6)
    assert plan.stages[0].bytes_forward in (800, 1600)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("\tnode2 -- node3", "\tnode2 -- node3\n\tnode3 -- node1"), "no cycle, found node"),
        (("=1.5,", "=-1.5,"), "forward_compute_time of node2, .* is never negative, found -1.5"),
        (("=1.5,", "=fast,"), "a number, or a list .*, found 'fast'"),
        (("\tnode2 -- node3", "\tnode2 -- node9"), "nodes, and edges between them"),
        (("node3 -- Add", "Add"), "line 3 of .* is neither a node nor an edge"),
        ((GRAPH, ""), "nodes, and edges between them"),
    ],
)
def test_a_graph_that_is_none_is_refused(change, said, tmp_path):
    (tmp_path / "graph.txt").write_text(GRAPH.replace(*change))
    with pytest.raises(PlanError, match=said):
        Profile.from_pipedream(tmp_path / "graph.txt")
    with pytest.raises(PlanError, match="cannot read the graph"):
        Profile.from_pipedream(tmp_path / "none.txt")


NAMES = ("alexnet", "densenet121", "gnmt", "nasnetamobile", "resnet101", "resnet50", "squeezenet1_0", "vgg16")


@pytest.mark.parametrize("name", NAMES)
def test_no_cut_of_a_published_graph_is_better(name, corpora):
    profile = Profile.from_pipedream(corpora / "pipedream" / f"{name}.graph.txt")
    for workers, link in itertools.product((2, 4, 8, 16), ("100Mbit", "1Gbit", "10Gbit", "100Gbit")):
        plan = partition(profile, stages=workers, link=link, micro_batches=4, codec="raw", looks=0)
        assert plan.link is not None
        cuts = [8 * stage.bytes_forward / plan.link for stage in plan.stages]
        computing = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
        least = optimum(profile, workers, plan.link)
        assert least * (1 - 1e-9) <= max(*cuts, *computing) <= 1.05 * least * (1 + 1e-9), (workers, link)
