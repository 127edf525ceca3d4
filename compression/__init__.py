"""Frames, codecs and their kernels (floor 1: imports nothing of the other floors).

Python 3.14 has a standard package of this name, and ``gzip`` imports it: found from the checkout root, this
one lends it its name.
"""

# Found from the checkout root: hand on the standard library's modules (PEP 784).
if __name__ == "compression":
    import sysconfig

    __path__.append(f"{sysconfig.get_path('stdlib')}/compression")
