"""Measuring a network, and the plan as data: profile, plan, its stages, its rules, and what a rank holds.

Who runs a plan and who searches for one (``pipeline/planner/``) both read it here; nothing here knows how a
stage runs, or touches a process, device or link."""
