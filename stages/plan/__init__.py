"""A plan as data: the stages, their memory, the rules that they keep, and its pictures.

A search for a plan (``pipeline/partition/``) and a run of one both read it here."""
