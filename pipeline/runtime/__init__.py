"""A step as it runs: batches, messages, engine, and what is measured of it.

Programs come from ``schedules``, bytes go through ``distributed``, updates are made by ``optimizer``. It must
not know the command line, folders, pictures or data sets: ``pipeline.py`` puts it together for people who
write Python, ``run`` for those who type options."""
