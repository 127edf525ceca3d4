"""From a model and an example to layers and values, proven to be what the model does.

``tracer.py`` is the way in; ``capture`` records. What a person changes later is held against the record here,
too. It must not know stages, ranks, schedules, frames or plans."""
