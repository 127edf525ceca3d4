import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from penstock.compression.errors import PlanError
from penstock.stages.plan.plan import Asked, Plan
from penstock.stages.plan.plan_picture import figure
from penstock.stages.plan.plan_stage import PlanStage
from penstock.stages.profiling.examples import example_of


def stage_of(*layers, **changes):
    amounts = {
        "num_parameters": 1_200_000,
        "forward_seconds": 0.0123,
        "backward_seconds": 0.1 + 0.2,
        "memory_bytes": 3 * 1024**2,
        "bytes_forward": 4096,
        "bytes_backward": 2048,
        "ranks": (0,),
    }
    return PlanStage(layers=layers, parameters=(f"{layers[0]}.weight",), **{**amounts, **changes})


PLAN = Plan(
    stages=(
        stage_of("conv1", "relu"),
        stage_of("pool"),
        stage_of("fc", bytes_forward=0, bytes_backward=0, ranks=(1,)),
    ),
    schedule="1f1b",
    micro_batches=8,
    extra_in_flight=1,
    codec="zero_value",
    fingerprint="ab12",
    input_shapes=((16, 1, 8, 8),),
    input_dtypes=("torch.float32",),
    memory=2 * 1024**3,
    link=1e9,
)


def test_a_plan_comes_back_as_it_was_saved_and_asked_for(tmp_path):
    away = {"tier": "packed", "weights_tier": "host", "parameters_tier": "disk", "device": "cuda:3"}
    one = stage_of("größe", codecs={"relu": "raw"}, gradient_codecs={"": "fp8"}, **away)
    other = stage_of("b", num_parameters=2**70, forward_seconds=1e300, ranks=(1, 2), shares=(3, 1))
    for plan in (PLAN, dataclasses.replace(PLAN, stages=(one, other), memory=None, link=1e-3)):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
    asked = dataclasses.replace(PLAN, asked=Asked(stages=None, ranks=2, cuts=("relu", "pool")))
    asked.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").asked == asked.asked
    assert asked == PLAN, "what was decided is one plan, however it was asked for"
    assert str(asked) == str(PLAN)
    assert str(asked.asked) == "ranks=2 cuts=[relu,pool]"


def test_a_plan_knows_and_prints_what_was_decided():
    assert (PLAN.num_stages, PLAN.num_ranks, PLAN.ranks) == (3, 2, (0, 0, 1))
    assert [PLAN.rank_of(stage, m) for stage in range(3) for m in (0, 5)] == [0, 0, 0, 0, 1, 1]
    assert (PLAN.stages_of_rank, PLAN.cuts) == ([[0, 1], [2]], ("relu", "pool"))
    title, _, first, *_, last, _ = str(PLAN).splitlines()
    for part in ("3 stages on 2 ranks", "1f1b", "1 extra", "8 micro-b", "zero_value", "1 Gbit/s", "2 GiB"):
        assert part in title
    assert first.split() == "0 0 conv1 .. relu (2) 1.2 M 12.3 ms 300 ms 3 MiB 4 KiB 2 KiB".split()
    assert last.split() == "2 1 fc (1) 1.2 M 12.3 ms 300 ms 3 MiB - -".split()


def test_what_stages_differ_in_is_shown_for_each_and_a_lossy_codec_is_called_lossy():
    one = stage_of("a", tier="packed", codecs={"relu": "raw"})
    other = stage_of("b", weights_tier="host", gradient_codecs={"relu": "fp8"})
    plan = dataclasses.replace(PLAN, stages=(one, other))
    assert plan.of_stages("tier") == "packed,device"
    assert "old weights device,host, saved tensors packed,device" in str(plan)
    assert "codec zero_value, relu down raw, relu up fp8 (lossy)" in str(plan)
    assert plan.named_codecs == {("relu", "F", 0): "raw", ("relu", "B", 1): "fp8"}


