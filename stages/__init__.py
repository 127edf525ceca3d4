"""WHAT runs where: graph, profile, plan and stage."""
