"""Micro-batches through stages, on ranks: schedules, transport, updates, one step, and the command ``run``.

``pipeline.py`` puts them together for people who write Python; networks and data sets are next to it. It
must not know how bytes shrink or how a layer is run: the floors below do."""
