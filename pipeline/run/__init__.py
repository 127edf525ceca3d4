"""A run by options: data, model and plan are made, ranks started, steps counted, and results written.

``train.py`` is the way through it. It may use everything below, and nothing below may know that a run has a
folder, a console or a picture."""
