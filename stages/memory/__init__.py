"""What a stage keeps between a forward and its backward, and where: packed, in host memory, or as it is; its
parameters, where they wait for the layers that read them.

``saved.py`` is the way in for stages, ``offload.py`` for everybody else's loops; ``saved_storage.py`` draws
the states of what is kept. It must not know schedules or ranks: it is told when a layer is done, when a
micro-batch has gone on, and when it is wanted back. Imports go up this list only:

    mirrored.py               what a walk tells, of saved tensors and of parameters
    mirror.py  parameter_memory.py  readers.py  tensor_memory.py    parameters that come and go
    saved.py  offload.py      by layer of a stage; by with-block
    thread.py  saved_run.py   the memory thread: what leaves and comes, when; what one micro-batch saved
    timeline.py  options.py   when what was saved is read; how far ahead it moves
    hooks.py  recomputed.py   what autograd saves; the same, made again
    packer.py                 threads, codec, counters
    stores.py  host_store.py  store.py    tiers
    wire_frame.py             frames that were sent or received already
    saved_storage.py          one storage and its states
    layer_aware.py  tensor_view.py  copy_stream.py  worker.py"""
