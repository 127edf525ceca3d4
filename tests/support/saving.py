"""A stage reduced to what its saved tensors need: layers that run one by one, and nothing else."""

import threading
import time
import weakref

import torch
from torch import fx, nn

from penstock.compression.errors import StageError
from penstock.stages.memory.activations import KeepOnDevice, ParameterFilter, SavedActivations
from penstock.stages.memory.stores import Store
from penstock.stages.tracing.layers import Layer, Parts, run_layer


def memory_threads():
    """The threads that pack and store, of this test or of one that has just ended."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-memory-")]


def settle():
    """Wait until none is left: one that a backward started ends by itself."""
    deadline = time.monotonic() + 5
    while memory_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def busy(worker):
    """Keep a thread busy until the gate that this returns is set."""
    gate, begun = threading.Event(), threading.Event()
    worker.submit(lambda: (begun.set(), gate.wait(10)))
    assert begun.wait(10)
    return gate


def ends(work):
    """Return or raise the result of ``work`` in a thread of its own, which ends."""
    found = []

    def run():
        try:
            found.append(work())
        except StageError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found
    return found[0]


class Square(nn.Module):
    """Saves its input, and nothing else holds it."""

    def forward(self, x):
        return x * x


class Net:
    """A traced model as layers; ``run`` forgets every value with its last reader, as a stage does."""

    def __init__(self, model):
        self.model, self.trace = model, fx.symbolic_trace(model)
        self.parts = Parts(dict(self.trace.named_modules()), dict(self.trace.named_parameters()))
        nodes = list(self.trace.graph.nodes)
        for node in nodes:
            if node.op == "call_method":  # a record of a run has functions alone
                node.op, node.target = "call_function", getattr(torch.Tensor, node.target)
        self.input, self.output = nodes[0], nodes[-1].args[0]
        self.layers = [Layer(node=node, module="") for node in nodes[1:-1]]

    def run(self, x, saved, *, knows=True):
        env = {self.input: x}
        del x
        last = {node: layer.node for layer in self.layers for node in layer.node.all_input_nodes}
        done, observe = None, getattr(saved, "layer_done", lambda *_: None)
        for layer in self.layers:
            following = layer if knows else None
            observe(done, following)
            done = following
            env[layer.node] = run_layer(layer, env, self.parts, samples=4)
            for node in [node for node in env if last.get(node) is layer.node]:
                del env[node]
        observe(done, None)
        return env[self.output]


def saved_for(net, *, store=None, codec="zero_value", min_bytes=1, thread=None):
    """Saver of the saved tensors of ``net``."""
    return SavedActivations(
        Store() if store is None else store,
        parameters=ParameterFilter([*net.model.parameters(), *net.model.buffers()]),
        codec=codec,
        min_bytes=min_bytes,
        modules=net.parts.modules,
        thread=thread,
    )


def behind(thread):
    """Wait until what may leave has left, and what was asked for is back."""
    thread._queue(None, decide=True)
    thread._worker.wait()
    with thread._settled:
        thread._settled.wait_for(lambda: not thread._behind or thread._worker.failed)
    thread._worker.drain()


def wait(saved):
    """Wait until everything that was to move has moved; raises what a thread raised."""
    behind(saved._thread)
    for worker in saved._packer._workers:
        worker.drain()


def fetch(saved):
    """Begin to bring back all that micro-batch 0 saved, and let no more of it leave."""
    run = saved._micro_batches[0]
    with run.lock:
        alive, references = run.alive(), []
        run.waiting.clear()
    for storage in alive:
        storage.transition("resident", only_from="evicting")
        if storage.transition("loading", only_from="offloaded"):
            references.append(weakref.ref(storage))
    saved._packer.bring(references)


def forward(net, saved, x):
    """The output of a forward of micro-batch 0, which is over."""
    with saved.forward(0):
        out = net.run(x, saved)
    saved.offload(0, {})
    return out


def gradients(net, x, settings, *, knows=True):
    """One forward and backward: output and gradients, and what kept the saved tensors (None: autograd)."""
    saved = KeepOnDevice() if settings is None else saved_for(net, **settings)
    net.model.zero_grad()
    torch.manual_seed(7)
    with saved.forward(0):
        out = net.run(x.clone(), saved, knows=knows)
    saved.offload(0, {})
    if isinstance(saved, SavedActivations):
        wait(saved)
    edge, result = torch.autograd.graph.get_gradient_edge(out), out.detach().clone()
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    del out
    if isinstance(saved, SavedActivations):
        fetch(saved)
    saved.ready(0)
    torch.autograd.backward([edge], [weight])
    saved.drop(0)
    saved.close()
    return [result, *(p.grad.clone() for p in net.model.parameters())], saved
