"""Every exception that Penstock raises on purpose.

They form one small tree, so that a caller can catch the kind that is meant.
"""


class PenstockError(Exception):
    """Base of all of them; the message is one sentence: the rule, what was found, the remedy."""


class CodecError(PenstockError):
    """A tensor that cannot be packed, a codec that does not exist, or a frame that is malformed."""


class PlanError(PenstockError):
    """A model, graph, cut or plan that cannot be trained as asked."""


class Disagreement(PlanError):
    """A difference between what ranks were given, or a refusal by one; every rank raises it."""


class ScheduleError(PenstockError):
    """A schedule that does not exist, does not suit the micro-batches, or would deadlock."""


class TransportError(PenstockError):
    """A rank, link or deadline that failed."""


class ConfigError(PenstockError):
    """An option, a name or a data set that is not known or does not fit."""


class StageError(PenstockError):
    """A layer that failed while its stage was running."""


class CheckpointError(PenstockError):
    """A checkpoint that is not there, is not whole, or was altered since it was written."""
