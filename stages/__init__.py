"""WHAT runs where: tracing, planner, stage, weights, memory; and small helpers that all of them use.

A stage is some layers of a network. This floor knows layers, values and versions of weights. It must not know
ranks, schedules' order, transports or options: those are above."""
