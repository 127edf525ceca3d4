"""Versions of a stage's weights: which one a micro-batch sees, and where one waits that nobody reads now.

``policies.py`` has the table of all. It must not know the order of a schedule: only who is in flight."""
