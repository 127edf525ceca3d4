"""WHEN it runs: schedules, engine, transport and what a person sees."""
