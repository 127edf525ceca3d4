"""Activations and parameters that leave the device between their uses: packed, in host memory or on disk.

Nothing here knows schedules or ranks: a stage reports when a layer is done, when a micro-batch has gone on,
and when it is wanted back. Imports go up this list only:

    offload.py                                              the saved tensors of any with-block
    activations.py                                          those of a stage, and hooks on what autograd saves
    prefetch.py                                             the memory thread: what leaves and comes, and when
    parameter_offload.py  evictable_tensor.py               parameters, gradients and optimizer states
    packer.py                                               threads, codec, compact forms that layers prove
    saved_storage.py                                        one storage and its states
    stores.py  disk.py                                      the tiers
    byte_budget.py                                          bytes by tier, and their limits
    slots.py                                                slots by lifetimes
"""
