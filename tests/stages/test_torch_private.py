"""Private names of torch: each test says what of Penstock breaks when a release changes one."""

import ast
import sys
from typing import Any

import torch
from checkout import ROOT, files
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from penstock.stages import torch_private as private

# Hosts of torch have names of their own: FSDP2, and tensors of its pipelines.
OTHERS = ("stages/torch_private.py", "pipeline/integrations/")
PRIVATE = {*private.HOOKS} | {
    *"_cdata _use_count _version _base _is_view _schema _parameters _buffers _is_zerotensor".split(),
    *"_new_with_weak_ptr _unsafe_preserve_version_counter _post_accumulate_grad_hooks".split(),
    *"_compiled_call_impl _execution_engine _sequence_nr _NormBase _worker_pids_set".split(),
    *"_optimizer_step_pre_hooks _optimizer_step_post_hooks".split(),
}


def private_names(source: str) -> set[str]:
    """Names of torch that begin with one underscore and that ``source`` imports or reads."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {part for part in parts if part.startswith("_") and part != "__future__"}
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            found |= {node.attr} & PRIVATE
            if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr.startswith("_"):
                found.add(node.attr)
    return found - {"__version__", "__file__"}


def test_one_file_alone_names_what_torch_does_not_promise():
    floors = ("stages", "pipeline", "compression")
    paths = [path.as_posix() for path in files() if path.suffix == ".py" and path.parts[0] in floors]
    read = {path: private_names((ROOT / path).read_text()) for path in paths if not path.startswith(OTHERS)}
    assert len(read) > 40
    assert {path: names for path, names in read.items() if names} == {}
    assert private_names("from torch.utils._x import y\ntorch._C.z\nt._version\nself._base") == {
        "_x", "_C", "_version"
    }  # fmt: skip


def test_kernels_of_a_scaler_and_a_clip_are_those_of_torch():
    """Overflows and norms over all stages have the bits of GradScaler and clip_grad_norm_."""
    gradients: list[Any] = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [norm.item() for norm in private.foreach_norm(gradients)] == [5.0, 1.0]
    ((device, dtype),) = private.group_tensors([gradients])
    assert (device, dtype) == (torch.device("cpu"), torch.float32)
    overflow = torch.zeros(())
    private.unscale([gradients[0]], overflow, torch.tensor(0.5))
    assert (gradients[0].tolist(), overflow.item()) == ([1.5, 2.0], 0.0)
    scale, tracker = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    private.update_scale(scale, tracker, torch.tensor(1.0), 2.0, 0.5, 2000)
    assert scale.item() == 2.0


def test_hooks_on_steps_are_seen():
    """An optimizer whose steps somebody watches is not taken for one that steps parameters by themselves."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert not private.has_step_hooks(optimizer)
    assert not private.has_global_step_hooks()
    optimizer.register_step_pre_hook(lambda *_: None)
    assert private.has_step_hooks(optimizer)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert private.has_global_step_hooks()
    handle.remove()


def test_a_dead_process_of_a_loader_is_not_reported_in_the_middle_of_a_step():
    """torch's handler of SIGCHLD raises wherever this process is."""
    data: Any = [0, 1]
    batches: Any = iter(torch.utils.data.DataLoader(data, num_workers=1))
    assert batches._worker_pids_set
    private.ignore_worker_deaths(batches)
    assert not batches._worker_pids_set
    assert len(list(batches)) == 2


def test_views_have_the_memory_and_the_count_of_writes_of_their_base():
    """The probe finds tensors in one memory and writes to it."""
    for device in ("cpu", "meta"):
        base = torch.zeros(4, device=device)
        view = base[1:]
        assert private.memory_id(base) == private.memory_id(view) == private.memory_id(base.untyped_storage())
        assert private.memory_id(base) != private.memory_id(torch.zeros(4, device=device))
        before = private.version_of(base)
        view.add_(1)
        assert private.version_of(base) == private.version_of(view) == before + 1
        assert private.is_view(view)
        assert not private.is_view(base)
        assert private.base_of(view) is private.base_of(base) is base


def test_a_write_can_be_left_uncounted():
    """Stashed weights are put in place of newer ones under the eyes of autograd."""
    tensor = torch.zeros(3)
    with private.preserve_version_counter(tensor):
        tensor.add_(1)
    assert private.version_of(tensor) == 0


def test_holders_of_memory_are_counted_and_a_storage_is_found_while_there_is_one():
    """Memory that a fetch comes into is free while nobody else holds it; what was brought back for one read
    is there for the next while its reader lives."""
    tensor = torch.zeros(3)
    storage = tensor.untyped_storage()
    before = private.num_storage_holders(storage)
    view = tensor[1:]
    assert private.num_storage_holders(storage) > before
    del view, storage
    reference = StorageWeakRef(tensor.untyped_storage())
    found = private.storage_behind(reference)
    assert found is not None
    assert private.memory_id(found) == private.memory_id(tensor)
    del tensor, found
    assert private.storage_behind(reference) is None


def test_tensors_without_memory_of_their_own_are_known():
    """Zeros have nothing that could be taken away, and over a level of functorch nothing is written."""
    assert private.is_zero_tensor(getattr(torch, "_efficientzerotensor")(3))  # noqa: B009
    assert not private.is_zero_tensor(torch.zeros(3))
    seen = []
    torch.func.vmap(lambda x: seen.append(private.is_functorch_wrapped(x)) or x)(torch.zeros(2))
    assert seen == [True]
    assert not private.is_functorch_wrapped(torch.zeros(2))


