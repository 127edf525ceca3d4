"""Made-up profiles: small networks in whole milliseconds and bytes: sums are exact, ties frequent."""

from hypothesis import strategies as st

import penstock
from penstock.stages.profiling.network_profile import LayerProfile, Profile, ValueProfile

MS = 1e-3


def layer_of(name, module="", forward=1, backward=2, size=0, saved=0, packed=None):
    return LayerProfile(
        name=name,
        module=module,
        forward_seconds=forward * MS,
        backward_seconds=backward * MS,
        parameters=(f"{name}.weight",) if size else (),
        num_parameters=size // 4,
        parameter_bytes=size,
        saved_bytes=saved,
        packed_bytes=packed,
    )


def value_of(
    producer, users, num_bytes=1000, requires_grad=True, zero_fraction=0.5, costs=None, gradient_costs=None
):
    return ValueProfile(
        name=f"v{producer}",
        producer=producer,
        users=tuple(users),
        num_bytes=num_bytes,
        requires_grad=requires_grad,
        zero_fraction=zero_fraction,
        costs=costs or {},
        gradient_costs=gradient_costs or {},
    )


def profile_of(layers, values=(), refused=None):
    return Profile(
        layers=tuple(layers),
        values=tuple(values),
        refused=refused or {},
        fingerprint="ab12",
        input_shapes=((16, 8),),
        input_dtypes=("torch.float32",),
        num_samples=16,
        threads=1,
        device="cpu",
        torch="2.11",
    )


NET = profile_of(
    [
        layer_of("conv1", "conv1", size=400),
        layer_of("layer1_0_conv", "layer1.0.conv", size=800),
        layer_of("layer1_0_relu", "layer1.0.relu"),
        layer_of("layer1_1_conv", "layer1.1.conv", size=800),
        layer_of("add", "layer1.1"),
        layer_of("layer10_conv", "layer10.conv", size=400),
        layer_of("flatten"),
        layer_of("fc", "fc", size=40),
    ],
    [value_of(i, [i + 1]) for i in range(-1, 8)],
    refused={3: "two tensors of one mutated storage are alive"},
)


@st.composite
def profiles(draw):
    """Small profiles in whole milliseconds and bytes: sums are exact, ties and costs within 5 % frequent."""
    num_layers = draw(st.integers(1, 7))
    small = st.integers(0, 4)
    unit = draw(st.sampled_from([1, 20]))  # the longer a layer takes, the more costs are nearly equal
    seconds = st.builds(lambda whole, part: unit * whole + part % unit, small, small)
    cost = st.tuples(small, small.map(MS.__mul__), small.map(MS.__mul__))
    costs = st.fixed_dictionaries({"raw": small.map(lambda n: (n, 0.0, 0.0)), "zero_value": cost})
    layers = [
        layer_of(f"l{i}", forward=draw(seconds), backward=draw(seconds), size=draw(small), saved=draw(small))
        for i in range(num_layers)
    ]
    values = []
    for producer in range(-1, num_layers):
        users = draw(st.lists(st.integers(max(producer + 1, 0), num_layers), max_size=3))
        zeros = draw(st.sampled_from([0.0, 0.5, 1.0]))
        tried = [draw(costs) for _ in range(2)] if draw(st.booleans()) else []
        values.append(value_of(producer, sorted(users), draw(small), draw(st.booleans()), zeros, *tried))
    refused = draw(st.sets(st.integers(0, num_layers - 1), max_size=2))
    return profile_of(layers, values, dict.fromkeys(refused, "it says so"))


def measured(model, x):
    """The trace of a true model and its profile."""
    graph = penstock.trace(model, (x,))
    return graph, penstock.measure(graph, (x,), repeats=1)


NODE = "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
GRAPH = "\n".join([
    NODE.format("node2", "ReLU(inplace)", 1.5, 0.5, 800.0, 0.0),
    NODE.format("node1", "Linear(in_features=4, out_features=4)", 2.0, 4.0, "[600.0; 200.0]", 80.0),
    NODE.format("node3", "Add(a, b)", 1.0, 1.0, 400.0, 0.0),
    *("\tnode1 -- node2", "\tnode1 -- node3", "\tnode2 -- node3"),
])  # fmt: skip
"""A graph of PipeDream: three layers, the last of which reads both others."""
