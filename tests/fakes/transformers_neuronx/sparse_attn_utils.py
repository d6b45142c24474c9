"""Sparse attention's configuration; nothing here computes with it."""


class SparseAttnConfig:
    def __init__(
        self, attn_type, causal=False, sparse_attn_config=None, same_mask_per_layer=True, sparse_mask_dict=None
    ):
        assert attn_type in ("blk_sparse", "window", "custom"), f"attn_type {attn_type} is not supported"
        self.attn_type = attn_type
        self.causal = causal
        self.sparse_attn_config = sparse_attn_config
        self.same_mask_per_layer = same_mask_per_layer
        self.sparse_mask_dict = sparse_mask_dict
