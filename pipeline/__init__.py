"""WHEN it runs: schedules order, ranks carry, weights update, runtime runs, and run is the command.

``pipeline.py`` puts them together for people who write Python; networks and data sets stand beside it. It
must not know how bytes shrink or how a layer is run: the floors below do."""
