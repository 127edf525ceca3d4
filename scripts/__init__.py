"""The commands of ``penstock``, which ``command.py`` lists, and short programs to copy from.

It reads options and words refusals. It must not hold anything that a program would want to import."""
