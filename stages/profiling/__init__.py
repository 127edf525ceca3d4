"""Profiles of a traced model: time, memory and dependencies of its layers, as measured in one iteration."""
