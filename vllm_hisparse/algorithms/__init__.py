"""Sparse attention algorithms: what each keeps of the keys, and how it selects from them."""
