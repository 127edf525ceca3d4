"""Ranks that are not alike: cuts by speeds, memory and links, against brute force; files that are wrong."""

import itertools
import random
from pathlib import Path

import pytest
import yaml
from commands import SMALL, answer, refusal, same_model, trained
from profiles import MS, NET, layer_of, profile_of, value_of

from penstock import Plan, PlanError, partition
from penstock.pipeline.partition.choose import TooSmall
from penstock.pipeline.schedules.replicated import step_programs
from penstock.pipeline.schedules.simulate import simulate_plan
from penstock.stages.plan.cluster import Cluster, orders

FILE = {
    "ranks": ["desk", "laptop"],
    "devices": {"desk": {"speed": 1, "memory": "8GiB"}, "laptop": {"speed": 0.5}},
    "links": {"laptop-desk": "100Mbit"},
}


def cluster_of(speeds, *, memory=None, links=None):
    number = len(speeds)
    return Cluster(
        names=tuple("abcdefgh"[:number]),
        speeds=tuple(speeds),
        memory=tuple(memory or [None] * number),
        links=tuple(links or [None] * (number - 1)),
    )


def chain(draw, number):
    layers = [
        layer_of(
            f"l{i}", forward=draw.randint(1, 9), backward=draw.randint(1, 9), size=4 * draw.randint(0, 50)
        )
        for i in range(number)
    ]
    return profile_of(
        layers, [value_of(i, [i + 1], num_bytes=draw.randint(1, 9) * 1000) for i in range(number - 1)]
    )


def costliest(profile, cluster, ends):
    """Seconds of the costliest rank, from the definition: computing, or the slower of its two links."""
    found = []
    for rank, (start, end) in enumerate(itertools.pairwise(ends)):
        layers = profile.layers[start:end]
        found.append(sum(x.forward_seconds + x.backward_seconds for x in layers) / cluster.speeds[rank])
        if end < len(profile.layers) and cluster.links[rank]:
            found.append(8 * profile.values[end - 1].num_bytes / cluster.links[rank])
    return max(found)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_for_unlike_ranks_is_better_by_brute_force(seed):
    draw = random.Random(seed)
    profile, ranks = chain(draw, draw.randint(4, 8)), draw.randint(2, 4)
    speeds = [draw.choice([0.25, 0.5, 1, 2]) for _ in range(ranks)]
    links = [draw.choice([None, 1e6, 4e6, 1e8]) for _ in range(ranks - 1)]
    memory = [draw.choice([None, None, 600, 1200]) for _ in range(ranks)]
    cluster = cluster_of(speeds, memory=memory, links=links)
    # 1. all cuts, each as a plan of its own, whose bytes say whether it fits
    number, fitting = len(profile.layers), []
    for inner in itertools.combinations(range(1, number), ranks - 1):
        names = [profile.layers[p - 1].name for p in inner]
        plan = partition(profile, cluster=cluster_of(speeds), cuts=names, micro_batches=4)
        held = [1.05 * stage.held_bytes for stage in plan.stages]
        if all(most is None or used <= most for used, most in zip(held, memory, strict=True)):
            sent = sum(profile.values[p - 1].num_bytes for p in inner)
            fitting.append((costliest(profile, cluster, [0, *inner, number]), sent))
    # 2. the search finds one of the cheapest, to 5 %, that sends least
    if not fitting:
        with pytest.raises(TooSmall, match=r"holds no legal cut of the model; .* times as much"):
            partition(profile, cluster=cluster, micro_batches=4, tier="device", looks=0)
        return
    plan = partition(profile, cluster=cluster, micro_batches=4, tier="device", looks=0)
    ends = list(itertools.accumulate((len(stage.layers) for stage in plan.stages), initial=0))
    smallest = min(cost for cost, _ in fitting)
    near = [sent for cost, sent in fitting if cost <= 1.05 * smallest * (1 + 1e-9)]
    assert costliest(profile, cluster, ends) <= 1.05 * smallest * (1 + 1e-9)
    assert sum(profile.values[end - 1].num_bytes for end in ends[1:-1]) == min(near)
    assert all(
        most is None or 1.05 * s.held_bytes <= most for s, most in zip(plan.stages, memory, strict=True)
    )


def test_a_rank_of_half_the_speed_gets_half_the_layers_and_its_seconds_are_its_own():
    profile = profile_of([layer_of(f"l{i}", forward=1, backward=2) for i in range(9)])
    plan = partition(profile, cluster=cluster_of([1, 0.5]), micro_batches=2, looks=0)
    assert [len(stage.layers) for stage in plan.stages] == [6, 3]
    assert [stage.forward_seconds for stage in plan.stages] == pytest.approx([6 * MS, 6 * MS])
    deep = partition(profile, cluster=cluster_of([1, 0.5]), stages=4, micro_batches=2, looks=0)
    assert [sum(len(deep.stages[s].layers) for s in own) for own in deep.stages_of_rank] == [6, 3]
    assert [len(stage.layers) for stage in deep.stages] in ([3, 3, 1, 2], [3, 3, 2, 1])


