"""Which version of its weights a micro-batch sees, and where a version waits that nobody reads now.

``policies.py`` has the table of all. It must not know the order of a schedule: only who is in flight."""