def places(value, path=()):
    """The path of every value inside a JSON value, itself included."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


def changed(value, path, change):
    """A copy of a JSON value with ``change`` applied to the container and key at ``path``."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copy


PLAN_JSON = json.loads(json.dumps(PLAN.to_json()))
scalars = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def load_text(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return Plan.load(path)


@given(st.sampled_from(list(places(PLAN_JSON))[1:]), values)
def test_any_replaced_value_is_refused_or_makes_a_valid_plan(tmp_path_factory, path, value):
    text = json.dumps(changed(PLAN_JSON, path, lambda inner, key: inner.__setitem__(key, value)))
    try:
        plan = load_text(tmp_path_factory.getbasetemp(), text)
    except PlanError:
        return
    # then it holds what the file said, and can be printed
    assert json.loads(json.dumps(plan.to_json())) == json.loads(text)
    assert str(plan)


OPTIONAL = {
    field.name
    for kind in (Plan, PlanStage)
    for field in dataclasses.fields(kind)
    if not field.default is field.default_factory is dataclasses.MISSING
}
NEEDED = [p for p in places(PLAN_JSON) if p and isinstance(p[-1], str) and not OPTIONAL & {p[0], p[-1]}]


def without(path):
    return json.dumps(changed(PLAN_JSON, path, lambda inner, key: inner.pop(key)))


def test_a_key_that_is_missing_has_its_default_or_is_named_and_no_other_is_taken(tmp_path):
    for where in (), ("stages", 1):
        added = changed(PLAN_JSON, (*where, "pickle"), lambda inner, key: inner.__setitem__(key, 1))
        with pytest.raises(PlanError, match='unknown key "pickle"'):
            load_text(tmp_path, json.dumps(added))
    optional = [path for path in places(PLAN_JSON) if path and path[-1] in OPTIONAL]
    assert len(optional) > 8
    for path in optional:
        assert load_text(tmp_path, without(path)) == PLAN
    for path in NEEDED:
        with pytest.raises(PlanError, match=path[-1]):
            load_text(tmp_path, without(path))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", str(2**60), "true", '"1"', "[]"])
def test_a_float_is_finite_and_exact(tmp_path, number):
    for path in ("stages", 1, "forward_seconds"), ("link",):
        text = json.dumps(changed(PLAN_JSON, path, lambda inner, key: inner.__setitem__(key, "HERE")))
        with pytest.raises(PlanError, match=f"{path[-1]} is of type float, found "):
            load_text(tmp_path, text.replace('"HERE"', number))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is a JSON file"),
        ("[" * 100_000, "is a JSON file"),
        ('{"plan": 1}', "key penstock_plan"),
        ('{"penstock_plan": 4}', "version .* found 4"),
        ('{"penstock_plan": 0}', "version .* found 0"),
        ('{"penstock_plan": true}', "version .* found true"),
        ('{"penstock_plan": 1, "ranks": [0, 1]}', "version 3 here, found 1 in .*; make the plan anew"),
        ('{"penstock_plan": 3}', "lacks the key stages"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, found):
    with pytest.raises(PlanError, match=found):
        load_text(tmp_path, text)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(PlanError, match=f"cannot read the plan {path}"):
            Plan.load(path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"ranks": ()}, r"found ranks \[\]"),
        ({"ranks": (1, 1)}, r"found ranks \[1, 1\]"),
        ({"device": "tpu"}, "device cpu, cuda or cuda:N, found 'tpu'"),
        ({"recompute": True, "tier": "host"}, "found recompute=true and tier host"),
        ({"codecs": {"relu": "zip"}}, "relu: codec is one of raw, .* found 'zip'"),
        ({"gradient_codecs": {"relu": "auto"}}, "relu: .* found 'auto'"),
    ],
)
def test_a_stage_that_nothing_can_run_is_refused(change, found):
    with pytest.raises(PlanError, match=found) as refused:
        stage_of("pool", **change)
    assert "the stage of pool" in str(refused.value)


