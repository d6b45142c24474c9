"""Trees of drafts."""


class EagleSpeculativeDecoder:
    def __init__(self, draft, target, k=2, pad_token_id=0, token_tree=None, **kwargs):
        assert token_tree is not None, "Need to provide a token tree."
        raise NotImplementedError("the fake has no trees")
