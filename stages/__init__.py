"""A network, cut: its trace, profile and plan, its stages, their memory and weight versions; small helpers.

A stage is some layers of a network. This floor knows layers, values and versions of weights. It must not know
ranks, schedules' order, transports or options: those are above."""
