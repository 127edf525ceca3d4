"""The loops that touch every byte, compiled on the machine they run on: a user needs no compiler."""
