"""From layers to a plan: what each costs, where to cut, which rank runs which stage, and the plan as data.

``partition.py`` is the way in. It must not know how a stage runs, and touches no process, device or link: it
works on the measured profile alone."""