def test_values_of_a_sparse_tensor_are_read_as_they_are():
    """A guard looks for NaN in sparse gradients, which are rarely coalesced."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    assert not sparse.is_coalesced()
    assert private.values_of(sparse).tolist() == [1.0, 2.0]


def test_hooks_of_a_gradient_are_seen():
    """Zeros of a ReLU stop no gradient that somebody looks at."""
    tensor = torch.zeros(2, requires_grad=True)
    assert not private.has_gradient_hooks(tensor)
    handle = tensor.register_hook(lambda gradient: gradient)
    other = tensor.register_post_accumulate_grad_hook(lambda tensor: None)
    assert private.has_gradient_hooks(tensor)
    numbers = [*map(list, private.gradient_hooks(tensor))]  # an offload is first, last
    assert numbers == [[handle.id], [other.id]]


def test_the_node_that_runs_is_known():
    """The profile counts the readers of a saved tensor."""
    assert private.current_node() is None
    seen = []

    def unpack(tensor):
        seen.append(private.current_node())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        torch.ones(2, requires_grad=True).exp().sin().sum().backward()
    assert [name for name, _ in seen] == ["SinBackward0", "ExpBackward0"]
    assert len(set(seen)) == 2


def test_the_engine_adds_gradients_as_backward_does():
    """Every backward of a stage runs by it."""
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    root = weight * 3 + other
    edge = torch.autograd.graph.get_gradient_edge(weight)
    private.run_engine((root,), (torch.full((2,), 2.0),), (edge,), retain=True)
    assert weight.grad is not None
    assert (weight.grad.tolist(), other.grad) == ([6.0, 6.0], None)
    private.run_engine((torch.autograd.graph.get_gradient_edge(root),), (torch.ones(2),), (), retain=False)
    assert other.grad is not None
    assert (weight.grad.tolist(), other.grad.tolist()) == ([9.0, 9.0], [1.0, 1.0])


def test_saved_tensors_of_a_node_take_hooks():
    """A backward in two halves lets go of what its first half read."""
    right = torch.ones(3, 2, requires_grad=True)
    product = torch.ones(2, 3, requires_grad=True) @ right
    node = product.grad_fn
    assert node is not None
    assert {"self", "mat2"} <= {*private.saved_names(type(node))}
    private.saved_tensor(node, "self").register_hooks(lambda _: None, lambda _: torch.zeros(2, 3))
    product.sum().backward()
    assert right.grad is not None
    assert right.grad.count_nonzero() == 0  # which was computed from what the hook gave


def test_the_backend_of_a_convolution_is_told_from_its_node():
    """Its input is given up before the backward where only its geometry is read."""
    convolution = nn.Conv2d(2, 3, 3)
    given = torch.ones(1, 2, 5, 5)
    weight, backend_of = private.convolution_backend(convolution(given).grad_fn)
    assert weight.shape == convolution.weight.shape
    assert "ConvBackend." in backend_of(given)


def test_modules_register_parts_and_hooks_under_these_names_and_norms_have_one_class():
    """Guards compare them before every step."""
    module = nn.Linear(2, 2)
    assert {*private.REGISTERED, *private.HOOKS} <= vars(module).keys()
    assert "_flat_weight_refs" in private.INTERNAL
    assert "_flat_weight_refs" in vars(nn.LSTM(1, 1))
    module.register_forward_pre_hook(lambda *_: None)
    assert [name for name in private.HOOKS if vars(module)[name]] == [private.FORWARD_PRE_HOOKS]
    before = private.hooks_on_all_modules()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert private.hooks_on_all_modules() != before
    handle.remove()
    assert private.hooks_on_all_modules() == before
    # Statistics of these are read by no backward in train mode.
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2)):
        assert isinstance(norm, private.BatchOrInstanceNorm)
    assert not isinstance(nn.LayerNorm(2), private.BatchOrInstanceNorm)


def test_compiled_modules_are_known(monkeypatch):
    """A compiled module is one layer."""
    module = nn.Linear(2, 2)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)
    kind = private.optimized_module()
    assert kind is not None
    assert isinstance(torch.compile(nn.Linear(2, 2), backend="eager"), kind)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert private.optimized_module() is None


def test_a_paused_mode_sees_nothing():
    """A layer runs with no mode around it while it is recorded."""
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    with Mode() as mode:
        with private.paused(mode):
            torch.zeros(2).sum()
        assert seen == []
        with Mode(), private.paused(mode):  # another one is the innermost
            torch.ones(2)
    assert seen != []


def test_schemas_say_what_an_operation_writes_to():
    """Runs on the meta device count writes by them."""
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] == ["self"]

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    assert private.dispatch_mode() is None
    with Mode() as mode:
        assert private.dispatch_mode() is mode


@fx.wrap
def marked(tensor):
    return tensor


def test_marked_functions_are_listed_and_methods_of_a_tensor_belong_to_one_class():
    """A function marked with ``torch.fx.wrap`` is one layer; a method runs torch's own code."""
    assert vars(private.TensorBase)["add"].__objclass__ is private.TensorBase
    assert (globals(), "marked") in [(frame, name) for frame, name in private.wrapped_functions()]


def test_structures_are_flattened_and_put_together():
    """Results of layers are values by the leaves that pytree names, and None is one."""
    leaves, spec = private.tree_flatten({"a": (1, None), "b": [torch.Size([2])]})
    assert (leaves, private.tree_unflatten(leaves, spec)["a"]) == ([1, None, 2], (1, None))
    assert private.tree_leaves((1, [2])) == [1, 2]
    assert private.tree_is_leaf(3)
    assert private.tree_map(lambda n: n + 1, [1, (2,)]) == [2, (3,)]
    assert private.tree_map_only(str, str.upper, ["a", 1]) == ["A", 1]
    assert private.pytree.keystr(private.pytree.tree_flatten_with_path({"a": 1})[0][0][0]) == "['a']"
