"""From a profile to a plan: where to cut, which rank runs which stage, under limits of links and memory.

``partition.py`` is the way in. It works on measured numbers alone, and asks the schedules' own programs how
many micro-batches are in flight and which versions of the weights live; it touches no process or device."""
