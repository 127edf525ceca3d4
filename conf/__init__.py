"""Every option of the command line: groups in YAML, types and rules in ``schema``.

Hydra finds the YAML files through this package, so an installed copy needs no path to them."""