def two(**changes):
    """Two stages, the first with these changes."""
    return stage_of("a", **changes), stage_of("b")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"stages": (*two(), stage_of("c", ranks=(2,)))}, r"found ranks \[0, 0, 2\]"),
        ({"stages": two(ranks=(1,))[:1]}, "every rank from 0 on"),
        ({"stages": two(ranks=(-1,))}, "every rank from 0 on"),
        ({"stages": two(ranks=(2**70,))}, "every rank from 0 on"),
        ({"weights": "newest"}, "weights is one of .* found 'newest'"),
        ({"stages": two(weights_tier="tape")}, "weights_tier is one of .* found 'tape'"),
        ({"stages": two(parameters_tier="attic")}, "parameters_tier is one of .* found 'attic'"),
        ({"owners": "last"}, "replicas.owner is one of spread, first, found last"),
        ({"owners": "first"}, "owner=first says which replica updates"),
        ({"stages": ()}, "one stage or more"),
        ({"stages": (*two(), stage_of("a"))}, "'a' twice"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": 10**30}, "from 1 to 65536 micro-batches, found micro_batches=10{30}"),
        ({"extra_in_flight": -1}, "never negative"),
        ({"most_extra_in_flight": -1}, "found -1 with extra_in_flight=1 and micro_batches=8"),
        ({"extra_in_flight": 5, "most_extra_in_flight": 1}, "found 1 with extra_in_flight=5"),
        ({"most_extra_in_flight": 9}, "found 9 with extra_in_flight=1 and micro_batches=8"),
        ({"most_extra_in_flight": 10**400}, r"found 10{56}\.\.\. with extra_in_flight=1"),
        ({"memory": 0}, "never negative"),
        ({"link": 0.0}, "never negative"),
        ({"input_shapes": ((-1,),)}, "never negative"),
        ({"stages": two(bytes_forward=-1)}, "never negative"),
        ({"stages": two(forward_seconds=-0.1)}, "never negative"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change, found):
    with pytest.raises(PlanError, match=found):
        dataclasses.replace(PLAN, **change)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("shape", [(10**30,), (2**40, 8)])
def test_inputs_that_no_memory_holds_are_refused(shape, dtype):
    plan = dataclasses.replace(PLAN, input_shapes=(shape,), input_dtypes=(dtype,))
    with pytest.raises(PlanError, match=r"an input of the shape .* is more than the memory"):
        example_of(plan)


def test_the_picture_has_each_stage_its_seconds_and_what_replicas_make_of_them(tmp_path):
    stages = stage_of("conv1", "relu", ranks=(0, 1)), stage_of("fc", ranks=(2,))
    blocks, bars = figure(stages, title="a plan").axes
    drawn = [patch for patch in blocks.patches if patch.get_gid()]
    assert [patch.get_gid() for patch in drawn] == ["stage 0", "stage 1"]
    assert drawn[0].get_facecolor() != drawn[1].get_facecolor()
    assert {"ranks 0,1", "rank 2", "4 KiB", "2 KiB"} <= {text.get_text() for text in blocks.texts}
    rectangles = [bar for bar in bars.patches if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in rectangles] == pytest.approx([12.3 / 2, 12.3, 150, 300])
    assert [bar.get_y() for bar in rectangles] == pytest.approx([0, 0, 12.3 / 2, 12.3])  # backward on forward
    assert {text.get_text() for text in bars.texts} == {"156 ms (312 ms by 2)", "312 ms"}
    mib = 2**20
    counted = [dataclasses.replace(one, weight_bytes=mib, frame_bytes=mib // 2) for one in stages]
    held = figure(counted, title="a plan").axes[2]
    rectangles = [bar for bar in held.patches if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in rectangles] == [1, 1, 2, 2, 0.5, 0.5]  # weights, saved, frames
    assert [text.get_text() for text in held.texts] == ["3.5 MiB", "3.5 MiB"]
    PLAN.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
