"""A stand-in for trials of writing over gradients: believes that every one has been made, and went well."""

from penstock.stages.stage.weights_first import Reuse


class Believing(dict):
    """Verdicts that are all good."""

    def get(self, key, default=None):
        return True

    def __contains__(self, key):
        return True


def believing():
    """A Reuse that writes over all that it may from the first backward on, however small."""
    reuse = Reuse(least=0)
    reuse.verdicts = Believing()
    return reuse
