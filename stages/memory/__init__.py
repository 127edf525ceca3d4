"""What a stage keeps between a forward and its backward, and where: packed, in host memory, or as it is.

``saved.py`` is the way in for stages, ``offload.py`` for everybody else's loops. It must not know schedules
or ranks: it is told when a micro-batch has gone on, and when it is wanted back."""