def test_each_message_takes_the_time_of_its_own_link_and_a_plan_keeps_the_cluster(tmp_path):
    profile = profile_of([layer_of(name) for name in "abc"], [value_of(i, [i + 1]) for i in range(2)])
    slow = partition(profile, cluster=cluster_of([1, 1, 1], links=[8e6, 8e5]), micro_batches=1)
    # forwards 3 x 1 ms, backwards 3 x 2 ms, both ways 1000 bytes in 1 ms and in 10 ms
    assert simulate_plan(slow, step_programs(slow)).seconds == pytest.approx((9 + 2 + 20) * MS)
    slow.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert (again, again.rate(2, 1), again.budget([0, 2])) == (slow, 8e5, None)
    tight = partition(profile, cluster=cluster_of([1, 1, 1], memory=[2**30, 2**20, 2**16]))
    assert (tight.budget([0, 2]), tight.budget([1])) == (2**30 + 2**16, 2**20)
    assert "a (1x 1 GiB) - b (1x 1 MiB)" in str(tight)


def test_orders_are_the_other_ways_to_put_devices_in_a_row():
    found = list(orders({"ranks": ["desk", "laptop", "desk"]}))
    assert found == [["desk", "desk", "laptop"], ["laptop", "desk", "desk"]]
    assert len(set(map(tuple, orders({"ranks": ["desk"] * 3 + ["laptop"] * 2})))) == 9
    far = orders({"ranks": ["desk"] * 29 + ["laptop"]})
    assert [ranks.index("laptop") for ranks in far] == list(range(29))
    given = (["desk"] * 3 + ["laptop"] * 3) * 2
    swapped = [sum(a != b for a, b in zip(ranks, given, strict=True)) for ranks in orders({"ranks": given})]
    assert swapped == [2] * 36


WRONG = {
    "no dict": ([1], "has the keys ranks, devices, links alone, found list"),
    "another key": ({**FILE, "rank": 1}, r"alone, found \['rank'\]; leave out the rest"),
    "no ranks": ({**FILE, "ranks": []}, r"has ranks: \[NAME, ...\]"),
    "unknown": ({**FILE, "ranks": ["desk", "phone"]}, r"names of devices \(desk, laptop\), found phone"),
    "no link": ({**FILE, "ranks": ["desk", "desk"]}, "found none for desk-desk in .*; give it, or default:"),
    "speed": (
        {**FILE, "devices": {"desk": {}, "laptop": {"speed": 0}}},
        "above 0, 1 for .*, found 0 for device laptop",
    ),
    "memory": (
        {**FILE, "devices": {"desk": {"memory": "8X"}, "laptop": {}}},
        "memory of device desk .*=8X is not a size",
    ),
    "rate": ({**FILE, "links": {"default": "fast"}}, "link default=fast is not a rate"),
    "far link": ({**FILE, "links": {"desk-tv": 9, "default": 8}}, r"\(desk, laptop\) or .*, found desk-tv"),
    "two rates": (
        {**FILE, "links": {"desk-laptop": 8, "laptop-desk": 9}},
        "one rate for both ways, found desk-laptop: 8 and laptop-desk: 9",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_wrong_is_refused_before_anything_starts(case, tmp_path, capsys):
    data, said = WRONG[case]
    path = tmp_path / "machines.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=said):
        Cluster.load(path)
    assert str(path) in refusal(f"{SMALL} cluster={path}", capsys, name="plan") or case in ("memory", "rate")


def test_numbers_are_read_as_people_write_them_and_a_key_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "machines.yaml"
    path.write_text("ranks: [a, b]\ndevices: {a: {speed: 1e3}, b: {}}\nlinks: {default: 1e9}\n")
    assert (Cluster.load(path).speeds, Cluster.load(path).links) == ((1000, 1), (1e9,))
    path.write_text(path.read_text() + "ranks: [a]\n")
    with pytest.raises(PlanError, match="duplicate key ranks"):
        Cluster.load(path)


def test_what_a_cluster_says_itself_is_not_said_twice(tmp_path, capsys):
    path = tmp_path / "machines.yaml"
    path.write_text(yaml.safe_dump(FILE))
    for option in ("link=1Gbit", "memory.device=1GiB", "ranks=3"):
        assert f"cluster={path} has" in refusal(f"{SMALL} cluster={path} {option}", capsys, name="plan")
    with pytest.raises(PlanError, match=r"cluster=.* is a YAML file, which cannot be read"):
        Cluster.load(tmp_path / "none.yaml")
    for options, said in [
        ({"schedule": "zbv"}, "take a schedule of neighbours"),
        ({"replicas": 2}, "leave out replicas="),
        ({"ranks": 3}, "the cluster has 2 ranks, found ranks=3"),
    ]:
        with pytest.raises(PlanError, match=said):
            partition(NET, cluster=cluster_of([1, 1]), **options)


def test_a_run_of_a_cluster_has_the_bits_of_any_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("machines.yaml").write_text(yaml.safe_dump(FILE))
    planned = f"{SMALL} batch_size=20 micro_batches=2 stages=2"
    job = f"{planned} epochs=1 max_steps=2"
    trained(f"{job} ranks=1 hydra.run.dir=plain")
    trained(f"{job} cluster=machines.yaml hydra.run.dir=unlike")
    assert same_model("plain", "unlike")
    code, out, _ = answer(f"plan {planned} cluster=machines.yaml hydra.run.dir=planned", capsys)
    assert code == 0
    assert "desk (1x 8 GiB) - 100 Mbit/s - laptop (0.5x)" in out
