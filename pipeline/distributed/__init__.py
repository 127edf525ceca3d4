"""Ranks: the processes or threads of a run, and what travels between them.

Starts local ranks and tells how they ended; the group and its store; frames as bytes over gloo or inside one
process. It must not know tensors' meaning, schedules' order, models or options: what it carries was packed
above, and what it waits for is told to it."""
