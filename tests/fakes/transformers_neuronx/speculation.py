"""Speculation with the host in between, by name only."""

_NAMES = (
    "SpeculativeGenerator",
    "TreeSpeculativeGenerator",
    "DraftProvider",
    "DraftModelForSpeculation",
    "DraftModelForTreeSpeculation",
    "TokenAcceptor",
    "DefaultTokenAcceptor",
    "ReferenceTokenAcceptor",
    "TokenTreeAcceptor",
    "DefaultTokenTreeAcceptor",
)


class _Unplayed:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("the fake does not speculate on the host")


globals().update({name: type(name, (_Unplayed,), {}) for name in _NAMES})
