"""The layers between two cuts, run forward and backward without changing a bit.

``stage.py`` is the way in. It knows layers and autograd, and must not know ranks, frames or codecs."""
